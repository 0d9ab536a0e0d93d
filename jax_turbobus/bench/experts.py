"""Expert exchange against what JAX users write today, in alternating pairs.

What is timed: dispatch, a scaling of the rows as stand-in expert, and combine, as one
jitted program over all devices; forward alone, and forward with the gradients of
``sum(y ** 2) / 2`` in tokens, weights and scales. Ids are given (no router). Every
exact scheme, ours and theirs, has the same receive capacity and is checked against a
dense reference first. Each peer is timed in turn with ours (`_report.alternate`), and a
ratio is of two medians of the same pair.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from jax_turbobus import _compat, moe
from jax_turbobus.bench import _options, peers, routing
from jax_turbobus.bench._layer import Layer, ours
from jax_turbobus.bench._report import Row, alternate
from jax_turbobus.moe._routing import SCHEDULES
from jax_turbobus.moe._traffic import ExchangeShape

__all__ = ["add_arguments", "bench_devices", "run"]

# On CPU devices the comparison is that of four ranks.
_NUM_CPU_DEVICES = 4
_REEXECUTED = "JAX_TURBOBUS_BENCH_REEXECUTED"

_OURS = "ours"
_TOKENS = 4096
_DTYPES = ("float32", "bfloat16", "float16")
_MOST = 1 << 30
_EVERYONE = {**peers.EXACT, **peers.DROPPING}

# Bounds on ours / best exact peer: of one forward, of forward and backward.
_CPU_BOUNDS = {"1.25x": ("<= 0.3", "<= 0.55"), "dropless": ("<= 0.45", "<= 0.65")}
# (tokens a rank, hidden, experts, top-k) -> bounds with peer access, without.
_GPU_BOUNDS = {
    (4096, 4096, 64, 2): (1 / 2.2, 1 / 2.3),
    (16384, 2048, 128, 8): (1 / 1.7, 1 / 1.8),
    (128, 4096, 64, 2): (1 / 1.5, 1 / 1.3),
}
_GPU_BACKWARD_BOUND = 1 / 1.8
_RAGGED_BOUNDS = {"forward": 40, "forward + backward": 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes and what to compare with."""
    parser.add_argument(
        "--tokens",
        type=int,
        default=None,
        help=f"in all, or on a rank with --per-rank ({_TOKENS}; without it on GPUs: all"
        " that is asked there)",
    )
    parser.add_argument("--per-rank", action="store_true", help="--tokens is a rank's")
    parser.add_argument("--hidden", type=int, default=1024, help="elements of a row")
    parser.add_argument("--experts", type=int, default=32, help="experts in all")
    parser.add_argument("--topk", type=int, default=2, help="experts of a token")
    parser.add_argument("--dtype", default="float32", help="of a row")
    parser.add_argument(
        "--route",
        default="uniform",
        help="uniform, zipf:EXPONENT, one-hot (one rank gets all) or empty-rank",
    )
    parser.add_argument(
        "--slack",
        default="1.25,dropless",
        help="receive capacities: multiples of the balanced share, or 'dropless'",
    )
    parser.add_argument("--schedule", default="auto", help="ours, as for moe.dispatch")
    parser.add_argument(
        "--only", default="", help=f"time some of the peers: {', '.join(_EVERYONE)}"
    )
    parser.add_argument("--forward-only", action="store_true", help="no gradients")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each")
    parser.add_argument(
        "--in-a-row",
        type=int,
        default=1,
        metavar="N",
        help="time N calls, too, of which only the last is waited for",
    )
    parser.add_argument("--seed", type=int, default=0, help="of routing and values")
    if _compat.has_cuda_devices():
        from jax_turbobus.bench import experts_gpu

        experts_gpu.add_arguments(parser)


