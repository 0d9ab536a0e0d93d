"""Runs the cases of a suite in turn, and keeps what they yield whatever happens."""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jax_turbobus.bench import _options
from jax_turbobus.bench._report import Row

__all__ = ["Case", "add_arguments", "check_arguments", "is_interrupted", "run"]

Case = Callable[[Any], Iterator[Row]]

# What a wrong result, a size that does not fit or a machine's failure raises.
_FAILURES = (OSError, RuntimeError, ValueError, TypeError, AssertionError)
_MOST = 1 << 20
_INTERRUPTED = "interrupted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what every suite of cases can be asked."""
    parser.add_argument(
        "--shrink",
        type=int,
        default=1,
        metavar="N",
        help="of the cases: divides every size, for trying out",
    )
    parser.add_argument(
        "--limit-s",
        type=int,
        default=0,
        metavar="S",
        help="of the cases: start none after so many seconds (0: no limit)",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Refuses what no suite of cases can be asked.

    Raises:
      OptionError: a number is out of its range.
    """
    _options.check_whole("--rounds", args.rounds, 1, _MOST)
    _options.check_whole("--shrink", args.shrink, 1, _MOST)
    _options.check_whole("--limit-s", args.limit_s, 0, _MOST)


def run(cases: Mapping[str, Case], setup: Any, *, limit_s: float = 0) -> list[Row]:
    """Returns the rows of all cases, in order, and shows them as they come.

    A case that fails, is interrupted or comes too late is a row that says so and that
    fails; what the case yielded before is kept. After an interrupt
    (Ctrl-C, SIGINT) no further case starts.

    Args:
      cases: by name.
      setup: what each gets.
      limit_s: no case starts after so many seconds; 0: all do.
    """
    rows: list[Row] = []
    began = time.perf_counter()

    def keep(row: Row) -> None:
        rows.append(row)
        _say(_line(row))

    for name, case in cases.items():
        start = time.perf_counter()
        if limit_s and start - began > limit_s:
            keep(Row.failure(name, f"not measured: {limit_s:g} s are over"))
            continue
        try:
            for row in case(setup):
                keep(row)
        except KeyboardInterrupt:
            keep(Row.failure(name, _INTERRUPTED))
            break
        except _FAILURES as error:
            note = f"{type(error).__name__}: {str(error)[:2000]}"
            keep(Row.failure(name, "failed", note))
        _say(f"  ({name}: {time.perf_counter() - start:.1f} s)")
        gc.collect()
        jax.clear_caches()
    return rows


def is_interrupted(rows: list[Row]) -> bool:
    """Returns whether a run ended before its last case because somebody wanted it."""
    return bool(rows) and rows[-1].metric == _INTERRUPTED


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _line(row: Row) -> str:
    peer = "" if row.peer is None else f" / {row.peer:.4g} ({row.peer_name})"
    ratio = "" if row.ratio is None else f" = {row.ratio:.3f}"
    verdict = {True: " ok", False: " NOT REACHED", None: ""}[row.ok]
    required = "" if row.required is None else f" {row.required}"
    note = "" if row.note is None else f" [{row.note}]"
    return (
        f"{row.case}, {row.metric}: {row.ours:.4g}{peer}{ratio}"
        f"{required}{verdict}{note}"
    )
