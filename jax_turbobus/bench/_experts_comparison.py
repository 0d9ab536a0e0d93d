"""Our exchange and its peers at one size: checked, timed in pairs, counted in bytes."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_turbobus import moe
from jax_turbobus.bench import peers, routing
from jax_turbobus.bench._experts_bounds import best_bound, label_of, peer_bound
from jax_turbobus.bench._layer import Layer, ours
from jax_turbobus.bench._report import Row, alternate
from jax_turbobus.moe._traffic import ExchangeShape

__all__ = ["compare_at_one_size"]

_OURS = "ours"
_FLOAT32_BYTES = 4


def compare_at_one_size(args: argparse.Namespace) -> list[Row]:
    """Checks and times all schemes at one size.

    Args:
      args: options that have been checked, and ``devices``, and a ``prefix`` of the
        rows' names.

    Returns:
      Rows of times against each peer, of the bounds against the best exact one, and
      of bytes.
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
    expert_ids = routing.expert_ids(args.route, shape, seed=args.seed)
    rows: list[Row] = []
    for slack in args.slack.split(","):
        capacity = _capacity(slack, shape)
        case = peers.Case(shape=shape, recv_capacity=capacity)
        mesh = Mesh(np.array(devices), (case.axis_name,))
        layer = Layer.make(case, mesh, expert_ids, args.seed)
        name = args.prefix + _name(case, slack, args.route)
        schemes = _runnable(layer, peers.chosen(args.only))
        mine = ours(args.schedule)
        rows += _check(layer, name, {_OURS: mine} | schemes)
        rows += _race(layer, name, slack, mine, schemes, args)
        schedule = _schedule_of(layer, mine)
    rows += _bytes(args.prefix, shape, expert_ids, args.route, schedule)
    return rows


def _schedule_of(layer: Layer, scheme: peers.Peer) -> str:
    """Returns the schedule that our dispatch took."""
    moe.reset_exchange_stats()
    layer.forward(scheme)()
    taken = [kind.schedule for kind in moe.exchange_stats() if kind.op == "dispatch"]
    return taken[0] if taken else "packed"


def _capacity(slack: str, shape: ExchangeShape) -> int:
    sizes = {
        "tokens_per_rank": shape.tokens_per_rank,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "num_ranks": shape.num_ranks,
    }
    if slack == "dropless":
        return moe.required_recv_capacity(**sizes)
    return moe.required_recv_capacity(**sizes, slack=float(slack))


def _name(case: peers.Case, slack: str, route: str) -> str:
    s = case.shape
    routed = "" if route == "uniform" else f", {route}"
    return (
        f"{s.num_ranks} x {s.tokens_per_rank} tokens, hidden {s.hidden} {s.dtype},"
        f" {s.num_experts} experts, top-{s.top_k}{routed}, capacity {label_of(slack)}"
    )


def _runnable(layer: Layer, schemes: dict[str, peers.Peer]) -> dict[str, peers.Peer]:
    """Returns the schemes without those that XLA lacks on this platform.

    Raises:
      JaxRuntimeError: a scheme fails for another reason.
    """
    runnable = {}
    for name, scheme in schemes.items():
        try:
            layer.forward(scheme)
        except jax.errors.JaxRuntimeError as error:
            if "UNIMPLEMENTED" not in str(error):
                raise
            _progress(f"{name}: not implemented on {jax.default_backend()}")
        else:
            runnable[name] = scheme
    return runnable


def _check(layer: Layer, name: str, schemes: Mapping[str, peers.Peer]) -> list[Row]:
    """Returns a row a scheme: how far it is from the dense reference."""
    want, want_grads = layer.reference()
    wide = layer.case.shape.dtype.itemsize >= _FLOAT32_BYTES
    most = 1e-5 if wide else 3e-2
    rows = []
    for scheme_name, scheme in schemes.items():
        is_exact = scheme_name not in peers.DROPPING
        error = _distance(np.asarray(layer.forward(scheme)()), want)
        if is_exact:
            grads = layer.forward_backward(scheme)()
            pairs = zip(map(np.asarray, grads), want_grads, strict=True)
            error = max(error, *(_distance(a, b) for a, b in pairs))
        rows.append(
            Row.make(
                name,
                f"{scheme_name}: largest error over largest value",
                error,
                required=f"<= {most:g}" if is_exact else None,
            )
        )
    return rows


def _distance(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def _race(
    layer: Layer,
    name: str,
    slack: str,
    mine: peers.Peer,
    schemes: Mapping[str, peers.Peer],
    args: argparse.Namespace,
) -> list[Row]:
    rows: list[Row] = []
    programs = {"forward": Layer.forward}
    if not args.forward_only:
        programs["forward + backward"] = Layer.forward_backward
    for metric, program in programs.items():
        pairs: dict[str, tuple[float, float]] = {}
        for peer_name, scheme in schemes.items():
            _progress(f"{name}: {metric}: {peer_name}")
            timing = alternate(
                {_OURS: program(layer, mine), peer_name: program(layer, scheme)},
                rounds=args.rounds,
            )
            pairs[peer_name] = (timing[_OURS].median, timing[peer_name].median)
        for peer_name, (own, other) in pairs.items():
            rows.append(
                Row.make(
                    name,
                    f"{metric}, ms",
                    own * 1e3,
                    peer=other * 1e3,
                    peer_name=peer_name,
                    required=peer_bound(
                        peer_name, layer.case, slack, metric, args.route
                    ),
                )
            )
        exact = {n: pair for n, pair in pairs.items() if n in peers.EXACT}
        if exact:
            best = min(exact, key=lambda n: exact[n][1])
            own, other = exact[best]
            rows.append(
                Row.make(
                    name,
                    f"{metric}, ms, best exact peer",
                    own * 1e3,
                    peer=other * 1e3,
                    peer_name=best,
                    required=best_bound(layer.case, slack, metric, args),
                )
            )
            if args.in_a_row > 1:
                several = {_OURS: mine, best: schemes[best]}
                timing = alternate(
                    {n: program(layer, s, args.in_a_row) for n, s in several.items()},
                    rounds=args.rounds,
                )
                rows.append(
                    Row.make(
                        name,
                        f"{metric}, ms, best exact peer, {args.in_a_row} in a row",
                        timing[_OURS].median * 1e3 / args.in_a_row,
                        peer=timing[best].median * 1e3 / args.in_a_row,
                        peer_name=best,
                    )
                )
    return rows


def _bytes(
    prefix: str,
    shape: ExchangeShape,
    expert_ids: np.ndarray[Any, Any],
    route: str,
    schedule: str,
) -> list[Row]:
    """Returns what crosses between ranks, dispatch and combine together."""
    counted = moe.volume(**dataclasses.asdict(shape), expert_ids=expert_ids)
    own = counted[schedule].total_bytes / 2**20
    return [
        Row.make(
            f"{prefix}{shape.num_ranks} x {shape.tokens_per_rank} tokens, {route},"
            f" {schedule}",
            "moved between ranks, MiB",
            own,
            peer=counted[name].total_bytes / 2**20,
            peer_name=name,
        )
        for name in peers.EVERYONE
    ]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
