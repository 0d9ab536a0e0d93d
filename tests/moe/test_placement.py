"""Plans are modelled better than experts in order, and results stay the same."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe
from jax_turbobus.__main__ import main
from jax_turbobus.bench import peers, placement, routing
from jax_turbobus.moe import Placement, plan_placement
from jax_turbobus.moe import _placement_plan as internals
from jax_turbobus.moe._counts import ExchangeShape, exact_counts
from jax_turbobus.moe._placement_search import Load, Objective, crowded_units, search
from jax_turbobus.moe._wiring import from_topology, ports
from jax_turbobus.topology import Topology

RANKS = 4
SHAPE = ExchangeShape(512, 64, 16, 2, RANKS, "float32")


def sample(route, shape=SHAPE, draw=1):
    ids = routing.expert_ids(route, shape, seed=0, draw=draw)
    return ids.reshape(shape.num_ranks, -1, shape.top_k)


def fullest(plan, ids):
    """Rows of the fullest rank's experts."""
    shape = dataclasses.replace(
        SHAPE, num_experts=plan.num_slots, tokens_per_rank=ids.shape[1]
    )
    return exact_counts(shape, np.asarray(plan.route(ids))).received_rows.max()


# Results stay equal.


@pytest.mark.parametrize("route", ["zipf:1.4", "one-hot", "empty-rank"])
@pytest.mark.parametrize(
    ("num_experts", "slots_per_rank"), [(16, None), (16, 5), (14, 4)]
)
def test_an_exchange_by_a_plan_equals_dense(route, num_experts, slots_per_rank):
    ids = sample(route)
    ids = np.where(ids < num_experts, ids, -1)
    plan = plan_placement(
        ids,
        Topology.load("4xrtx4090"),
        num_experts=num_experts,
        slots_per_rank=slots_per_rank,
    )
    rng = np.random.default_rng(5)
    tokens = rng.integers(-4, 5, (RANKS * 512, 64)).astype(np.float32)
    weights = rng.integers(1, 4, (RANKS * 512, 2)).astype(np.float32)
    scale = rng.integers(-3, 4, (num_experts, 64)).astype(np.float32)
    ids = ids.reshape(-1, 2).astype(np.int32)
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("expert",))
    capacity = int(fullest(plan, ids.reshape(RANKS, -1, 2)))

    def per_rank(tokens, ids, weights, scale):
        rows, sizes, state = moe.dispatch(
            tokens,
            plan.route(ids),
            weights,
            num_experts=plan.num_slots,
            axis_name="expert",
            recv_capacity=capacity,
        )
        expert = jnp.repeat(
            jnp.arange(plan.slots_per_rank + 1),
            jnp.append(sizes, capacity - sizes.sum()),
            total_repeat_length=capacity,
        )
        return moe.combine(peers.scale_rows(rows, expert, scale), state)

    def planned(tokens, weights, scale):
        spec = P("expert")
        f = jax.shard_map(per_rank, mesh=mesh, in_specs=spec, out_specs=spec)
        slots = jax.lax.with_sharding_constraint(
            plan.permute(scale), NamedSharding(mesh, spec)
        )
        y = f(tokens, jnp.asarray(ids), weights, slots)
        return (y * y).sum() / 2, y

    def dense(tokens, weights, scale):
        valid = jnp.where(ids >= 0, weights, 0.0)
        y = peers.dense(tokens, jnp.maximum(ids, 0), valid, scale)
        return (y * y).sum() / 2, y

    grads, got = jax.jit(jax.grad(planned, (0, 1, 2), has_aux=True))(
        tokens, weights, scale
    )
    want_grads, want = jax.grad(dense, (0, 1, 2), has_aux=True)(tokens, weights, scale)
    np.testing.assert_array_equal(got, want)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# What a plan is worth.


def test_a_plan_balances_ranks_and_is_reproducible():
    ids = sample("zipf:1.0")
    plan = plan_placement(ids, num_experts=16)
    assert plan == plan_placement(ids, num_experts=16)
    assert fullest(plan, ids) < 0.8 * fullest(Placement.contiguous(16, 4), ids)


