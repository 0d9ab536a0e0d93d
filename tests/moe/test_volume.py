"""The volume model against formulas, a slow count, and hand-worked cases."""

import json
import math

import numpy as np
import pytest
from volumes import choose, make, on

from jax_turbobus.__main__ import main
from jax_turbobus.moe import _volume
from jax_turbobus.moe._traffic import PEERS, SCHEDULES
from jax_turbobus.topology import Topology


def random_ids(seed, ranks=4, tokens=64, k=3, experts=12, masked=0.0, repeats=False):
    rng = np.random.default_rng(seed)
    if repeats:
        ids = rng.integers(0, experts, (ranks, tokens, k))
    else:
        ids = rng.random((ranks, tokens, experts)).argsort(axis=-1)[..., :k]
    ids[rng.random(ids.shape) < masked] = -1
    return ids.astype(np.int32)


@pytest.mark.parametrize(
    ("experts", "k", "ranks"), [(32, 2, 4), (128, 8, 8), (8, 1, 2)]
)
def test_expected_volumes_are_the_formulas(experts, k, ranks):
    v = make(num_experts=experts, top_k=k, num_ranks=ranks)
    n, row = 1024, 256 * 4
    p = 1 - math.comb(experts - experts // ranks, k) / math.comb(experts, k)
    one_way = {
        "broadcast": n * (ranks - 1) * row,
        "packed_no_dedup": n * k * (ranks - 1) / ranks * row,
        "packed": n * (ranks - 1) * p * row,
        "ragged_all_to_all": n * k * (ranks - 1) / ranks * row,
        "allgather_filter": n * (ranks - 1) * row,
    }
    for name, expected in one_way.items():
        np.testing.assert_allclose(v[name].dispatch.sum(axis=1), expected, err_msg=name)
        np.testing.assert_allclose(v[name].dispatch.sum(axis=0), expected, err_msg=name)
    np.testing.assert_allclose(v["packed"].combine, v["packed"].dispatch.T)


def test_without_dedup_packed_beats_broadcast_only_if_k_is_less_than_ranks():
    for k in (1, 2, 3, 4, 6, 8):
        v = make(num_experts=128, top_k=k)
        packed, broadcast = v["packed_no_dedup"].dispatch, v["broadcast"].dispatch
        if k == 4:
            np.testing.assert_allclose(packed.sum(), broadcast.sum())
        else:
            assert (packed.sum() < broadcast.sum()) == (k < 4)
        assert v["packed"].dispatch.sum() < broadcast.sum()


def test_padded_peers_move_the_worst_case():
    v = make(num_experts=128)
    assert v["padded_all_to_all"].dispatch.sum() == 4 * 3 * 1024 * 2 * 1024
    ratio = v["padded_all_to_all"].dispatch.sum() / v["packed_no_dedup"].dispatch.sum()
    np.testing.assert_allclose(ratio, 4.0)
    assert v["one_copy_padded"].dispatch.sum() == 4 * 3 * 1024 * 1024
    # 8 local experts x ceil(1.25 * 1024 * 2 / 32) slots.
    assert make()["capacity_scatter"].dispatch[0, 1] == 8 * 80 * 1024
    assert make()["capacity_scatter"].may_drop


@pytest.mark.parametrize("masked", [0.0, 0.3])
@pytest.mark.parametrize("repeats", [False, True])
def test_exact_counts_equal_a_slow_count(masked, repeats):
    ids = random_ids(0, masked=masked, repeats=repeats)
    copies, unique, slots = (np.zeros((4, 4)) for _ in range(3))
    for source in range(4):
        for token in ids[source]:
            experts = [e for e in token if e >= 0]
            for e in set(experts):
                copies[source, e // 3] += 1
            for destination in {e // 3 for e in experts}:
                unique[source, destination] += 1
            for e in experts:
                slots[source, e // 3] += 1
    v = make(tokens_per_rank=64, num_experts=12, top_k=3, expert_ids=ids)
    assert v.counts.is_exact
    np.testing.assert_array_equal(v.counts.copies, copies)
    np.testing.assert_array_equal(v.counts.unique, unique)
    np.testing.assert_array_equal(v.counts.slots, slots)
    np.testing.assert_array_equal(v.counts.received_rows, copies.sum(axis=0))
    off = ~np.eye(4, dtype=bool)
    assert v["packed"].dispatch.sum() == unique[off].sum() * 256 * 4
    assert v["ragged_all_to_all"].dispatch.sum() == slots[off].sum() * 256 * 4
    flat = make(
        tokens_per_rank=64, num_experts=12, top_k=3, expert_ids=ids.reshape(-1, 3)
    )
    assert flat["packed"].total_bytes == v["packed"].total_bytes


def test_expected_counts_are_the_mean_of_exact_ones():
    mean = np.mean(
        [
            make(
                num_experts=12,
                top_k=3,
                tokens_per_rank=64,
                expert_ids=random_ids(seed),
            ).counts.unique
            for seed in range(200)
        ],
        axis=0,
    )
    expected = make(num_experts=12, top_k=3, tokens_per_rank=64).counts.unique
    np.testing.assert_allclose(mean, expected, rtol=0.03)


def test_what_a_rank_keeps_crosses_no_link():
    ids = np.zeros((4, 16, 1), np.int32) + np.arange(4)[:, None, None]
    v = make(tokens_per_rank=16, num_experts=4, top_k=1, expert_ids=ids)
    assert v["packed"].dispatch.sum() == 0
    assert v["packed"].combine.sum() == 0
    assert v["broadcast"].dispatch.sum() > 0


def test_link_bytes_add_up_to_what_ranks_send():
    v = make()
    for name in (*SCHEDULES, *PEERS):
        links = v.link_bytes(name)
        out = [links[f"rank {r} out"] for r in range(4)]
        into = [links[f"rank {r} in"] for r in range(4)]
        np.testing.assert_allclose(out, v[name].sent_bytes)
        np.testing.assert_allclose(into, v[name].received_bytes)


def test_required_recv_capacity():
    sizes = {"tokens_per_rank": 64, "num_experts": 12, "top_k": 4, "num_ranks": 4}
    assert _volume.required_recv_capacity(**sizes) == 4 * 64 * 3
    assert _volume.required_recv_capacity(**sizes, slack=1.25) == 320
    assert _volume.required_recv_capacity(**sizes, slack=100.0) == 4 * 64 * 3
    ids = random_ids(3, k=4)
    v = make(tokens_per_rank=64, num_experts=12, top_k=4, expert_ids=ids)
    need = _volume.required_recv_capacity(**sizes, expert_ids=ids)
    assert need == v.counts.received_rows.max()
    everything_to_one = np.broadcast_to(np.arange(4), (4, 64, 4)).astype(np.int32) % 3
    assert _volume.required_recv_capacity(**sizes, expert_ids=everything_to_one) == 768


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts": 10}, ValueError, "num_experts: expected a multiple of num_r"),
        ({"top_k": 33}, ValueError, "top_k: expected at most num_experts=32"),
        ({"top_k": 0}, ValueError, "top_k: expected an integer from 1"),
        ({"hidden": 2.5}, TypeError, "hidden: expected a Python integer.*got 2.5"),
        (
            {"tokens_per_rank": -1},
            ValueError,
            "tokens_per_rank: expected an integer from 0",
        ),
        ({"capacity_factor": 0.0}, ValueError, "capacity_factor: expected a positive"),
        ({"capacity_factor": 1e308}, ValueError, "capacity_factor: .*got 1e"),
        ({"capacity_factor": None}, TypeError, "capacity_factor: expected a number"),
        ({"dtype": None}, TypeError, "dtype: expected a dtype"),
        ({"dtype": object}, TypeError, "dtype: expected a dtype"),
        ({"dtype": []}, TypeError, "dtype: expected a dtype"),
        ({"topology": 4}, TypeError, "topology: expected a Topology, the name"),
        ({"topology": "no"}, ValueError, "topology: expected one of"),
        (
            {"topology": "4xrtx4090", "gpus": [0.0, 1.0, 2.0, 3.0]},
            TypeError,
            "gpus: expected a Python integer",
        ),
        ({"topology": "4xrtx4090", "gpus": "0123"}, TypeError, "gpus: expected a GPU"),
        (
            {"expert_ids": np.zeros((4, 1024, 3), np.int32)},
            ValueError,
            "expert_ids: expected shape",
        ),
        (
            {"expert_ids": np.zeros((4, 1024, 2), np.float32)},
            TypeError,
            "expert_ids: expected integers, got dtype float32",
        ),
    ],
)
def test_bad_sizes_are_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        make(**changes)


def test_bad_capacities_are_refused():
    sizes = {"tokens_per_rank": 4, "num_experts": 4, "top_k": 2, "num_ranks": 4}
    with pytest.raises(ValueError, match="slack: expected a positive number"):
        _volume.required_recv_capacity(**sizes, slack=-1.0)
    with pytest.raises(ValueError, match="slack: expected a positive number"):
        _volume.required_recv_capacity(**sizes, slack=1e308)
    for slack in ("1", True):
        with pytest.raises(TypeError, match="slack: expected a number"):
            _volume.required_recv_capacity(**sizes, slack=slack)
    with pytest.raises(ValueError, match="expected one of them, got both"):
        _volume.required_recv_capacity(
            **sizes, slack=1.0, expert_ids=np.zeros((16, 2), np.int32)
        )


def test_the_command_prints_a_table_and_json(capsys):
    sizes = ["--tokens", "4096", "--hidden", "256", "--experts", "32"]
    sizes += ["--topk", "2", "--ranks", "4"]
    assert main(["volume", *sizes, "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*SCHEDULES, *PEERS, "rank 3 in"))
    assert main(["volume", *sizes, "--dtype", "float32", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["schemes"]["packed"]["total_bytes"] == make()["packed"].total_bytes
    assert main(["volume", "--tokens", "7", "--ranks", "4"]) == 2
    assert "--tokens: expected a multiple of --ranks 4" in capsys.readouterr().out
    assert main(["volume", "--experts", "10", "--ranks", "4"]) == 2
    assert "num_experts" in capsys.readouterr().out


# On the links of a machine.


def test_without_peer_access_every_byte_goes_up_and_down_a_pcie_link():
    v = on("4xrtx4090")
    packed, links = v["packed"], v.link_bytes("packed")
    for r in range(4):
        up, down = links[f"pcie{r} gpu{r}>numa0"], links[f"pcie{r} numa0>gpu{r}"]
        np.testing.assert_allclose(up, packed.sent_bytes[r])
        np.testing.assert_allclose(down, packed.received_bytes[r])
    np.testing.assert_allclose(links["numa0 memory"], 2 * packed.total_bytes)
    assert not v.wiring.has_peer_access


def test_broadcast_writes_once_into_shared_memory_and_is_read_by_all():
    v = on("4xrtx4090")
    rows = 1024 * 256 * 2
    loads = v.wiring.describe(v.wiring.loads(v["broadcast"], v["broadcast"].dispatch))
    for r in range(4):
        assert loads[f"pcie{r} gpu{r}>numa0"] == rows
        assert loads[f"pcie{r} numa0>gpu{r}"] == 3 * rows
    assert loads["numa0 memory"] == 4 * rows + 12 * rows


def test_broadcast_between_gpus_that_reach_each_other_stays_off_pcie():
    loads = on("2xh200", num_ranks=2).link_bytes("broadcast")
    assert all(not load for name, load in loads.items() if "pcie" in name)
    assert loads["nvlink0-1 gpu0>gpu1"] > 0


def test_an_unknown_scheme_is_told_the_known_ones():
    with pytest.raises(KeyError, match=r"expected one of packed, .*, got 'nccl'"):
        on("4xrtx4090")["nccl"]


def test_volumes_and_choices_print_shortly():
    v = on("4xrtx4090")
    assert str(v) == v.table()
    assert len(repr(v)) < 300
    choice = choose("4xrtx4090")
    assert str(choice) == choice.explain()
    assert len(repr(choice)) < 600


def test_peer_memory_spares_pcie_and_far_gpus_share_what_joins_sockets():
    nvlink = on("8xh800", num_ranks=8).link_bytes("direct")
    assert all(not load for name, load in nvlink.items() if "pcie" in name)
    pairs = on("rtx3090-pairs").link_bytes("packed")
    assert pairs["nvlink0-1 gpu0>gpu1"] > 0
    assert pairs["pcie0 gpu0>numa0"] > 0
    uplink = on("dgx-v100").link_bytes("broadcast")
    np.testing.assert_allclose(
        uplink["uplink0 plx0>numa0"],
        uplink["pcie0 gpu0>plx0"] + uplink["pcie1 gpu1>plx0"],
    )


def test_gpus_choose_which_links_are_meant():
    v = on("4xrtx4090", num_ranks=2, gpus=(3, 1))
    used = {name for name, load in v.link_bytes("packed").items() if load}
    assert used == {
        "pcie3 gpu3>numa0",
        "pcie3 numa0>gpu3",
        "pcie1 gpu1>numa0",
        "pcie1 numa0>gpu1",
        "numa0 memory",
    }


def test_a_machine_by_its_name_or_file(tmp_path):
    path = tmp_path / "machine.json"
    Topology.load("4xrtx4090").save(path)
    want = choose("4xrtx4090").to_json()
    for topology in ("4xrtx4090", path, str(path)):
        assert choose(topology=topology).to_json() == want


def test_a_machine_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="expected a GPU for each of 8 ranks"):
        on("4xrtx4090", num_ranks=8)
    with pytest.raises(ValueError, match="gpus: expected a different GPU for each"):
        on("4xrtx4090", gpus=(0, 1, 2, 2))
    with pytest.raises(ValueError, match="gpus: expected None without a topology"):
        make(gpus=(0, 1, 2, 3))
