"""What the engine of this process has done: `stats` and `trace`."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jax_turbobus import config

__all__ = ["LaneStats", "LinkStats", "Stats", "TransferStats", "stats", "trace"]

Direction = Literal["h2d", "d2h"]


@dataclass(frozen=True, slots=True)
class LinkStats:
    """What has crossed one direction of a link; only blocks that arrived count.

    Attributes:
      name: the link's id in the topology and its direction: ``pcie0 numa0>gpu0``.
      bandwidth_bytes_per_s: of the topology, scaled.
      num_bytes: bytes of blocks that crossed it.
      num_blocks: blocks that crossed it.
      busy_ns: time in which at least one block was on it.
    """

    name: str
    bandwidth_bytes_per_s: float
    num_bytes: int
    num_blocks: int
    busy_ns: int


@dataclass(frozen=True, slots=True)
class LaneStats:
    """What a lane has done.

    Attributes:
      name: such as ``gpu0 h2d via gpu1``.
      gpu: whose transfers it serves.
      relay: the GPU that lends its link; None: direct.
      direction: ``"h2d"`` or ``"d2h"``.
      numa_node: where the host memory is.
      bandwidth_bytes_per_s: of the slowest link on the way.
      num_bytes: bytes of blocks that arrived.
      num_blocks: blocks that arrived.
      busy_ns: time in which it worked on at least one block.
      queued_ns: between the issue of each block and the lane's turning to it.
      num_late_blocks: blocks that took over 1.25 times what they should.
      num_failed_blocks: blocks that did not arrive.
      num_bytes_in_flight: issued to it at the moment.
      is_removed: it has vanished, and is not used any more.
      reason: of the last failure, or why it was removed; may be empty.
    """

    name: str
    gpu: int
    relay: int | None
    direction: Direction
    numa_node: int
    bandwidth_bytes_per_s: float
    num_bytes: int
    num_blocks: int
    busy_ns: int
    queued_ns: int
    num_late_blocks: int
    num_failed_blocks: int
    num_bytes_in_flight: int
    is_removed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TransferStats:
    """One transfer that is over.

    Attributes:
      id: its number.
      gpu: whose.
      direction: ``"h2d"`` or ``"d2h"``.
      size_bytes: its size.
      status: ``"OK"``, or the code of what it ended with.
      message: what it ended with; empty if OK.
      submitted_ns: when its data was ready.
      started_ns: when the first lane turned to it; 0: none did.
      ended_ns: when its last byte was in place.
      num_blocks: blocks that it was cut into, repeated ones included.
      num_relayed_bytes: how much of it went over other GPUs' links.
      num_reissued_blocks: blocks that had to be issued again.
      reissue_reason: why, the last time; may be empty.
    """

    id: int
    gpu: int
    direction: Direction
    size_bytes: int
    status: str
    message: str
    submitted_ns: int
    started_ns: int
    ended_ns: int
    num_blocks: int
    num_relayed_bytes: int
    num_reissued_blocks: int
    reissue_reason: str

    @property
    def bytes_per_s(self) -> float:
        """Its size over the time from submission to end; 0 for no bytes."""
        return self.size_bytes / max(self.ended_ns - self.submitted_ns, 1) * 1e9


@dataclass(frozen=True, slots=True)
class Stats:
    """What the engine has done since `configure`; all zero without an engine.

    Times are nanoseconds of one clock that starts anywhere.

    Attributes:
      is_enabled: whether there is an engine.
      now_ns: when this was taken.
      created_ns: when the engine was made.
      num_submitted: transfers submitted.
      num_in_flight: transfers not yet over.
      num_completed: transfers that ended well.
      num_failed: transfers that ended with an error.
      num_cancelled: transfers that were cancelled.
      num_completed_bytes: bytes of those that ended well.
      num_blocks_in_flight: blocks issued to lanes at the moment.
      num_reissued_blocks: blocks that had to be issued again.
      num_late_copies: emulated steps that this machine was too slow for.
      lanes: every lane.
      links: every link, each direction by itself.
      recent_transfers: the newest 256 transfers, oldest first.
    """

    is_enabled: bool = False
    now_ns: int = 0
    created_ns: int = 0
    num_submitted: int = 0
    num_in_flight: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_completed_bytes: int = 0
    num_blocks_in_flight: int = 0
    num_reissued_blocks: int = 0
    num_late_copies: int = 0
    lanes: tuple[LaneStats, ...] = ()
    links: tuple[LinkStats, ...] = ()
    recent_transfers: tuple[TransferStats, ...] = ()

    def bytes_by_link(self) -> dict[str, int]:
        """Returns the bytes that crossed each link and direction that was used."""
        return {link.name: link.num_bytes for link in self.links if link.num_bytes}


def stats() -> Stats:
    """Returns what this process's engine has done, by lane, link and transfer."""
    engine = config.engine()
    if engine is None:
        return Stats()
    raw = engine.stats()
    lanes = tuple(LaneStats(**lane) for lane in raw.pop("lanes"))
    links = tuple(LinkStats(**link) for link in raw.pop("links"))
    transfers = tuple(TransferStats(**one) for one in raw.pop("recent_transfers"))
    return Stats(
        is_enabled=True, lanes=lanes, links=links, recent_transfers=transfers, **raw
    )


