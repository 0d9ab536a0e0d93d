"""Who is right and who is fast, of one layer and of several in one program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_turbobus import moe
from jax_turbobus.bench import _experts_race, _layer, peers, routing
from jax_turbobus.bench._experts_race import Race
from jax_turbobus.bench._report import Timing
from jax_turbobus.moe._counts import ExchangeShape

RANKS = 2
MINE = {"ours": _layer.ours()}
# As peers are called: XLA's own ragged exchange does not run here.
EXACT = {name: peers.EXACT[name] for name in peers.EXACT if "ragged" not in name}


def data(num_layers, dtype="float32"):
    shape = ExchangeShape(32, 64, 8, 2, RANKS, dtype)
    capacity = moe.required_recv_capacity(
        tokens_per_rank=32, num_experts=8, top_k=2, num_ranks=RANKS
    )
    case = peers.Case(shape=shape, recv_capacity=capacity)
    mesh = Mesh(
        np.array(jax.devices()[:RANKS]), (case.axis_name,), axis_types=(AxisType.Auto,)
    )
    ids = [routing.expert_ids("uniform", shape, draw=i) for i in range(num_layers)]
    return _layer.Layer.make(case, mesh, ids, seed=0)


def timed(race, *, bound=lambda metric, peer: None):
    return list(race.run(rounds=1, limit_s=0.0, in_a_row=1, bound=bound))


@pytest.mark.parametrize(("num_layers", "dtype"), [(2, "float32"), (8, "bfloat16")])
def test_layers_in_one_program_are_those_of_the_dense_reference(num_layers, dtype):
    layers = data(num_layers, dtype)
    ids = layers.arguments[1::3]
    assert len(ids) == layers.num_layers == num_layers
    assert not any((ids[0] == other).all() for other in ids[1:])
    schemes = MINE | (EXACT if num_layers == 2 else {})
    race = Race(layers, "case", schemes, has_backward=True)
    rows = list(race.check())
    assert len(rows) == 2 * len(schemes)
    assert not race.wrong
    for row in rows:
        assert row.ours <= float((rows[0].required or "").removeprefix("<= "))
        assert row.program == {"layers": num_layers}
    want, _ = layers.reference()
    assert 0.5 < jnp.abs(want.astype(jnp.float32)).mean() < 2


def slightly_off(case, *arguments):
    return peers.allgather_filter(case, *arguments) * 1.01


@jax.custom_jvp
def wrong_gradient(x):
    return x


wrong_gradient.defjvp(lambda x, dx: (x[0], dx[0] * 1.01))


def off_backwards(case, *arguments):
    return wrong_gradient(peers.allgather_filter(case, *arguments))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_wrong_result_of_ours_fails_and_of_a_peer_is_out_of_the_race(num_layers):
    schemes = {
        "ours": slightly_off,
        "allgather_filter": off_backwards,
        "padded_all_to_all": peers.padded_all_to_all,
    }
    race = Race(data(num_layers), "case", schemes, has_backward=True)
    rows = {row.metric.rpartition(":")[0]: row for row in race.check()}
    assert rows["ours: forward"].failed
    assert rows["ours: forward + backward"].failed
    assert rows["allgather_filter: forward"].note is None
    assert "wrong" in rows["allgather_filter: forward + backward"].note
    assert ("allgather_filter", "forward") not in race.wrong
    best = {
        row.metric.split(",")[0]: row.peer_name
        for row in timed(race)
        if "best exact peer" in row.metric
    }
    assert best["forward + backward"] == "padded_all_to_all"


def test_without_any_right_peer_what_is_asked_is_not_reached():
    schemes = MINE | {"allgather_filter": slightly_off}
    race = Race(data(1), "case", schemes, has_backward=False)
    list(race.check())
    rows = timed(race, bound=lambda metric, peer: None if peer else "<= 0.5")
    assert [(row.metric, row.failed) for row in rows] == [
        ("forward, ms", False),
        ("forward: no exact peer", True),
    ]


def test_times_are_of_one_layer_and_judged_beside_the_best_peer(monkeypatch):
    took = {"allgather_filter": 32.0, "padded_all_to_all": 64.0}

    def alternate(functions, **_):
        peer = next(name for name in functions if name != "ours")
        return {"ours": Timing((8.0,)), peer: Timing((took[peer],))}

    monkeypatch.setattr(_experts_race, "alternate", alternate)
    schemes = MINE | {name: EXACT[name] for name in took}
    race = Race(data(8), "case", schemes, has_backward=False)
    rows = timed(race, bound=lambda metric, peer: None if peer else "<= 0.3")
    first, second, best, host = rows
    assert (first.ours, first.peer, first.peer_name) == (1e3, 4e3, "allgather_filter")
    assert (second.ours, second.peer) == (1e3, 8e3)
    assert best.metric == "forward, ms a layer, best exact peer"
    assert (best.peer_name, best.ratio, best.ok) == ("allgather_filter", 0.25, True)
    assert host.metric == "forward, host time until a call returns, us a layer"
    assert host.ours > 0
    assert host.peer_name == "allgather_filter"
    assert all(row.program == {"layers": 8} for row in rows)


def test_a_peer_without_memory_is_left_out_but_never_ours(monkeypatch):
    schemes = MINE | {"allgather_filter": EXACT["allgather_filter"]}
    race = Race(data(1), "case", schemes, has_backward=True)
    layer, poor = race.layer, "allgather_filter"

    def program(self, metric, scheme):
        def fail():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 59 GiB")

        return fail if scheme is schemes[poor] else programs[metric]

    programs = {metric: layer.program(metric, MINE["ours"]) for metric in race.metrics}
    monkeypatch.setattr(_layer.Layer, "program", program)
    rows = list(race.check())
    assert [row.metric for row in rows if row.note] == [f"{poor}: forward: failed"]
    assert [*race.schemes] == ["ours"]
    poor = "ours"
    with pytest.raises(jax.errors.JaxRuntimeError, match="59 GiB"):
        list(race.check())


def test_what_xla_lacks_is_left_out_but_never_ours():
    ragged = {"ragged_all_to_all": peers.ragged_all_to_all}
    race = Race(data(1), "case", MINE | ragged, has_backward=False)
    assert [*race.schemes] == ["ours"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED"):
        Race(data(1), "case", {"ours": peers.ragged_all_to_all}, has_backward=False)
