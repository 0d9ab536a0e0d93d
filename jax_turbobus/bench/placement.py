"""What `moe.plan_placement` gains over experts in order, by the model of links.

Nothing runs: routing is drawn, a plan is made from one draw and judged on another of
the same popularity. *Busiest link*: the bytes, dispatch and combine, on the link that
takes longest over them. *Modelled*: the busiest link's time in dispatch plus that in
combine, plus the rows of the fullest rank's experts. Two regimes: experts that work on
a row as long as it takes on the median link, and experts that cost nothing.
"""

import argparse
import dataclasses
import pathlib

import numpy as np
import numpy.typing as npt

from jax_turbobus.bench import _options, routing
from jax_turbobus.bench._report import Row
from jax_turbobus.moe import (
    _choice,
    _placement,
    _placement_plan,
    _placement_search,
    _volume,
)
from jax_turbobus.moe._counts import ExchangeShape
from jax_turbobus.topology import Topology

__all__ = ["MACHINES", "ROUTES", "Outcome", "add_arguments", "markdown", "run", "study"]

ROUTES = ("uniform", "zipf:0.6", "zipf:1.0", "zipf:1.4", "one-hot", "empty-rank")

# Topology -> tokens a rank, hidden, experts, top-k, ranks.
MACHINES = {
    "4xrtx4090": ExchangeShape(4096, 4096, 64, 2, 4),
    "8xh800": ExchangeShape(4096, 2048, 128, 8, 8),
}
_SPARE_SLOTS = 2  # a rank, for second copies
_SAMPLE = 2048  # tokens a rank that a plan is made from

_BEGIN, _END = "<!-- bench placement: begin -->", "<!-- end -->"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A placement under a routing that it was not made from.

    Attributes:
      link: name of the link that is busy longest.
      link_mib: what crosses it, dispatch and combine.
      fullest_rows: rows of the fullest rank's experts.
      seconds: modelled.
    """

    link: str
    link_mib: float
    fullest_rows: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what to study."""
    parser.add_argument(
        "--topology", default=",".join(MACHINES), help="machines, with commas between"
    )
    parser.add_argument(
        "--route", default=",".join(ROUTES), help="routings, with commas between"
    )
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        help=f"put the table into this file, between {_BEGIN} and {_END}",
    )


def run(args: argparse.Namespace) -> list[Row]:
    """Plans and judges.

    Returns:
      For each machine, regime, routing and number of slots: the modelled time and the
      busiest link's bytes against experts in order.

    Raises:
      OptionError: unknown names, or a file without the marks.
    """
    machines = args.topology.split(",")
    for name in machines:
        _options.check_among("--topology", name, MACHINES)
    for route in args.route.split(","):
        routing.check_option(route)
    if args.markdown:
        _options.check_file("--markdown", args.markdown)
        around = _around_table(pathlib.Path(args.markdown))
    rows, lines = [], []
    for machine in machines:
        for route in args.route.split(","):
            for costs_work in (True, False):
                results = study(machine, route, costs_work=costs_work)
                lines.append(markdown(machine, route, costs_work, results))
                rows += _rows(machine, route, costs_work, results)
    if args.markdown:
        _write_table(pathlib.Path(args.markdown), around, lines)
    return rows


def study(machine: str, route: str, *, costs_work: bool) -> dict[str, Outcome]:
    """Returns outcomes: in order, planned, and planned with spare slots.

    Args:
      machine: one of `MACHINES`.
      route: as for `routing.popularity`.
      costs_work: experts take as long as rows do on the median link, not no time.
    """
    shape, topology = MACHINES[machine], Topology.load(machine)
    known = dataclasses.replace(shape, tokens_per_rank=_SAMPLE)
    sample, judged = (_ids(route, s, draw) for s, draw in ((known, 1), (shape, 2)))
    objective = _placement_search.Objective.make(
        _volume.wiring_of(shape.num_ranks, topology, None),
        shape.row_bytes,
        None if costs_work else 0.0,
        _choice.GPU_COSTS.link_bytes_per_s,
    )
    in_order = _placement.Placement.contiguous(shape.num_experts, shape.num_ranks)
    outcomes = {"in order": _judge(in_order, shape, judged, topology, objective)}
    for spare in (0, _SPARE_SLOTS):
        placement = _placement_plan.plan_placement(
            sample,
            topology,
            num_experts=shape.num_experts,
            slots_per_rank=shape.num_local_experts + spare,
            row_bytes=shape.row_bytes,
            row_seconds=objective.row_seconds,
        )
        name = f"planned, {spare} spare slots" if spare else "planned"
        outcomes[name] = _judge(placement, shape, judged, topology, objective)
    return outcomes