def run(args: argparse.Namespace) -> list[Row]:
    """Checks and times all schemes; on GPUs, without sizes, all that is asked there.

    Returns:
      Rows as `compare` does, or those of `experts_gpu`.

    Raises:
      OptionError: sizes or names that do not fit; the message names the option.
    """
    if args.tokens is None and jax.default_backend() != "cpu":
        # Imported here: it compares by `compare`.
        from jax_turbobus.bench import experts_gpu

        _options.check_whole("--rounds", args.rounds, 1, _MOST)
        _options.check_whole("--shrink", args.shrink, 1, _MOST)
        return experts_gpu.run(args)
    if args.tokens is None:
        args.tokens = _TOKENS
    args.devices = bench_devices()
    args.prefix = ""
    return compare(args)


def compare(args: argparse.Namespace) -> list[Row]:
    """Checks and times all schemes at one size.

    Args:
      args: options, and ``devices``, and a ``prefix`` of the rows' names.

    Returns:
      Rows of times against each peer, of the bounds against the best exact one, and
      of bytes.

    Raises:
      OptionError: sizes or names that do not fit; the message names the option.
    """
    devices = args.devices
    num_ranks = len(devices)
    _check_options(args, num_ranks)
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
        schemes = _runnable(layer, _chosen(args.only))
        mine = ours(args.schedule)
        rows += _check(layer, name, {_OURS: mine} | schemes)
        rows += _race(layer, name, slack, mine, schemes, args)
        schedule = _schedule_of(layer, mine)
    rows += _bytes(shape, expert_ids, args.route, schedule)
    return rows


def _check_options(args: argparse.Namespace, num_ranks: int) -> None:
    """Refuses options before anything is compiled.

    Raises:
      OptionError: sizes or names that do not fit.
    """
    for option, least in (
        ("tokens", 1),
        ("hidden", 1),
        ("experts", 1),
        ("topk", 1),
        ("rounds", 1),
        ("in_a_row", 1),
        ("seed", 0),
    ):
        _options.check_whole(
            f"--{option.replace('_', '-')}", getattr(args, option), least, _MOST
        )
    if not args.per_rank and args.tokens % num_ranks:
        raise _options.OptionError(
            f"--tokens: expected a multiple of the {num_ranks} devices, got"
            f" {args.tokens}; or give a rank's tokens with --per-rank"
        )
    if args.experts % num_ranks:
        raise _options.OptionError(
            f"--experts: expected a multiple of the {num_ranks} devices, got"
            f" {args.experts}; give {-(-args.experts // num_ranks) * num_ranks}"
        )
    _options.check_whole("--topk", args.topk, 1, args.experts)
    _options.check_among("--dtype", args.dtype, _DTYPES)
    _options.check_among("--schedule", args.schedule, ("auto", *SCHEDULES))
    for name in args.only.split(",") if args.only else ():
        _options.check_among("--only", name, _EVERYONE)
    for slack in args.slack.split(","):
        if slack != "dropless":
            _options.check_number("--slack", slack, "positive numbers or 'dropless'")
    routing.check_option(args.route)


def _schedule_of(layer: Layer, scheme: peers.Peer) -> str:
    """Returns the schedule that our dispatch took."""
    moe.reset_exchange_stats()
    layer.forward(scheme)()
    taken = [kind.schedule for kind in moe.exchange_stats() if kind.op == "dispatch"]
    return taken[0] if taken else "packed"


def bench_devices() -> list[jax.Device]:
    """Returns the devices to compare on; on CPU, four of them.

    A process that has fewer CPU devices starts itself again with four.
    """
    devices = jax.devices()
    if jax.default_backend() != "cpu":
        return devices
    if len(devices) < _NUM_CPU_DEVICES:
        _start_again()
    return devices[:_NUM_CPU_DEVICES]


def _start_again() -> NoReturn:
    if os.environ.get(_REEXECUTED):
        raise RuntimeError(
            f"bench experts: expected {_NUM_CPU_DEVICES} CPU devices, got"
            f" {jax.device_count()}; XLA_FLAGS={os.environ.get('XLA_FLAGS')!r}"
        )
    count = f"--xla_force_host_platform_device_count={_NUM_CPU_DEVICES}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    environment = os.environ | {"XLA_FLAGS": flags, _REEXECUTED: "1"}
    command = [sys.executable, "-m", "jax_turbobus", *sys.argv[1:]]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


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


