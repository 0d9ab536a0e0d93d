"""Our exchange and its peers at one size: checked, timed in pairs, counted in bytes."""

import argparse
import dataclasses
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from jax_turbobus import moe
from jax_turbobus.bench import peers, routing
from jax_turbobus.bench._experts_bounds import best_bound, label_of, peer_bound
from jax_turbobus.bench._experts_race import OURS, Race
from jax_turbobus.bench._layer import Layer, ours
from jax_turbobus.bench._report import Row
from jax_turbobus.moe._traffic import ExchangeShape

__all__ = ["compare_at_one_size"]


def compare_at_one_size(args: argparse.Namespace) -> list[Row]:
    """Checks and times all schemes at one size.

    Args:
      args: options that have been checked, and ``devices``, a ``prefix`` of the rows'
        names, ``has_peers`` (GPUs reach each other's memory) and ``pair_limit_s`` (of
        one pair's rounds).

    Returns:
      Rows of errors, of times against each peer, of the bounds against the best exact
      one, and, where a program is one layer, of bytes.
    """
    devices = args.devices
    num_ranks = len(devices)
    shape = ExchangeShape(
        tokens_per_rank=args.tokens if args.per_rank else args.tokens // num_ranks,
        hidden=args.hidden,
        num_experts=args.experts,
        top_k=args.topk,
        num_ranks=num_ranks,
        dtype=args.dtype,
    )
    expert_ids = [
        routing.expert_ids(args.route, shape, seed=args.seed, draw=1 + i)
        for i in range(args.layers)
    ]
    mine = ours(args.schedule)
    rows: list[Row] = []
    for slack in args.slack.split(","):
        case = peers.Case.with_slack(
            shape, None if slack == "dropless" else float(slack)
        )
        mesh = Mesh(np.array(devices), (case.axis_name,), axis_types=(AxisType.Auto,))
        layer = Layer.make(case, mesh, expert_ids, args.seed)
        race = Race(
            layer,
            args.prefix + _name(case, slack, args),
            {OURS: mine} | peers.chosen(args.only),
            has_backward=not args.forward_only,
        )
        rows += race.check()

        def bound(
            metric: str, peer: str | None, case: peers.Case = case, slack: str = slack
        ) -> str | None:
            if peer is None:
                return best_bound(case, slack, metric, args)
            return peer_bound(peer, case, slack, metric, args.route)

        rows += race.run(
            rounds=args.rounds,
            limit_s=args.pair_limit_s,
            in_a_row=args.in_a_row,
            bound=bound,
        )
    if args.layers == 1:
        rows += _bytes(args, shape, expert_ids[0], _counted(layer, mine))
    return rows


def _counted(layer: Layer, scheme: peers.Peer) -> list[moe.ExchangeStats]:
    """Returns what one call of ours moves, as it is counted while it runs."""
    moe.reset_exchange_stats()
    layer.forward(scheme)()
    return moe.exchange_stats()


def _name(case: peers.Case, slack: str, args: argparse.Namespace) -> str:
    s = case.shape
    routed = "" if args.route == "uniform" else f", {args.route}"
    layers = "" if args.layers == 1 else f", {args.layers} layers in one program"
    return (
        f"{s.num_ranks} x {s.tokens_per_rank} tokens, hidden {s.hidden} {s.dtype},"
        f" {s.num_experts} experts, top-{s.top_k}{routed}, capacity {label_of(slack)}"
        f"{layers}"
    )


def _bytes(
    args: argparse.Namespace,
    shape: ExchangeShape,
    expert_ids: np.ndarray[Any, Any],
    counted: list[moe.ExchangeStats],
) -> list[Row]:
    """Returns what crosses between ranks, dispatch and combine together."""
    volume = moe.volume(**dataclasses.asdict(shape), expert_ids=expert_ids)
    taken = [kind.schedule for kind in counted if kind.op == "dispatch"]
    schedule = taken[0] if taken else "packed"
    case = (
        f"{args.prefix}{shape.num_ranks} x {shape.tokens_per_rank} tokens,"
        f" {args.route}, {schedule}"
    )
    own = volume[schedule]
    rows = [
        Row.make(
            case,
            "moved between ranks, MiB",
            own.total_bytes / 2**20,
            peer=volume[name].total_bytes / 2**20,
            peer_name=name,
        )
        for name in peers.EVERYONE
    ]
    # Without what is exchanged about the rows: counts, places.
    rows_alone = float(own.dispatch.sum() + own.combine.sum())
    return [
        *rows,
        Row.make(
            case,
            "rows moved, MiB, as exchange_stats counts them",
            sum(kind.total_bytes for kind in counted) / 2**20,
            peer=rows_alone / 2**20,
            peer_name="moe.volume",
            required="<= 1",
        ),
    ]
