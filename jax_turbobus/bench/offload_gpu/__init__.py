"""Offload on GPUs against JAX's own transfers: `python -m jax_turbobus bench offload`.

What is timed: a jitted program from its call until its result is ready, bytes
checked once before. Medians of rounds in which both sides take turns, in one
process, with every other GPU idle unless a case says otherwise.
"""

import argparse

import jax

from jax_turbobus import _ffi
from jax_turbobus.bench import _cases, _options
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.offload_gpu import (
    allocators,
    behind,
    engine,
    neighbours,
    programs,
    transfers,
)
from jax_turbobus.bench.offload_gpu._setup import MIB, Setup
from jax_turbobus.bench.offload_gpu.donor import donor

__all__ = ["CASES", "add_arguments", "run"]


CASES: dict[str, _cases.Case] = {
    "one-way": transfers.one_way,
    "both-ways": transfers.both_ways,
    "two-gpus": transfers.two_gpus,
    "fetch": transfers.fetch,
    "adam": programs.adam,
    "overlap": programs.beside_matmuls,
    "layers": programs.layers,
    "donor": donor,
    "small-behind-large": behind.small_behind_large,
    "busy-half": neighbours.busy_half,
    "host-time": engine.host_time,
    "sweep": engine.sweep,
    "allocators": allocators.allocators,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's arguments."""
    parser.add_argument("--only", nargs="*", choices=CASES, default=[*CASES])
    parser.add_argument("--skip", nargs="*", choices=CASES, default=[])
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds")
    parser.add_argument(
        "--platform", default="cuda", help="cpu: only to try the programs themselves"
    )
    _cases.add_arguments(parser)
    parser.add_argument(
        "--least-mib", type=int, default=0, help="smallest transfer of one-way (0)"
    )
    parser.add_argument(
        "--most-mib", type=int, default=1 << 20, help="largest transfer of one-way"
    )


def run(args: argparse.Namespace) -> list[Row]:
    """Returns the rows of all cases that were asked for.

    Args:
      args: what `add_arguments` defines.
    """
    _cases.check_arguments(args)
    _options.check_whole("--least-mib", args.least_mib, 0, 1 << 20)
    _options.check_whole("--most-mib", args.most_mib, 0, 1 << 20)
    _ffi.register()
    setup = Setup(
        jax.devices(args.platform),
        args.rounds,
        args.shrink,
        args.least_mib * MIB,
        args.most_mib * MIB,
    )
    chosen = {
        name: case
        for name, case in CASES.items()
        if name in args.only and name not in args.skip
    }
    return _cases.run(chosen, setup, limit_s=args.limit_s)
