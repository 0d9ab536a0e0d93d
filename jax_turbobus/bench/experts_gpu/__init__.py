"""The expert exchange on GPUs: every line of what is asked, with and without peers.

`python -m jax_turbobus bench experts` on GPUs, without sizes. The half without peer
access runs in a process of its own, where neither we (`JAX_TURBOBUS_PEER_ACCESS=0`) nor
NCCL (`NCCL_P2P_DISABLE=1`) let a GPU reach another's memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import jax

from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu import (
    drop_in,
    layers,
    links,
    overlap,
    skew,
    steps,
)
from jax_turbobus.bench.experts_gpu._setup import Setup

__all__ = ["CASES", "add_arguments", "run"]

CASES: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "layers": layers.layers,
    "links": links.links,
    "drop_in": drop_in.drop_in,
    "skew": skew.skew,
    "overlap": overlap.overlap,
    "steps": steps.steps,
}
_NO_PEERS = {"JAX_TURBOBUS_PEER_ACCESS": "0", "NCCL_P2P_DISABLE": "1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the whole table."""
    parser.add_argument(
        "--cases", nargs="*", choices=CASES, default=[*CASES], help="of the table"
    )
    parser.add_argument(
        "--access",
        choices=("both", "peer", "none"),
        default="both",
        help="of the table: GPUs that reach each other's memory, or do not",
    )
    parser.add_argument(
        "--shrink", type=int, default=1, help="of the table: divides every size"
    )


def run(args: argparse.Namespace) -> list[Row]:
    """Returns the rows of the table; a case that fails is a row that says so.

    Args:
      args: what `add_arguments` defines, and ``rounds``.
    """
    rows: list[Row] = []
    if args.access != "none":
        rows += _run_here(args, has_peers=True)
    if args.access == "none" and _NO_PEERS.items() <= os.environ.items():
        rows += _run_here(args, has_peers=False)
    elif args.access != "peer":
        rows += _run_without_peers(args)
    return rows


def _run_here(args: argparse.Namespace, *, has_peers: bool) -> list[Row]:
    setup = Setup(jax.devices(), args.rounds, args.shrink, has_peers)
    rows = []
    for name in args.cases:
        start = time.perf_counter()
        try:
            for row in CASES[name](setup):
                rows.append(row)
                _say(str(row))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            _say(f"{name}: {type(error).__name__}: {str(error)[:2000]}")
            rows.append(Row.make(name, "failed", 0.0, required=">= 1"))
        _say(f"  ({name}: {time.perf_counter() - start:.1f} s)")
        jax.clear_caches()
    return rows


def _run_without_peers(args: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        command = [sys.executable, "-m", "jax_turbobus", "bench", "experts"]
        command += ["--access", "none", "--cases", *args.cases]
        command += ["--rounds", str(args.rounds), "--shrink", str(args.shrink)]
        command += ["--json", path, "--no-check"]
        # This process holds most of the GPUs' memory.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | _NO_PEERS
        done = subprocess.run(command, env=os.environ | environment, check=False)
        if done.returncode != 0:
            return [Row.make("no peer access", "failed", 0.0, required=">= 1")]
        with open(path, encoding="utf-8") as file:
            return [Row(**row) for row in json.load(file)["rows"]]


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
