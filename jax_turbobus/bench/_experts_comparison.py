"""Our exchange and its peers at one size: checked, timed in pairs, counted in bytes."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from jax_turbobus import moe
from jax_turbobus.bench import peers, routing
from jax_turbobus.bench._comparison import Comparison
from jax_turbobus.bench._experts_bounds import best_bound, peer_bound
from jax_turbobus.bench._experts_race import OURS, Race
from jax_turbobus.bench._layer import Layer, ours
from jax_turbobus.bench._report import Row

__all__ = ["compare"]


def compare(comparison: Comparison) -> Iterator[Row]:
    """Checks and times all schemes at one size.

    Args:
      comparison: the size, and who takes part.

    Yields:
      Rows of errors, of times against each peer, of the bounds against the best exact
      one, and, where a program is one layer, of bytes.
    """
    shape = comparison.shape
    expert_ids = [
        routing.expert_ids(comparison.route, shape, seed=comparison.seed, draw=1 + i)
        for i in range(comparison.num_layers)
    ]
    mine = ours(comparison.schedule)
    counted: list[moe.ExchangeStats] = []
    for slack, names in comparison.peers.items():
        case = peers.Case.with_slack(shape, slack)
        mesh = Mesh(
            np.array(comparison.devices),
            (case.axis_name,),
            axis_types=(AxisType.Auto,),
        )
        layer = Layer.make(case, mesh, expert_ids, comparison.seed)
        race = Race(
            layer,
            comparison.name(slack),
            {OURS: mine} | {name: peers.EVERYONE[name] for name in names},
            has_backward=comparison.has_backward,
        )
        yield from race.check()
        yield from race.run(
            rounds=comparison.rounds,
            limit_s=comparison.pair_limit_s,
            in_a_row=comparison.in_a_row,
            bound=functools.partial(_bound, comparison, slack),
        )
        if comparison.num_layers == 1:
            counted = _counted(layer, mine)
    if comparison.num_layers == 1:
        yield from _bytes(comparison, expert_ids[0], counted)


def _bound(
    comparison: Comparison, slack: float | None, metric: str, peer: str | None
) -> str | None:
    if peer is None:
        return best_bound(comparison, slack, metric)
    return peer_bound(comparison, slack, metric, peer)


def _counted(layer: Layer, scheme: peers.Peer) -> list[moe.ExchangeStats]:
    """Returns what one call of ours moves, as it is counted while it runs."""
    moe.reset_exchange_stats()
    layer.forward(scheme)()
    return moe.exchange_stats()


def _bytes(
    comparison: Comparison,
    expert_ids: np.ndarray[Any, Any],
    counted: list[moe.ExchangeStats],
) -> Iterator[Row]:
    """Yields what crosses between ranks, dispatch and combine together."""
    shape = comparison.shape
    volume = moe.volume(**dataclasses.asdict(shape), expert_ids=expert_ids)
    taken = [kind.schedule for kind in counted if kind.op == "dispatch"]
    schedule = taken[0] if taken else "packed"
    case = (
        f"{comparison.prefix}{shape.num_ranks} x {shape.tokens_per_rank} tokens,"
        f" {comparison.route}, {schedule}"
    )
    own = volume[schedule]
    for name in peers.EVERYONE:
        yield Row.make(
            case,
            "moved between ranks, MiB",
            own.total_bytes / 2**20,
            peer=volume[name].total_bytes / 2**20,
            peer_name=name,
        )
    # Without what is exchanged about the rows: counts, places.
    rows_alone = float(own.dispatch.sum() + own.combine.sum()) / 2**20
    moved = sum(kind.total_bytes for kind in counted) / 2**20
    metric = "rows moved, MiB, as exchange_stats counts them"
    if rows_alone:
        yield Row.make(
            case,
            metric,
            moved,
            peer=rows_alone,
            peer_name="moe.volume",
            required="== 1",
        )
    else:  # A single rank sends nothing.
        yield Row.make(case, metric, moved, required="== 0")
