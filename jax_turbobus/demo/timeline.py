"""When each link was busy, and with whose bytes: a recorded trace, link by link.

A trace has a track for each hop of a lane, so that overlapping blocks can be told
apart. People ask about links. Here a lane's hops are laid over the links they cross.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jax_turbobus._observe import LaneStats
from jax_turbobus.topology import Topology

__all__ = [
    "Span",
    "fullest_burst",
    "hops",
    "hops_on_gpus",
    "link_names",
    "newest",
    "spans",
]


@dataclasses.dataclass(frozen=True)
class Span:
    """A block on one direction of a link.

    Attributes:
      link: such as ``pcie0 numa0>gpu0``, as `stats` names it.
      gpu: whose bytes.
      is_relayed: whether they are on their way through another GPU.
      start_ms: since the trace began.
      duration_ms: until the block was across.
    """

    link: str
    gpu: int
    is_relayed: bool
    start_ms: float
    duration_ms: float


def _walk(topology: Topology, links: Sequence[int], start: str) -> Iterator[str]:
    """Yields the name of each link in the direction it is crossed from `start`."""
    node = start
    for index in links:
        link = topology.links[index]
        node, before = (link.b, node) if link.a == node else (link.a, node)
        yield f"{link.id} {before}>{node}"


def hops(topology: Topology, lane: LaneStats) -> list[list[str]]:
    """Returns the links of each hop of a lane: one if direct, two over a relay."""
    node = topology.gpus[lane.gpu].numa_node
    if lane.numa_node is not None:
        node = lane.numa_node
    ways = topology.paths(lane.gpu, lane.direction, node)
    path = next(way for way in ways if way.relay == lane.relay)
    memory = topology.numa_nodes[node].id
    start = memory if lane.direction == "h2d" else topology.gpus[lane.gpu].id
    names = list(_walk(topology, path.links, start))
    if lane.relay is None:
        return [names]
    # The relay's own way to host memory is one hop, the fabric between is the other.
    own = len(topology.paths(lane.relay, lane.direction, node)[0].links)
    cut = own if lane.direction == "h2d" else len(names) - own
    return [names[:cut], names[cut:]]


def hops_on_gpus(lane: LaneStats) -> list[list[str]]:
    """Returns the one link of a lane of real GPUs that is watched: to the host."""
    if lane.relay is None:
        return [[f"pcie gpu{lane.gpu} {lane.direction}"]]
    to_host = [f"pcie gpu{lane.relay} {lane.direction}"]
    return [to_host, []] if lane.direction == "h2d" else [[], to_host]


def link_names(topology: Topology) -> list[str]:
    """Returns every link in each direction, in the topology's order."""
    return [
        f"{link.id} {a}>{b}"
        for link in topology.links
        for a, b in ((link.a, link.b), (link.b, link.a))
    ]


def spans(
    trace: Path,
    lanes: Sequence[LaneStats],
    hops_of: Callable[[LaneStats], list[list[str]]],
) -> list[Span]:
    """Returns what a trace recorded, by link.

    Args:
      trace: a file that `jax_turbobus.trace` wrote.
      lanes: the engine's lanes, from `jax_turbobus.stats`.
      hops_of: the links of each hop of a lane.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    lane_of = {lane.name: lane for lane in lanes}
    links_of = {lane.name: hops_of(lane) for lane in lanes}
    result = []
    for event in events:
        if event["ph"] != "X" or event["cat"] != "block":
            continue
        name, _, hop = tracks[event["pid"], event["tid"]].partition(", ")
        links = links_of[name]
        if hop:
            links = [links[1 if hop == "second hop" else 0]]
        result += [
            Span(
                link=link,
                gpu=lane_of[name].gpu,
                is_relayed=lane_of[name].relay is not None,
                start_ms=event["ts"] / 1e3,
                duration_ms=event["dur"] / 1e3,
            )
            for link in itertools.chain.from_iterable(links)
        ]
    return result


def newest(found: Sequence[Span], duration_ms: float = math.inf) -> list[Span]:
    """Returns the spans of the last `duration_ms`, times counted from the first."""
    end = max((span.start_ms + span.duration_ms for span in found), default=0.0)
    late = [span for span in found if span.start_ms >= end - duration_ms]
    start = min((span.start_ms for span in late), default=0.0)
    return [dataclasses.replace(span, start_ms=span.start_ms - start) for span in late]


def fullest_burst(found: Sequence[Span], gap_ms: float = 1.0) -> list[Span]:
    """Returns the most spans between two pauses, times counted from the first.

    Args:
      found: spans in any order.
      gap_ms: how long all links must be quiet for a pause.
    """
    bursts: list[list[Span]] = [[]]
    end = math.inf
    for span in sorted(found, key=lambda span: span.start_ms):
        if span.start_ms > end + gap_ms:
            bursts.append([])
            end = 0.0
        bursts[-1].append(span)
        own_end = span.start_ms + span.duration_ms
        end = own_end if math.isinf(end) else max(end, own_end)
    return newest(max(bursts, key=len))
