"""Expert exchange against what JAX users write today, in alternating pairs.

What is timed: dispatch, a scaling of the rows as stand-in expert, and combine, as one
jitted program over all devices; forward alone, and forward with the gradients of
``sum(y ** 2) / 2`` in tokens, weights and scales. Ids are given (no router). With
several layers in one program a time is that of the program over their number. Every
exact scheme, ours and theirs, has the same receive capacity and is checked against a
dense reference first. Each peer is timed in turn with ours (`_report.alternate`), and a
ratio is of two medians of the same pair.
"""

import argparse

import jax

from jax_turbobus import _compat, _environment
from jax_turbobus.bench import _options, peers, routing
from jax_turbobus.bench._comparison import Comparison
from jax_turbobus.bench._devices import bench_devices
from jax_turbobus.bench._experts_comparison import compare
from jax_turbobus.bench._report import Row
from jax_turbobus.moe._counts import ExchangeShape
from jax_turbobus.moe._routing import SCHEDULES

__all__ = ["add_arguments", "run"]

_TOKENS = 4096
_DTYPES = ("float32", "bfloat16", "float16")
_MOST = 1 << 30


# What the table for GPUs fixes by itself.
_OF_ONE_SIZE = (
    "per_rank",
    "hidden",
    "experts",
    "topk",
    "dtype",
    "route",
    "slack",
    "schedule",
    "only",
    "forward_only",
    "in_a_row",
    "layers",
    "seed",
)


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
        "--only",
        default="",
        help=f"time some of the peers: {', '.join(peers.EVERYONE)}",
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
    parser.add_argument(
        "--layers",
        type=int,
        default=1,
        metavar="N",
        help="in one program, each of what the one before returned; times are of one",
    )
    parser.add_argument("--seed", type=int, default=0, help="of routing and values")
    if _compat.has_cuda_devices():
        from jax_turbobus.bench import experts_gpu

        experts_gpu.add_arguments(parser)


def run(args: argparse.Namespace) -> list[Row]:
    """Checks and times all schemes; on GPUs, without sizes, all that is asked there.

    Returns:
      Rows of times against each peer, of the bounds against the best exact one, and of
      bytes; or those of `experts_gpu`.

    Raises:
      OptionError: sizes or names that do not fit; the message names the option.
    """
    if args.tokens is None and jax.default_backend() != "cpu":
        # Imported here: on other machines there is nothing to import it for.
        from jax_turbobus.bench import experts_gpu

        _check_table(args)
        return experts_gpu.run(args)
    if args.tokens is None:
        args.tokens = _TOKENS
    devices = bench_devices()
    _check_options(args, len(devices))
    return list(compare(_comparison(args, devices)))


def _comparison(args: argparse.Namespace, devices: list[jax.Device]) -> Comparison:
    num_ranks = len(devices)
    names = tuple(peers.chosen(args.only))
    return Comparison(
        devices=devices,
        shape=ExchangeShape(
            tokens_per_rank=args.tokens if args.per_rank else args.tokens // num_ranks,
            hidden=args.hidden,
            num_experts=args.experts,
            top_k=args.topk,
            num_ranks=num_ranks,
            dtype=args.dtype,
        ),
        peers={
            None if slack == "dropless" else float(slack): names
            for slack in args.slack.split(",")
        },
        rounds=args.rounds,
        num_layers=args.layers,
        route=args.route,
        schedule=args.schedule,
        has_backward=not args.forward_only,
        in_a_row=args.in_a_row,
        seed=args.seed,
        has_peers=_environment.flag("PEER_ACCESS", default=True),
    )


def _check_table(args: argparse.Namespace) -> None:
    """Refuses options of one size where the whole table is measured.

    Raises:
      OptionError: one is not as it is by default.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    defaults = parser.parse_args([])
    for name in _OF_ONE_SIZE:
        if getattr(args, name) != getattr(defaults, name):
            raise _options.OptionError(
                f"--{name.replace('_', '-')}: is of one size: give --tokens, too;"
                " without it all that is asked on GPUs is measured, as it is asked"
            )


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
        ("layers", 1),
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
        _options.check_among("--only", name, peers.EVERYONE)
    for slack in args.slack.split(","):
        if slack != "dropless":
            _options.check_number("--slack", slack, "positive numbers or 'dropless'")
    routing.check_option(args.route)
