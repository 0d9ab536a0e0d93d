"""`python -m jax_turbobus sim`: the scheduler in virtual time over a topology."""

import argparse
import json
import statistics
import sys

from jax_turbobus import sim
from jax_turbobus.sim._workloads import bimodal
from jax_turbobus.topology import Topology, names

__all__ = ["add_arguments", "run"]

_FIXED: dict[str, list[sim.Transfer]] = {
    "one": [sim.Transfer(0, 4 << 30)],
    "rounds": [
        sim.Transfer(0, 96 << 20, name="A"),
        sim.Transfer(0, 32 << 20, name="B"),
    ],
    "neighbours": [sim.Transfer(0, 64 << 30), sim.Transfer(1, 1 << 30, 50_000_000)],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "topology",
        nargs="?",
        default="2xh200",
        metavar="TOPOLOGY",
        help=f"{', '.join(names())} or a file",
    )
    parser.add_argument(
        "--workload",
        choices=[*_FIXED, "bimodal"],
        default="one",
        help="one: 4 GiB to GPU 0; rounds: A (96 MiB) and B (32 MiB) at once, both to "
        "GPU 0; neighbours: 64 GiB to GPU 0, and 1 GiB to GPU 1 from 50 ms on; "
        "bimodal: many large and small transfers to all GPUs",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status, after printing what each policy would take."""
    try:
        topology = Topology.load(args.topology)
        transfers = _FIXED.get(args.workload) or bimodal(topology)
        results = {
            name: sim.simulate(topology, transfers, name) for name in sim.POLICIES
        }
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        report = {
            name: {"durations_ns": r.durations_ns, "bytes_by_lane": r.bytes_by_lane()}
            for name, r in results.items()
        }
        print(json.dumps({"topology": topology.name, "policies": report}, indent=1))
        return 0
    columns = [t.name or f"to GPU {t.gpu}" for t in transfers]
    what = "of each transfer"
    if args.workload == "bimodal":
        columns, what = ["all", "large", "small"], "mean"
    print(f"{topology.name}, {args.workload}: ms to the last byte, {what}")
    print(f"{'policy':10s} {'  '.join(f'{name:>10s}' for name in columns)}")
    for name, result in results.items():
        figures: tuple[float, ...] = result.durations_ns
        if args.workload == "bimodal":
            figures = _means(result)
        times = "  ".join(f"{ns * 1e-6:10.3f}" for ns in figures)
        print(f"{name:10s} {times}  {sim.POLICIES[name].text}")
    return 0


def _means(result: sim.Result) -> tuple[float, ...]:
    """Returns mean durations in ns: all, large and small transfers."""
    pairs = list(zip(result.transfers, result.durations_ns, strict=True))
    kinds = ("", "large", "small")
    return tuple(
        statistics.fmean(ns for t, ns in pairs if kind in ("", t.name))
        for kind in kinds
    )