def trace(path: str | os.PathLike[str]) -> int:
    """Writes every recorded block to a file that Perfetto and Chrome open.

    One process of tracks for the lanes (a relay lane has a track for each hop) and
    one for the transfers, whose arguments and flow arrows say which block belongs
    to which transfer.

    Args:
      path: the JSON file to write (ui.perfetto.dev or chrome://tracing opens it).

    Returns:
      The number of blocks and transfers written.

    Raises:
      ValueError: nothing is recorded: `configure` was not told to.
    """
    engine = config.engine()
    if engine is None or not config.current().trace_events:
        raise ValueError(
            "trace: nothing is recorded; call jax_turbobus.configure(trace=True, ...) "
            "or set JAX_TURBOBUS_TRACE=1 first"
        )
    events = engine.trace()
    lanes = [lane["name"] for lane in engine.stats()["lanes"]]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(events, lanes), file)
    return len(events)


_LANES, _TRANSFERS = 1, 2


def chrome_trace(events: list[dict[str, Any]], lanes: list[str]) -> dict[str, Any]:
    """Returns recorded events in Chrome's trace format.

    Args:
      events: what the C++ engine's `trace` returns.
      lanes: the lanes' names.
    """
    origin_ns = min((event["issued_ns"] for event in events), default=0)
    slices = [one for event in events for one in _slices(event, lanes)]
    tracks = _lay_out(slices)
    out = [
        _metadata("process_name", _LANES, 0, "jax_turbobus lanes"),
        _metadata("process_name", _TRANSFERS, 0, "jax_turbobus transfers"),
    ]
    for (process, track), name in tracks.names.items():
        out.append(_metadata("thread_name", process, track, name))
        out.append(_metadata("thread_sort_index", process, track, track))
    owners = {}
    for one, track in zip(slices, tracks.of_slices, strict=True):
        if one.process == _TRANSFERS:
            owners[one.arguments["transfer"]] = (one, track)
        out.append(one.event(track, origin_ns))
    for one, track in zip(slices, tracks.of_slices, strict=True):
        owner = owners.get(one.arguments["transfer"])
        if one.process == _LANES and one.is_first and owner is not None:
            out += _arrow(len(out), *owner, one, track, origin_ns)
    return {"displayTimeUnit": "ms", "traceEvents": out}


