"""Recorded blocks and transfers in the trace format of Chrome and Perfetto."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["chrome_trace"]

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