def _label(slack: str) -> str:
    return slack if slack == "dropless" else f"{float(slack):g}x"


def _name(case: peers.Case, slack: str, route: str) -> str:
    s = case.shape
    routed = "" if route == "uniform" else f", {route}"
    return (
        f"{s.num_ranks} x {s.tokens_per_rank} tokens, hidden {s.hidden} {s.dtype},"
        f" {s.num_experts} experts, top-{s.top_k}{routed}, capacity {_label(slack)}"
    )


def _chosen(only: str) -> dict[str, peers.Peer]:
    names = only.split(",") if only else list(_EVERYONE)
    return {name: _EVERYONE[name] for name in names}


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
    bound = 1e-5 if wide else 3e-2
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
                required=f"<= {bound:g}" if is_exact else None,
            )
        )
    return rows


_FLOAT32_BYTES = 4


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
            must_beat = slack != "dropless" and peer_name == "capacity_scatter"
            is_cpu = jax.default_backend() == "cpu" and args.route == "uniform"
            rows.append(
                Row.make(
                    name,
                    f"{metric}, ms",
                    own * 1e3,
                    peer=other * 1e3,
                    peer_name=peer_name,
                    required="< 1"
                    if must_beat and is_cpu
                    else _ragged_bound(peer_name, layer.case, slack, metric),
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
                    required=_bound(layer.case, slack, metric, args),
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


def _bound(
    case: peers.Case, slack: str, metric: str, args: argparse.Namespace
) -> str | None:
    """Returns what is required of the ratio to the best exact peer, if anything is.

    The bounds are those of the machines and sizes that they were set for.
    """
    chosen = _chosen(args.only)
    # XLA's ragged exchange is not the best one: it may be left out.
    others = set(peers.EXACT) - {"ragged_all_to_all"}
    if args.route != "uniform" or not others <= set(chosen):
        return None
    shape = case.shape
    is_backward = metric != "forward"
    label = _label(slack)
    if jax.default_backend() == "cpu":
        default = (1024, 1024, 32, 2, 4)
        sizes = dataclasses.astuple(shape)[:5]
        is_default = sizes == default and shape.dtype == np.float32
        bounds = _CPU_BOUNDS.get(label) if is_default else None
        return bounds[is_backward] if bounds else None
    by_access = _GPU_BOUNDS.get(dataclasses.astuple(shape)[:4])
    if by_access is None or label != "1.25x":
        return None
    if is_backward:
        return f"<= {_GPU_BACKWARD_BOUND:.4g}"
    without_peer_access = os.environ.get("JAX_TURBOBUS_PEER_ACCESS") == "0"
    return f"<= {by_access[without_peer_access]:.4g}"


def _ragged_bound(
    peer_name: str, case: peers.Case, slack: str, metric: str
) -> str | None:
    """Returns what is required against XLA's own ragged exchange on GPUs."""
    is_large = case.shape.tokens_per_rank >= _TOKENS
    if peer_name != "ragged_all_to_all" or _label(slack) != "1.25x" or not is_large:
        return None
    return f"<= {1 / _RAGGED_BOUNDS[metric]:.4g}"


def _bytes(
    shape: ExchangeShape,
    expert_ids: np.ndarray[Any, Any],
    route: str,
    schedule: str,
) -> list[Row]:
    """Returns what crosses between ranks, dispatch and combine together."""
    counted = moe.volume(
        tokens_per_rank=shape.tokens_per_rank,
        hidden=shape.hidden,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        num_ranks=shape.num_ranks,
        dtype=shape.dtype,
        expert_ids=expert_ids,
    )
    own = counted[schedule].total_bytes / 2**20
    return [
        Row.make(
            f"{shape.num_ranks} x {shape.tokens_per_rank} tokens, {route}, {schedule}",
            "moved between ranks, MiB",
            own,
            peer=counted[name].total_bytes / 2**20,
            peer_name=name,
        )
        for name in _EVERYONE
    ]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
