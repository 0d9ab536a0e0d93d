"""What the engine of this process has done: `stats` and `trace`."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jax_turbobus import _trace_format, config, gpu

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
      busy_ns: time in which at least one block was on it; of GPUs' links, that of
        their lanes added up.
    """

    name: str
    bandwidth_bytes_per_s: float
    num_bytes: int
    num_blocks: int
    busy_ns: int


@dataclass(frozen=True, slots=True)
class LaneStats:
    """What a lane has done; None: nobody knows.

    On GPUs the device copies by itself, and blocks are not looked at one by one:
    what is about time is of a transfer's whole part on a lane.

    Attributes:
      name: such as ``gpu0 h2d via gpu1``.
      gpu: whose transfers it serves.
      relay: the GPU that lends its link; None: direct.
      direction: ``"h2d"`` or ``"d2h"``.
      numa_node: where the host memory is; None on GPUs, where it may be anywhere.
      bandwidth_bytes_per_s: of the slowest link on the way.
      num_bytes: bytes of blocks that arrived.
      num_blocks: blocks that arrived.
      busy_ns: time in which it worked on at least one block.
      queued_ns: between the issue of each block and the lane's turning to it; None
        on GPUs.
      num_late_blocks: blocks that took over 1.25 times what they should; on GPUs
        parts of transfers that did.
      num_failed_blocks: blocks that did not arrive; on GPUs those that a relay
        refused, and transfers that the direct lane did.
      num_bytes_in_flight: issued to it at the moment; on GPUs all of a transfer
        until it is over.
      is_removed: it has vanished, and is not used any more.
      reason: of the last failure, why it was removed, or why it was left out of the
        latest transfer or gets less than its share; may be empty.
    """

    name: str
    gpu: int
    relay: int | None
    direction: Direction
    numa_node: int | None
    bandwidth_bytes_per_s: float
    num_bytes: int
    num_blocks: int
    busy_ns: int
    queued_ns: int | None
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

    `print` shows the links that were used; the fields have everything.

    Times are nanoseconds of one clock that starts anywhere.

    Attributes:
      is_enabled: whether there is an engine.
      now_ns: when this was taken.
      created_ns: when the engine was made.
      num_submitted: transfers submitted.
      num_in_flight: transfers not yet over.
      num_completed: transfers that ended well.
      num_failed: transfers that ended with an error.
      num_cancelled: transfers that were cancelled; on GPUs none can be.
      num_completed_bytes: bytes of those that ended well.
      num_blocks_in_flight: blocks issued to lanes at the moment.
      num_reissued_blocks: blocks that had to be issued again.
      num_late_copies: emulated steps that this machine was too slow for.
      staging_bytes: device memory that each GPU lends along with its link, by its
        number; allocated once. Empty on CPU devices.
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
    staging_bytes: Mapping[int, int] = field(default_factory=dict)
    lanes: tuple[LaneStats, ...] = ()
    links: tuple[LinkStats, ...] = ()
    recent_transfers: tuple[TransferStats, ...] = ()

    def __str__(self) -> str:
        """Returns the sums and a table of the links that were used."""
        if not self.is_enabled:
            return "no engine: transfers are plain copies, and nothing is counted"
        counts = {
            "transfers": self.num_completed,
            "in flight": self.num_in_flight,
            "failed": self.num_failed,
            "cancelled": self.num_cancelled,
            "blocks issued again": self.num_reissued_blocks,
        }
        told = (f"{n} {what}" for what, n in counts.items() if n or what == "transfers")
        lines = [f"{', '.join(told)}; {self.num_completed_bytes / 2**20:.4g} MiB"]
        used = [link for link in self.links if link.num_blocks]
        width = max((len(link.name) for link in used), default=0)
        lines += [
            f"  {link.name:{width}}  {link.num_bytes / 2**20:10.4g} MiB"
            f"  busy {link.busy_ns * 1e-6:10.4g} ms"
            for link in used
        ]
        return "\n".join(lines)

    def bytes_by_link(self) -> dict[str, int]:
        """Returns the bytes that crossed each link and direction that was used."""
        return {link.name: link.num_bytes for link in self.links if link.num_bytes}


def stats() -> Stats:
    """Returns what this process's engine has done, by lane, link and transfer.

    That of `configure` if there is one, else that of the GPUs. Where there is neither
    (plain copies on CPU devices) `is_enabled` is False and nothing is counted.
    """
    engine = config.engine() or gpu.engine()
    return Stats() if engine is None else stats_of(engine)


def stats_of(engine: Any) -> Stats:
    """Returns what one engine has done, as `stats` does."""
    raw = engine.stats()
    lanes = tuple(LaneStats(**lane) for lane in raw.pop("lanes"))
    links = tuple(LinkStats(**link) for link in raw.pop("links"))
    transfers = tuple(TransferStats(**one) for one in raw.pop("recent_transfers"))
    return Stats(
        is_enabled=True, lanes=lanes, links=links, recent_transfers=transfers, **raw
    )


def trace(path: str | os.PathLike[str]) -> int:
    """Writes every recorded block to a file that Perfetto and Chrome open.

    One process of tracks for the lanes and one for the transfers, whose arguments
    and flow arrows say which block belongs to which transfer. A relay lane has a
    track for each hop; but on GPUs one, where cores copy a row of a stack.

    Args:
      path: the JSON file to write (ui.perfetto.dev or chrome://tracing opens it).

    Returns:
      The number of blocks and transfers written.

    Raises:
      TypeError: `path` is not a path.
      ValueError: nothing is recorded: `configure` was not told to.
      OSError: the file cannot be written.
    """
    given: object = path  # whatever the annotation says
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"path: expected the path of a file to write, got {given!r}")
    if "\0" in os.fsdecode(path):
        raise ValueError(f"path: expected the path of a file to write, got {given!r}")
    engine = config.engine()
    is_traced = engine is not None and config.current().trace_events
    if engine is None and (gpus := gpu.engine()) is not None:
        engine, is_traced = gpus, gpus.is_traced
    if engine is None or not is_traced:
        raise ValueError(
            "trace: nothing is recorded; call jax_turbobus.configure(trace=True, ...) "
            "or set JAX_TURBOBUS_TRACE=1 first"
        )
    return write_trace(engine, path)


def write_trace(engine: Any, path: str | os.PathLike[str]) -> int:
    """Writes what an engine has recorded, as `trace` does.

    Returns:
      The number of blocks and transfers written.
    """
    events = engine.trace()
    lanes = [lane["name"] for lane in engine.stats()["lanes"]]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(_trace_format.chrome_trace(events, lanes), file)
    return len(events)
