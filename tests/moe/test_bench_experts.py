"""The peers against a dense reference, and `bench experts` end to end."""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_turbobus import moe
from jax_turbobus.__main__ import main
from jax_turbobus.bench import _layer, peers, ragged, routing
from jax_turbobus.bench._comparison import Comparison
from jax_turbobus.bench._experts_bounds import best_bound
from jax_turbobus.moe._counts import ExchangeShape
from jax_turbobus.moe._traffic import PEERS

RANKS = 4


def layer(route="uniform", dtype="float32", capacity=None, factor=1.25, **sizes):
    sizes = {
        "tokens_per_rank": 24,
        "hidden": 64,
        "num_experts": 8,
        "top_k": 2,
        "num_ranks": RANKS,
    } | sizes
    shape = ExchangeShape(**sizes, dtype=dtype)
    if capacity is None:
        del sizes["hidden"]
        capacity = moe.required_recv_capacity(**sizes)
    case = peers.Case(shape=shape, recv_capacity=capacity, capacity_factor=factor)
    mesh = Mesh(np.array(jax.devices()[:RANKS]), (case.axis_name,))
    ids = routing.expert_ids(route, shape, seed=3)
    return _layer.Layer.make(case, mesh, ids, seed=4)


EVERYONE = {
    "ours": _layer.ours(),
    # XLA does not implement its own on CPU devices: our drop-in, under the same code.
    **peers.EXACT | {"ragged_all_to_all": peers.ragged(moe.ragged_all_to_all)},
    **peers.DROPPING,
}
ROUTES = ("uniform", "zipf:1.4", "empty-rank")


@pytest.fixture(scope="module")
def references():
    """By route: a layer whose ranks can receive just what the fullest of all needs."""
    shape = layer().case.shape
    sizes = {
        "tokens_per_rank": shape.tokens_per_rank,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "num_ranks": shape.num_ranks,
    }
    need = max(
        moe.required_recv_capacity(
            **sizes, expert_ids=routing.expert_ids(route, shape, seed=3)
        )
        for route in ROUTES
    )
    assert need < moe.required_recv_capacity(**sizes)
    layers = [layer(route, capacity=need, factor=8.0) for route in ROUTES]
    return [(this, this.reference()) for this in layers]


@pytest.mark.parametrize("name", EVERYONE)
def test_every_scheme_equals_the_dense_reference(name, references):
    mapped = references[0][0].mapped(EVERYONE[name])

    def loss(tokens, ids, weights, scale):
        y = mapped(tokens, ids, weights, scale)
        return (y**2).sum() / 2, y

    program = jax.jit(jax.grad(loss, (0, 2, 3), has_aux=True))
    for this, (want, want_grads) in references:
        grads, got = program(*this.arguments)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        for got, expected in zip(grads, want_grads, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", peers.DROPPING)
def test_dropping_peers_drop_what_exceeds_their_capacity(name):
    this = layer("zipf:1.4", factor=1.0)
    want, _ = this.reference()
    got = np.asarray(this.forward(EVERYONE[name])())
    wrong = ~np.isclose(got, want, rtol=1e-4).all(axis=1)
    assert 0 < wrong.sum() < len(wrong)


@pytest.mark.parametrize("name", ["ours", "allgather_filter", "one_copy_padded"])
def test_half_precision(name):
    this = layer(dtype="bfloat16")
    want, _ = this.reference()
    got = this.forward(EVERYONE[name])()
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(got, np.float32), want.astype(np.float32), rtol=0.05, atol=0.05
    )


def test_peers_have_the_names_that_volume_counts():
    assert {*peers.EXACT, *peers.DROPPING} == set(PEERS)