def _ids(route: str, shape: ExchangeShape, draw: int) -> npt.NDArray[np.int32]:
    ids = routing.expert_ids(route, shape, seed=0, draw=draw)
    return ids.reshape(shape.num_ranks, -1, shape.top_k)


def _judge(
    placement: _placement.Placement,
    shape: ExchangeShape,
    ids: npt.NDArray[np.int32],
    topology: Topology,
    objective: _placement_search.Objective,
) -> Outcome:
    v = _volume.volume(
        tokens_per_rank=shape.tokens_per_rank,
        hidden=shape.hidden,
        num_experts=placement.num_slots,
        top_k=shape.top_k,
        num_ranks=shape.num_ranks,
        dtype=shape.dtype,
        expert_ids=np.asarray(placement.route(ids)),
        topology=topology,
    )
    packed = v["packed"]
    loads = v.wiring.loads(packed, packed.dispatch)
    loads = loads + v.wiring.loads(packed, packed.combine)
    busiest = int(v.wiring.link_seconds(loads, 1.0).argmax())
    return Outcome(
        link=v.wiring.links[busiest].name,
        link_mib=float(loads[busiest]) / 2**20,
        fullest_rows=int(v.counts.received_rows.max()),
        seconds=float(
            objective.seconds(v.counts.unique * _off(shape), v.counts.copies)
        ),
    )


def _off(shape: ExchangeShape) -> npt.NDArray[np.float64]:
    return 1.0 - np.eye(shape.num_ranks)


def _regime(costs_work: bool) -> str:
    return "experts as long as rows travel" if costs_work else "links only"


def _rows(
    machine: str, route: str, costs_work: bool, results: dict[str, Outcome]
) -> list[Row]:
    before = results["in order"]
    rows = []
    for name, after in results.items():
        if name == "in order":
            continue
        case = f"{machine}, {route}, {_regime(costs_work)}, {name}"
        rows.append(
            Row.make(
                case,
                "modelled, ms",
                after.seconds * 1e3,
                peer=before.seconds * 1e3,
                peer_name="in order",
                # A plan is judged on tokens that it has not seen.
                required="<= 1.02",
            )
        )
        rows.append(
            Row.make(
                case,
                "busiest link, MiB",
                after.link_mib,
                peer=before.link_mib,
                peer_name="in order",
            )
        )
    return rows


def markdown(
    machine: str, route: str, costs_work: bool, results: dict[str, Outcome]
) -> str:
    """Returns one line of the table in docs/placement.md."""
    cells = [machine, route, _regime(costs_work)]
    for outcome in results.values():
        link = outcome.link.split()[0]
        cells.append(
            f"{outcome.seconds * 1e3:.2f} ms ({link} {outcome.link_mib:.0f} MiB,"
            f" {outcome.fullest_rows} rows)"
        )
    return "| " + " | ".join(cells) + " |"


def _around_table(path: pathlib.Path) -> tuple[str, str]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _options.OptionError(
            f"--markdown: expected a text with {_BEGIN} and {_END}, got {str(path)!r}: "
            f"{error}"
        ) from None
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise _options.OptionError(
            f"--markdown: expected {_BEGIN} and {_END} in {path}, found"
            f" {'the first' if begin else 'neither'}"
        )
    return before + begin, end + after


def _write_table(path: pathlib.Path, around: tuple[str, str], lines: list[str]) -> None:
    names = ["in order", "planned", f"planned, {_SPARE_SLOTS} spare slots a rank"]
    head = ["machine", "routing", "regime", *names]
    table = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]
    path.write_text("\n".join([around[0], *table, around[1]]))
