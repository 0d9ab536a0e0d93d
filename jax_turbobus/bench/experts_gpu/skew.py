"""Experts that are not equally popular: as slow as the busiest rank, and no slower."""

from collections.abc import Iterator

import numpy as np

from jax_turbobus.bench import peers, routing
from jax_turbobus.bench._layer import Layer, ours
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._setup import AXIS, Setup
from jax_turbobus.moe._traffic import ExchangeShape

__all__ = ["skew"]

_ROUTES = ("zipf:1.0",)
# With two ranks: one whose popular experts do not happen to balance them.
_SEED = 3


def skew(setup: Setup) -> Iterator[Row]:
    """Yields times under Zipf's law beside the uniform one's, scaled by the rows."""
    shape = ExchangeShape(
        tokens_per_rank=setup.small(4096),
        hidden=max(4096 // setup.shrink, 64),
        num_experts=64,
        top_k=2,
        num_ranks=setup.num_ranks,
        dtype="bfloat16",
    )
    ids = {
        route: routing.expert_ids(route, shape, seed=_SEED)
        for route in ("uniform", *_ROUTES)
    }
    hottest = {route: _rows_of_hottest(x, shape) for route, x in ids.items()}
    # One capacity, that of the busiest, so that padding costs all alike.
    case = peers.Case(shape=shape, recv_capacity=max(hottest.values()), axis_name=AXIS)
    mine = ours()
    made = {route: Layer.make(case, setup.mesh, x, 0) for route, x in ids.items()}
    for route, layer in made.items():
        want, _ = layer.reference()
        got = np.asarray(layer.forward(mine)(), np.float32)
        error = np.abs(got - np.asarray(want, np.float32)).max() / np.abs(want).max()
        yield Row.make(
            f"{setup.access}: {route}",
            "largest error over largest value",
            float(error),
            required="<= 0.03",
        )
    times = setup.times({route: made[route].forward(mine) for route in made})
    for route in _ROUTES:
        share = hottest[route] / hottest["uniform"]
        yield Row.make(
            f"{setup.access}: {route}",
            f"forward, ms; uniform times {share:.2f}, the hottest rank's rows",
            times[route] * 1e3,
            peer=times["uniform"] * share * 1e3,
            peer_name="uniform, scaled",
            required="<= 1",
        )


def _rows_of_hottest(
    ids: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]", shape: ExchangeShape
) -> int:
    ranks = np.asarray(ids) // shape.num_local_experts
    return int(np.bincount(ranks.ravel(), minlength=shape.num_ranks).max())