@pytest.mark.parametrize("route", ["uniform", "zipf:0.6", "one-hot", "empty-rank"])
def test_routing_is_distinct_and_as_skewed_as_it_says(route):
    shape = ExchangeShape(512, 1, 32, 4, 4)
    ids = routing.expert_ids(route, shape, seed=1)
    assert ids.shape == (2048, 4)
    assert all(len(set(token)) == 4 for token in ids.tolist())
    np.testing.assert_array_equal(ids, routing.expert_ids(route, shape, seed=1))
    by_rank = np.bincount(ids.reshape(-1) // 8, minlength=4)
    if route == "one-hot":
        assert by_rank.tolist() == [8192, 0, 0, 0]
    elif route == "empty-rank":
        assert by_rank[3] == 0
        assert by_rank[:3].min() > 2600
    elif route == "uniform":
        assert np.ptp(by_rank) < 200
    first = np.bincount(ids[:, 0], minlength=32) / 2048
    np.testing.assert_allclose(first, routing.popularity(route, shape, 1), atol=0.04)


def test_more_choices_than_possible_experts_are_masked():
    ids = routing.expert_ids("one-hot", ExchangeShape(8, 1, 8, 4, 4))
    assert (np.sort(ids, axis=1)[:, :2] == -1).all()
    assert (np.sort(ids, axis=1)[:, 2:] == [0, 1]).all()


def test_bad_routes_are_refused():
    with pytest.raises(ValueError, match="route: expected uniform, zipf:EXPONENT"):
        routing.expert_ids("fair", ExchangeShape(8, 1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"expected zipf:EXPONENT such as zipf:1\.0"):
        routing.expert_ids("zipf:steep", ExchangeShape(8, 1, 8, 2, 4))


SMALL = ["--tokens", "256", "--hidden", "128", "--experts", "8", "--rounds", "1"]
SMALL += ["--slack", "1.5"]


def test_the_bench_runs_and_records(tmp_path, capsys):
    file = tmp_path / "experts.json"
    only = "allgather_filter,ragged_all_to_all,capacity_scatter"
    command = ["bench", "experts", *SMALL, "--schedule", "packed", "--only", only]
    command += ["--json", str(file)]
    assert main([*command, "--no-check"]) == 0
    rows = json.loads(file.read_text())["rows"]
    text = capsys.readouterr().out
    assert "best exact peer" in text
    errors = [r for r in rows if "largest error" in r["metric"]]
    assert [r["metric"].split(":")[:2] for r in errors if r["required"]] == [
        ["ours", " forward"],
        ["ours", " forward + backward"],
    ]
    assert all(r["ok"] for r in errors if r["required"])
    exact = [r for r in errors if "allgather_filter" in r["metric"]]
    assert len(exact) == 2
    assert all(r["ours"] < 1e-5 and "note" not in r for r in exact)
    assert {r["program"]["layers"] for r in rows if "program" in r} == {1}
    timed = {r["peer_name"] for r in rows if r["metric"].endswith(", ms")}
    assert timed == {"allgather_filter", "capacity_scatter"}, "no native ragged on CPU"
    moved = {r["peer_name"]: r["ratio"] for r in rows if "MiB" in r["metric"]}
    assert moved["allgather_filter"] < 1


def test_the_bounds_are_those_of_the_issue_for_its_sizes_only():
    names = [name for name in peers.EXACT if name != "ragged_all_to_all"]

    def comparison(*sizes, only=names):
        return Comparison(
            devices=jax.devices()[:4],
            shape=ExchangeShape(*sizes, 4, "float32"),
            peers={1.25: only, None: only},
            rounds=1,
        )

    default = comparison(1024, 1024, 32, 2)
    assert best_bound(default, 1.25, "forward") == "<= 0.3"
    assert best_bound(default, None, "both") == "<= 0.65"
    assert best_bound(comparison(64, 64, 8, 2), 1.25, "forward") is None
    few = comparison(1024, 1024, 32, 2, only=names[:1])
    assert best_bound(few, 1.25, "forward") is None


@pytest.mark.parametrize("schedule", ["packed", "broadcast", "direct"])
def test_volume_is_what_exchanges_count(schedule):
    this = layer("zipf:1.0")
    shape = this.case.shape
    forward = this.forward(_layer.ours(schedule))
    moe.reset_exchange_stats()
    forward()
    counted = {kind.op: kind for kind in moe.exchange_stats()}
    assert {kind.schedule for kind in counted.values()} == {schedule}
    expected = moe.volume(**dataclasses.asdict(shape), expert_ids=this.arguments[1])[
        schedule
    ]
    np.testing.assert_array_equal(counted["dispatch"].pair_bytes, expected.dispatch)
    np.testing.assert_array_equal(counted["combine"].pair_bytes, expected.combine)


def test_bench_ragged_runs_where_jax_has_no_peer(tmp_path, capsys):
    path = tmp_path / "ragged.json"
    arguments = ["--mib", "0.25", "--tokens", "16", "--hidden", "64", "--experts", "8"]
    main(["bench", "ragged", *arguments, "--rounds", "1", "--json", str(path)])
    assert "lax.all_to_all" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    by_peer = {(row["metric"], row["peer_name"]) for row in rows}
    assert ("one exchange of several, us", "lax.all_to_all") in by_peer
    assert ("layer, forward + backward, ms", None) in by_peer
    assert all(row["ours"] > 0 for row in rows)


def wrong_scheme(case, *arguments):
    return peers.allgather_filter(case, *arguments) * 2


@pytest.mark.parametrize("is_right", [True, False])
def test_bench_ragged_says_what_came_out_of_the_peer(monkeypatch, is_right):
    """Stands in for XLA's own, which CPU devices lack."""

    def theirs(*arguments, **options):
        return moe.ragged_all_to_all(*arguments, **options) * (1 if is_right else 2)

    monkeypatch.setattr(ragged.lax, "ragged_all_to_all", theirs)
    monkeypatch.setattr(ragged, "_is_on_gpus", lambda: True)
    monkeypatch.setattr(ragged, "_CHAIN", 1)
    monkeypatch.setattr(ragged, "_RAGGED_CHAIN", 1)
    scheme = peers.ragged(theirs) if is_right else wrong_scheme
    monkeypatch.setattr(ragged.peers, "ragged_all_to_all", scheme)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))
    rows = ragged.exchanges(mesh, 0.125, 1)
    args = argparse.Namespace(tokens=16, hidden=64, experts=8, topk=2, rounds=1)
    rows += ragged._layers(jax.devices()[:2], args)
    (share,) = [row.ours for row in rows if "share of values" in row.metric]
    assert share == 0 if is_right else share > 0.9
    timed = [row for row in rows if row.peer_name == "lax.ragged_all_to_all"]
    assert len(timed) == 3
    assert all(bool(row.note) is not is_right for row in timed)
    errors = [row for row in rows if "largest error" in row.metric]
    assert [row.required for row in errors] == ["<= 0.03"] * 2 + [None] * 2
    assert not any(row.failed for row in rows)


@pytest.mark.parametrize("option", [["--mib", "0"], ["--experts", "7"]])
def test_bench_ragged_refuses_sizes_by_name(option, capsys):
    assert main(["bench", "ragged", "--mib", "0.01", "--rounds", "1", *option]) == 2
    assert f"bench: {option[0]}: expected" in capsys.readouterr().err
