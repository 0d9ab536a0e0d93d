"""A node in virtual time: steps a scheduler and plays its links."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jax_turbobus.sim._fluid import max_min_rates
from jax_turbobus.sim._types import Background, Block, BlockRecord, Scheduler, Transfer

__all__ = ["LaneModel", "run"]

# Bytes: what is left of a block by rounding is none.
_EPSILON = 1e-3
# The core counts nanoseconds in 64 bits, and adds latencies to them.
_LAST_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class LaneModel:
    """What a lane is in reality, whatever the scheduler was told.

    Attributes:
      resources: what its bytes draw on (indices into the capacities).
      latency_ns: from a block's last byte on its way to its arrival.
    """

    resources: tuple[int, ...]
    latency_ns: int = 0


@dataclass(slots=True)
class _Moving:
    block: Block
    issue_ns: int
    start_ns: int = -1
    left_bytes: float = 0


class _Links:
    """Lanes that each move one block at a time; what they share, they share fairly."""

    def __init__(self, lanes: Sequence[LaneModel], capacities: Sequence[float]) -> None:
        self._lanes = lanes
        self.capacities = list(capacities)
        self._waiting: dict[int, deque[_Moving]] = {}
        self._rates: dict[tuple[int, ...], list[float]] = {}
        self._now_ns = 0.0
        self._arriving: list[tuple[float, int, _Moving]] = []
        self._num_arrived = 0

    def issue(self, block: Block, now_ns: int) -> None:
        queue = self._waiting.setdefault(block.lane, deque())
        queue.append(_Moving(block, now_ns, left_bytes=block.size_bytes))
        if len(queue) == 1:
            queue[0].start_ns = now_ns

    def capacities_changed(self) -> None:
        self._rates.clear()

    def _active(self) -> tuple[tuple[int, ...], list[float]]:
        lanes = tuple(sorted(self._waiting))
        if lanes not in self._rates:
            uses = [self._lanes[lane].resources for lane in lanes]
            self._rates[lanes] = max_min_rates(
                uses, [max(0.0, c) for c in self.capacities]
            )
        return lanes, self._rates[lanes]

    def next_event_ns(self) -> float:
        """Returns when a block has passed or arrived, if nothing changes before."""
        events = [self._arriving[0][0]] if self._arriving else []
        for lane, rate in zip(*self._active(), strict=True):
            if rate > 0:
                left = self._waiting[lane][0].left_bytes
                events.append(self._now_ns + left / rate * 1e9)
        return min(events, default=float("inf"))

    def advance(self, now_ns: float) -> list[_Moving]:
        """Returns the blocks that have arrived, after moving bytes until `now_ns`."""
        passed_ns = now_ns - self._now_ns
        self._now_ns = now_ns
        for lane, rate in zip(*self._active(), strict=True):
            queue = self._waiting[lane]
            queue[0].left_bytes -= rate * passed_ns * 1e-9
            if queue[0].left_bytes > _EPSILON:
                continue
            moved = queue.popleft()
            arrival = now_ns + self._lanes[lane].latency_ns
            heapq.heappush(self._arriving, (arrival, self._num_arrived, moved))
            self._num_arrived += 1
            if queue:
                queue[0].start_ns = round(now_ns)
            else:
                del self._waiting[lane]
        arrived = []
        while self._arriving and self._arriving[0][0] <= now_ns:
            arrived.append(heapq.heappop(self._arriving)[2])
        return arrived


def run(
    scheduler: Scheduler,
    lanes: Sequence[LaneModel],
    capacities: Sequence[float],
    transfers: Sequence[Transfer],
    background: Sequence[tuple[int, Background]] = (),
) -> tuple[list[int], list[BlockRecord]]:
    """Runs transfers through a scheduler until all have finished.

    A block moves at the rate that max-min fairness gives its lane among the lanes
    that are moving something; a lane moves one block at a time.

    Args:
      scheduler: what decides.
      lanes: one for each lane of the scheduler.
      capacities: bytes per second of each resource.
      transfers: in any order; they arrive at their times.
      background: resource index and the load on it.

    Returns:
      The time at which each transfer finished, and every block in order of
      completion.

    Raises:
      ValueError: transfers take longer than virtual time goes.
      RuntimeError: transfers are left, and nothing is moving or due.
    """
    links = _Links(lanes, capacities)
    # Times at which the outside does something: a transfer arrives, or unseen
    # traffic starts or ends.
    arrivals = sorted(range(len(transfers)), key=lambda i: transfers[i].arrival_ns)
    arrivals.reverse()
    changes = sorted(
        (
            change
            for resource, load in background
            for change in (
                (load.start_ns, resource, -load.bytes_per_s),
                (load.end_ns, resource, load.bytes_per_s),
            )
        ),
        reverse=True,
    )
    finish_ns = [-1] * len(transfers)
    records: list[BlockRecord] = []
    num_left = len(transfers)
    now = 0.0
    while True:
        now_ns = round(now)
        while changes and changes[-1][0] <= now:
            _, resource, change = changes.pop()
            links.capacities[resource] += change
            links.capacities_changed()
        while arrivals and transfers[arrivals[-1]].arrival_ns <= now:
            index = arrivals.pop()
            scheduler.submit(index, transfers[index], now_ns)
        for block in scheduler.drain(now_ns):
            links.issue(block, now_ns)
        for index in scheduler.take_finished():
            finish_ns[index] = now_ns
            num_left -= 1
        if num_left == 0:
            return finish_ns, records
        upcoming = [links.next_event_ns()]
        if arrivals:
            upcoming.append(transfers[arrivals[-1]].arrival_ns)
        if changes:
            upcoming.append(changes[-1][0])
        wakeup_ns = scheduler.next_wakeup_ns()
        if wakeup_ns is not None:
            upcoming.append(max(wakeup_ns, now_ns + 1))
        if _LAST_NS < min(upcoming) < float("inf"):
            raise ValueError(
                "topology: expected links that move the transfers within 2**62 ns (146 "
                f"years), but the next event is at {min(upcoming):.3g} ns; give higher "
                "rates or smaller transfers"
            )
        if min(upcoming) == float("inf"):
            left = [i for i, finish in enumerate(finish_ns) if finish < 0]
            raise RuntimeError(f"transfers {left} are left, and nothing is due")
        now = max(now, min(upcoming))
        for moved in links.advance(now):
            end_ns = round(now)
            scheduler.complete(moved.block.id, end_ns)
            records.append(
                BlockRecord(
                    transfer=moved.block.transfer,
                    lane=moved.block.lane,
                    offset_bytes=moved.block.offset_bytes,
                    size_bytes=moved.block.size_bytes,
                    issue_ns=moved.issue_ns,
                    start_ns=moved.start_ns,
                    end_ns=end_ns,
                )
            )