@dataclass(frozen=True, slots=True)
class _Slice:
    """A bar on a track; `is_first`: it is where its block's arrow ends."""

    process: int
    track: str
    title: str
    start_ns: int
    end_ns: int
    arguments: dict[str, Any]
    is_first: bool = True

    def event(self, track: int, origin_ns: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": self.title,
            "cat": "transfer" if self.process == _TRANSFERS else "block",
            "pid": self.process,
            "tid": track,
            "ts": (self.start_ns - origin_ns) / 1e3,
            "dur": (self.end_ns - self.start_ns) / 1e3,
            "args": self.arguments,
        }


def _slices(event: dict[str, Any], lanes: list[str]) -> Iterator[_Slice]:
    def arguments(*names: str) -> dict[str, Any]:
        return {name: event[name] for name in ("transfer", *names, "status")}

    title = f"transfer {event['transfer']}"
    if event["lane"] < 0:
        track = f"gpu{event['gpu']} {event['direction']}"
        yield _Slice(
            _TRANSFERS,
            track,
            title,
            event["issued_ns"],
            event["end_ns"],
            arguments("size_bytes"),
        )
        return
    lane = lanes[event["lane"]]
    title = f"{title} @{event['offset_bytes']}"
    about = arguments("offset_bytes", "size_bytes", "issued_ns")
    start_ns, end_ns = event["start_ns"], event["end_ns"]
    if not event["relayed_ns"]:
        yield _Slice(_LANES, lane, title, start_ns, end_ns, about)
        return
    # Two hops that work on different blocks at once: a track for each.
    relayed_ns = event["relayed_ns"]
    yield _Slice(_LANES, f"{lane}, first hop", title, start_ns, relayed_ns, about)
    if event["resumed_ns"]:
        resumed_ns = event["resumed_ns"]
        track = f"{lane}, second hop"
        yield _Slice(_LANES, track, title, resumed_ns, end_ns, about, is_first=False)


@dataclass(slots=True)
class _Tracks:
    # (process, number) -> name, in order
    names: dict[tuple[int, int], str]
    # the number of each slice's track
    of_slices: list[int]


def _lay_out(slices: list[_Slice]) -> _Tracks:
    """Returns numbered tracks; what overlaps goes to a second track below."""
    by_track: dict[tuple[int, str], list[int]] = {}
    for i, one in enumerate(slices):
        by_track.setdefault((one.process, one.track), []).append(i)
    tracks = _Tracks(names={}, of_slices=[0] * len(slices))
    first = 1
    for (process, name), members in sorted(by_track.items()):
        free_ns: list[int] = []  # when each row of this track is free again
        for i in sorted(members, key=lambda i: (slices[i].start_ns, i)):
            start_ns = slices[i].start_ns
            row = next((r for r, ns in enumerate(free_ns) if ns <= start_ns), None)
            if row is None:
                row = len(free_ns)
                free_ns.append(0)
                tracks.names[process, first + row] = name
            free_ns[row] = slices[i].end_ns
            tracks.of_slices[i] = first + row
        first += len(free_ns)
    return tracks


def _arrow(
    number: int,
    owner: _Slice,
    owner_track: int,
    block: _Slice,
    block_track: int,
    origin_ns: int,
) -> list[dict[str, Any]]:
    common = {"name": "block of", "cat": "flow", "id": number}
    issued_ns = min(max(block.arguments["issued_ns"], owner.start_ns), owner.end_ns)
    return [
        {
            "ph": "s",
            "pid": owner.process,
            "tid": owner_track,
            "ts": (issued_ns - origin_ns) / 1e3,
            **common,
        },
        {
            "ph": "f",
            "bp": "e",
            "pid": block.process,
            "tid": block_track,
            "ts": (block.start_ns - origin_ns) / 1e3,
            **common,
        },
    ]


def _metadata(kind: str, process: int, track: int, value: Any) -> dict[str, Any]:
    key = "sort_index" if kind == "thread_sort_index" else "name"
    return {
        "ph": "M",
        "name": kind,
        "pid": process,
        "tid": track,
        "args": {key: value},
    }
