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

import jax

from jax_turbobus.bench import _cases
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu import (
    drop_in,
    layers,
    links,
    overlap,
    parts,
    skew,
    steps,
)
from jax_turbobus.bench.experts_gpu._setup import Setup

__all__ = ["CASES", "add_arguments", "run"]

# What the profiler has once been used for may start calls more slowly: cases that use
# it come last, and use it last.
CASES: dict[str, _cases.Case] = {
    "layers": layers.layers,
    "drop_in": drop_in.drop_in,
    "skew": skew.skew,
    "overlap": overlap.overlap,
    "steps": steps.steps,
    "links": links.links,
    "parts": parts.parts,
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
    _cases.add_arguments(parser)


def run(args: argparse.Namespace) -> list[Row]:
    """Returns the rows of the table; a case that fails is a row that says so.

    Args:
      args: what `add_arguments` defines, and ``rounds``.
    """
    _cases.check_arguments(args)
    rows: list[Row] = []
    if args.access != "none":
        rows += _run_here(args, has_peers=True)
        if _cases.is_interrupted(rows):
            return rows
    if args.access == "none" and _NO_PEERS.items() <= os.environ.items():
        rows += _run_here(args, has_peers=False)
    elif args.access != "peer":
        rows += _run_without_peers(args)
    return rows


def _run_here(args: argparse.Namespace, *, has_peers: bool) -> list[Row]:
    setup = Setup(jax.devices(), args.rounds, args.shrink, has_peers)
    cases = {name: CASES[name] for name in args.cases}
    return _cases.run(cases, setup, limit_s=args.limit_s)


def _run_without_peers(args: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        command = [sys.executable, "-m", "jax_turbobus", "bench", "experts"]
        command += ["--access", "none", "--cases", *args.cases]
        for name in ("rounds", "shrink", "limit_s"):
            option = f"--{name.replace('_', '-')}"
            command += [option, str(getattr(args, name))]
        command += ["--json", path, "--no-check"]
        # This process holds most of the GPUs' memory.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | _NO_PEERS
        done = subprocess.run(command, env=os.environ | environment, check=False)
        if done.returncode != 0:
            return [
                Row.failure(
                    "no peer access",
                    "failed",
                    f"its process ended with status {done.returncode}",
                )
            ]
        with open(path, encoding="utf-8") as file:
            return [Row(**row) for row in json.load(file)["rows"]]
