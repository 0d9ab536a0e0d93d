"""Experts that are not equally popular: as slow as the busiest rank, and no slower."""

from collections.abc import Iterator

import numpy as np

from jax_turbobus.bench import peers, routing
from jax_turbobus.bench._experts_race import OURS, Race
from jax_turbobus.bench._layer import Layer, ours
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._setup import AXIS, Setup
from jax_turbobus.moe._counts import ExchangeShape

__all__ = ["skew"]

_ROUTES = ("zipf:1.0",)
# With two ranks: one whose popular experts do not happen to balance them.
_SEED = 3
# In one program, of which a start is little.
_NUM_LAYERS = 8


def skew(setup: Setup) -> Iterator[Row]:
    """Yields times under Zipf's law beside the uniform one's, scaled by the rows."""
    shape = setup.shape(4096, 4096, 64, 2)
    ids = {
        route: [
            routing.expert_ids(route, shape, seed=_SEED, draw=1 + i)
            for i in range(_NUM_LAYERS)
        ]
        for route in ("uniform", *_ROUTES)
    }
    hottest = {
        route: [_rows_of_hottest(one, shape) for one in all_layers]
        for route, all_layers in ids.items()
    }
    # One capacity, that of the busiest, so that padding costs all alike.
    most = max(rows for all_layers in hottest.values() for rows in all_layers)
    case = peers.Case(shape=shape, recv_capacity=most, axis_name=AXIS)
    mine = ours()
    runs = {}
    for route, all_layers in ids.items():
        # Of these values no sum is rounded: what comes out is right or wrong.
        layers = Layer.make_exact(case, setup.mesh, all_layers, 0)
        name = f"{setup.access}: {route}, {_NUM_LAYERS} layers in one program"
        yield from Race(layers, name, {OURS: mine}, has_backward=False).check(most=0.0)
        runs[route] = layers.forward(mine)
    times = setup.times(runs)
    for route in _ROUTES:
        share = sum(hottest[route]) / sum(hottest["uniform"])
        yield Row.make(
            f"{setup.access}: {route}",
            f"forward, ms a layer; uniform times {share:.2f}, the hottest rank's rows",
            times[route] / _NUM_LAYERS * 1e3,
            peer=times["uniform"] / _NUM_LAYERS * share * 1e3,
            peer_name="uniform, scaled",
            required="<= 1",
            program={"layers": _NUM_LAYERS},
        )


def _rows_of_hottest(
    ids: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]", shape: ExchangeShape
) -> int:
    ranks = np.asarray(ids) // shape.num_local_experts
    return int(np.bincount(ranks.ravel(), minlength=shape.num_ranks).max())
