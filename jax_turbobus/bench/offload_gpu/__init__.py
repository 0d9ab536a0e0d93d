"""Offload on GPUs against JAX's own transfers: `python -m jax_turbobus bench offload`.

What is timed: a jitted program from its call until its result is ready, bytes
checked once before. Medians of rounds in which both sides take turns, in one
process, with every other GPU idle unless a case says otherwise.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator

import jax

from jax_turbobus import _ffi
from jax_turbobus.bench import _options
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.offload_gpu import (
    allocators,
    engine,
    neighbours,
    programs,
    transfers,
)
from jax_turbobus.bench.offload_gpu._setup import MIB, Setup
from jax_turbobus.bench.offload_gpu.donor import donor

__all__ = ["CASES", "add_arguments", "run"]


CASES: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "one-way": transfers.one_way,
    "both-ways": transfers.both_ways,
    "two-gpus": transfers.two_gpus,
    "fetch": transfers.fetch,
    "adam": programs.adam,
    "overlap": programs.beside_matmuls,
    "layers": programs.layers,
    "donor": donor,
    "small-behind-large": neighbours.small_behind_large,
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
    parser.add_argument(
        "--shrink", type=int, default=1, help="divides every size, for trying out"
    )
    parser.add_argument(
        "--limit-s", type=int, default=0, help="start no case after so many seconds"
    )
    parser.add_argument(
        "--least-mib", type=int, default=0, help="smallest transfer of one-way (0)"
    )
    parser.add_argument(
        "--most-mib", type=int, default=1 << 20, help="largest transfer of one-way"
    )


def run(args: argparse.Namespace) -> list[Row]:
    """Returns the rows of all cases that were asked for.

    A case that fails is a row that says so; the others still run.

    Args:
      args: what `add_arguments` defines.
    """
    _options.check_whole("--shrink", args.shrink, 1, 1 << 20)
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
    rows: list[Row] = []
    began = time.perf_counter()
    for name, case in CASES.items():
        if name not in args.only or name in args.skip:
            continue
        start = time.perf_counter()
        if args.limit_s and start - began > args.limit_s:
            _say(f"{name}: not measured: {args.limit_s} s are over")
            continue
        try:
            for row in case(setup):
                rows.append(row)
                _say(_line(row))
        except KeyboardInterrupt:
            _say(f"{name}: interrupted; what was measured so far is kept")
            rows.append(Row.make(name, "interrupted", 0.0, required=">= 1"))
            break
        except (OSError, RuntimeError, ValueError, TypeError, AssertionError) as error:
            _say(f"{name}: {type(error).__name__}: {str(error)[:2000]}")
            rows.append(Row.make(name, "failed", 0.0, required=">= 1"))
        _say(f"  ({name}: {time.perf_counter() - start:.1f} s)")
        gc.collect()
        jax.clear_caches()
    return rows


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _line(row: Row) -> str:
    peer = "" if row.peer is None else f" / {row.peer:.3f} ({row.peer_name})"
    ratio = "" if row.ratio is None else f" = {row.ratio:.3f}"
    verdict = {True: "ok", False: "NOT REACHED", None: ""}[row.ok]
    return (
        f"{row.case}, {row.metric}: {row.ours:.3f}{peer}{ratio} "
        f"{row.required or ''} {verdict}"
    )