def test_a_hot_expert_gets_a_second_copy_on_another_rank():
    ids = sample("zipf:1.4")
    plan = plan_placement(ids, num_experts=16, slots_per_rank=5)
    hottest = int(np.bincount(ids.reshape(-1)).argmax())
    ranks = {slot // 5 for slot in plan.copies[hottest]}
    assert len(ranks) == 2
    single = plan_placement(ids, num_experts=16, slots_per_rank=5, max_copies=1)
    assert max(map(len, single.copies)) == 1
    assert fullest(plan, ids) < fullest(single, ids)


def test_no_rank_gets_two_copies_of_an_expert():
    """Nothing was saved by the second one, and it took a slot."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 8, (4, 16, 2))
    plans = [
        plan_placement(ids, num_experts=10),
        plan_placement(ids, num_experts=8, slots_per_rank=5),
    ]
    for _ in range(40):
        num_ranks, num_experts = (int(n) for n in rng.integers(1, [6, 14]))
        ids = rng.geometric(0.3, (num_ranks, 16, 2)) - 1
        plans.append(
            plan_placement(
                np.minimum(ids, num_experts - 1),
                num_experts=num_experts,
                slots_per_rank=-(-num_experts // num_ranks) + int(rng.integers(3)),
                max_copies=int(rng.integers(1, 5)),
            )
        )
    for plan in plans:
        by_rank = np.reshape(plan.slots, (plan.num_ranks, -1))
        for here in by_rank:
            used = here[here >= 0]
            assert len(set(used.tolist())) == len(used), str(plan)
    assert any(len(c) > 2 for plan in plans for c in plan.copies)


def test_what_cannot_be_spread_is_left_out():
    """Three units of one expert for two ranks: one of them is told."""
    expert_of = np.array([0, 0, 0, 1])
    rank_of = search(
        Load(np.ones((2, 4)), []),
        Objective.make(ports(2), 8192, None, 1e9),
        2,
        10,
        expert_of,
    )
    assert sorted(rank_of) == [0, 0, 1, 1]
    crowded = crowded_units(rank_of, expert_of)
    assert crowded.sum() == 1
    assert expert_of[crowded] == 0


def test_experts_that_tokens_want_together_share_a_rank():
    # Tokens choose one of eight pairs (e, e + 8), which lie apart in order.
    rng = np.random.default_rng(0)
    first = rng.integers(0, 8, (RANKS, 512, 1))
    ids = np.concatenate([first, first + 8], axis=2)
    plan = plan_placement(ids, num_experts=16, row_seconds=0.0)
    rank = {expert: slot // 4 for slot, expert in enumerate(plan.slots)}
    assert all(rank[e] == rank[e + 8] for e in range(8))


def test_a_degraded_link_gets_the_coldest_experts():
    heat = np.ones((RANKS, 16))
    heat[:, 12:] = 20.0  # in order, all hot ones lie on rank 3
    heat[3] = 0.0  # which sends nothing itself
    plan = plan_placement(heat, Topology.load("4xrtx4090"), row_seconds=0.0)
    assert not set(plan.slots[12:]) & set(range(12, 16))
    evenly = plan_placement(heat)
    hot_on = [sum(e >= 12 for e in evenly.slots[r * 4 : r * 4 + 4]) for r in range(4)]
    assert hot_on == [1, 1, 1, 1]


@pytest.mark.parametrize("machine", ["4xrtx4090", "rtx3090-pairs"])
@pytest.mark.parametrize("route", placement.ROUTES)
def test_a_plan_is_never_modelled_slower_on_its_sample(machine, route):
    ids, topology = sample(route), Topology.load(machine)
    objective = Objective.make(from_topology(topology, 4), 8192, None, 1e9)

    def seconds(plan):
        shape = dataclasses.replace(SHAPE, num_experts=plan.num_slots)
        counts = exact_counts(shape, np.asarray(plan.route(ids)))
        return objective.seconds(counts.unique, counts.copies)

    before = seconds(Placement.contiguous(16, 4))
    for slots in (4, 5):
        plan = plan_placement(ids, topology, num_experts=16, slots_per_rank=slots)
        assert seconds(plan) <= before * (1 + 1e-9)
        assert seconds(plan) < before * 0.96 or route in ("uniform", "zipf:0.6")


def test_swapping_keeps_count_of_rows_exactly():
    ids = sample("zipf:0.6")
    units = np.append(np.arange(16), [3, 5, -1, -1])
    _, totals = internals._read_traffic(ids, 16)
    load = internals._load(ids.astype(np.int64), totals, units)
    rng = np.random.default_rng(1)
    rank_of = rng.permutation(np.repeat(np.arange(4), 5))
    rows = load.rows(rank_of)
    for _ in range(60):
        e, f = rng.choice(20, 2, replace=False)
        if rank_of[e] == rank_of[f]:
            continue
        rows = load.swapped(rank_of, *rows, (int(e), int(f)))
        rank_of[[e, f]] = rank_of[[f, e]]
        for got, want in zip(rows, load.rows(rank_of), strict=True):
            np.testing.assert_array_equal(got, want)


def test_totals_alone_count_every_row():
    load = Load(np.arange(8.0).reshape(2, 4), [])
    unique, copies = load.rows(np.array([0, 1, 0, 1]))
    np.testing.assert_array_equal(unique, [[2, 4], [10, 12]])
    np.testing.assert_array_equal(copies, unique)


def test_the_objective_is_the_busiest_link_there_and_back_plus_work():
    objective = Objective.make(
        ports(2, 1e6), row_bytes=1000, row_seconds=0.5, assumed_bytes_per_s=1.0
    )
    unique = np.array([[9.0, 4.0], [1.0, 9.0]])
    copies = np.array([[10.0, 4.0], [1.0, 9.0]])
    assert objective.seconds(unique, copies) == pytest.approx(0.004 * 2 + 13 * 0.5)


@pytest.mark.parametrize(
    ("arguments", "changes", "error", "message"),
    [
        (np.ones((4, 8, 2), np.float32), {"num_experts": 8}, TypeError, "integer"),
        (np.ones((4, 8, 2), np.int32), {}, ValueError, "num_experts: expected the num"),
        (np.ones(8), {}, ValueError, "traffic: expected shape"),
        (np.ones((4, 8)), {"num_experts": 9}, ValueError, "num_experts: expected 8"),
        (np.ones((8, 2), int), {"num_experts": 8}, ValueError, "a sample of ids has"),
        (-np.ones((4, 8)), {}, ValueError, "traffic: expected rows of 0 and more"),
        (np.full((4, 8), np.nan), {}, ValueError, "traffic: expected finite"),
        (
            np.ones((4, 8)),
            {"slots_per_rank": 1},
            ValueError,
            "slots_per_rank: expected",
        ),
        (np.ones((4, 8)), {"max_copies": 0}, ValueError, "max_copies: expected"),
        (np.ones((4, 8)), {"max_copies": "2"}, TypeError, "max_copies: expected"),
        (np.ones((4, 8)), {"max_swaps": None}, TypeError, "max_swaps: expected"),
        (np.ones((4, 8)), {"slots_per_rank": 3.0}, TypeError, "slots_per_rank: exp"),
        (np.ones((4, 8)), {"row_seconds": "1"}, TypeError, "row_seconds: expected"),
        (np.ones((4, 8)), {"row_seconds": -1}, ValueError, "row_seconds: expected"),
        (np.ones((4, 8)), {"row_seconds": np.nan}, ValueError, "row_seconds: exp"),
        (np.ones((4, 8)), {"row_bytes": 0}, ValueError, "row_bytes: expected"),
        (np.ones((4, 8)), {"row_bytes": np.nan}, TypeError, "row_bytes: expected"),
        (np.ones((1, 8, 2), int), {"num_experts": 8.0}, TypeError, "num_experts: exp"),
        (np.ones((1, 8, 2), int), {"num_experts": True}, TypeError, "num_experts: exp"),
        (
            np.ones((1, 8, 2), int),
            {"num_experts": 10**30},
            ValueError,
            "num_experts: expected an integer from 1",
        ),
    ],
)
def test_bad_traffic_is_refused_by_name(arguments, changes, error, message):
    with pytest.raises(error, match=message):
        plan_placement(arguments, **changes)


def test_a_machine_with_too_few_gpus_is_refused():
    with pytest.raises(ValueError, match="expected a GPU for each of 8 ranks"):
        plan_placement(np.ones((8, 16)), Topology.load("4xrtx4090"))


def test_the_table_in_the_docs_is_what_the_bench_makes():
    docs = pathlib.Path(__file__).parents[2] / "docs" / "placement.md"
    results = placement.study("4xrtx4090", "zipf:1.4", costs_work=True)
    line = placement.markdown("4xrtx4090", "zipf:1.4", True, results)
    assert line in docs.read_text().splitlines()


def test_the_bench_writes_its_table(tmp_path, capsys):
    file = tmp_path / "table.md"
    file.write_text(
        "before\n<!-- bench placement: begin -->\nold\n<!-- end -->\nafter\n"
    )
    command = ["bench", "placement", "--topology", "4xrtx4090", "--route", "zipf:1.4"]
    assert main([*command, "--markdown", str(file)]) == 0
    assert "in order" in capsys.readouterr().out
    lines = file.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert sum("zipf:1.4" in line for line in lines) == 2
    file.write_text("no marks")
    assert main([*command, "--markdown", str(file)]) == 2
    assert "--markdown: expected" in capsys.readouterr().err
