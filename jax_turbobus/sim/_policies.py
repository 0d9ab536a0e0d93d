"""The policies that a simulation can compare: ours, its parts, and baselines."""

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jax_turbobus import _ffi
from jax_turbobus.sim._types import Block, Scheduler, Transfer
from jax_turbobus.topology import Topology

__all__ = [
    "POLICIES",
    "Allocation",
    "CoreScheduler",
    "Lanes",
    "Policy",
    "make_config",
    "make_scheduler",
]

Allocation = Literal["block", "transfer", "equal"]


_NO_CHUNKS = 1 << 60


@dataclass(frozen=True, slots=True)
class Policy:
    """How blocks are given to lanes.

    Attributes:
      text: one line for people.
      allocation: ``"block"`` is the C++ scheduler; ``"transfer"`` gives all idle
        paths to one transfer until it is done; ``"equal"`` cuts each transfer into
        equal shares for its paths in advance.
      has_relays: whether relays are used at all.
      is_lock_step: the paper's slots instead of free-running lanes.
      block_bytes: of a long transfer.
      chunk_bytes: None: no chunks, transfers are queued whole.
      has_token_gate: whether relays serve one large transfer of a GPU at a time.
    """

    text: str
    allocation: Allocation = "block"
    has_relays: bool = True
    is_lock_step: bool = False
    block_bytes: int = 16 << 20
    chunk_bytes: int | None = 128 << 20
    has_token_gate: bool = True

    def replace(self, **changes: Any) -> "Policy":
        """Returns this policy with some fields changed."""
        return dataclasses.replace(self, **changes)


POLICIES: dict[str, Policy] = {
    "direct": Policy("each GPU over its own link only", has_relays=False),
    "pooled": Policy("block by block over all links (the default)"),
    "lock-step": Policy("pooled, in the paper's slots", is_lock_step=True),
    "no-token": Policy("pooled, relays serve any transfer", has_token_gate=False),
    "no-chunks": Policy("pooled, transfers queued whole", chunk_bytes=None),
    "neither": Policy(
        "pooled, no token and no chunks", chunk_bytes=None, has_token_gate=False
    ),
    "transfer": Policy("idle links given to whole transfers", allocation="transfer"),
    "equal": Policy("equal shares for all paths, in advance", allocation="equal"),
}


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a node: lane i runs on ``paths[i]``, draws on ``lane_caps[i]``.

    Attributes:
      paths: C++ `Path` objects.
      caps: C++ `Resource` objects.
      lane_caps: indices into `caps`.
    """

    paths: list[Any]
    caps: list[Any]
    lane_caps: list[list[int]]

    @classmethod
    def of(
        cls,
        topology: Topology,
        *,
        max_links: int | None,
        has_relays: bool,
        only_binding_caps: bool,
    ) -> "Lanes":
        """Returns a topology's lanes, at most `max_links` for each GPU and direction.

        The direct lane comes first, then relays, the best first.
        """
        plan = topology.lanes(relays=has_relays, only_binding_caps=only_binding_caps)
        taken: dict[Any, int] = {}
        kept = []
        for i, path in enumerate(plan.paths):
            key = (path.gpu, path.direction, path.numa_node)
            taken[key] = taken.get(key, 0) + 1
            if max_links is None or taken[key] <= max_links:
                kept.append(i)
        return cls(
            [plan.paths[i] for i in kept],
            list(plan.caps),
            [list(plan.lane_caps[i]) for i in kept],
        )


def make_config(policy: Policy, lanes: Lanes) -> Any:
    """Returns the C++ `SchedConfig` for a policy over some lanes."""
    core = _ffi.core()
    config = core.SchedConfig()
    config.block_bytes = policy.block_bytes
    config.chunk_bytes = (
        _NO_CHUNKS if policy.chunk_bytes is None else policy.chunk_bytes
    )
    config.has_token_gate = policy.has_token_gate
    if policy.is_lock_step:
        config.mode = core.SchedMode.LOCK_STEP
    config.caps = [
        core.CapSpec(cap.name, cap.bandwidth_bytes_per_s) for cap in lanes.caps
    ]
    config.lanes = [
        core.LaneSpec(path=path, window_bytes=2 * policy.block_bytes, caps=caps)
        for path, caps in zip(lanes.paths, lanes.lane_caps, strict=True)
    ]
    return config


class CoreScheduler:
    """The C++ scheduler, as simulations call it."""

    def __init__(self, config: Any) -> None:
        core = _ffi.core()
        self.native = core.Scheduler(config)
        self._directions = {"h2d": core.Direction.H2D, "d2h": core.Direction.D2H}

    def submit(self, index: int, transfer: Transfer, now_ns: int) -> None:
        self.native.submit(
            transfer=index,
            gpu=transfer.gpu,
            direction=self._directions[transfer.direction],
            size_bytes=transfer.size_bytes,
            numa_node=transfer.numa_node,
            now_ns=now_ns,
        )

    def drain(self, now_ns: int) -> list[Block]:
        blocks: list[Block] = self.native.drain(now_ns)
        return blocks

    def complete(self, block: int, now_ns: int) -> None:
        self.native.complete(block, now_ns)

    def take_finished(self) -> list[int]:
        return [index for index, _ in self.native.take_finished()]

    def next_wakeup_ns(self) -> int | None:
        wakeup_ns: int | None = self.native.next_wakeup_ns()
        return wakeup_ns


@dataclass(frozen=True, slots=True)
class _BaselineBlock:
    id: int
    transfer: int
    lane: int
    offset_bytes: int
    size_bytes: int


@dataclass(slots=True)
class _Open:
    """A transfer that a baseline is working on."""

    index: int
    left: deque[tuple[int, int]]
    lanes: list[int]
    in_flight: int = 0


class _Baseline:
    """What the two baselines share: numbering, lanes of a transfer, completion."""

    def __init__(self, lanes: Lanes, block_bytes: int) -> None:
        core = _ffi.core()
        self._paths = lanes.paths
        self._h2d = core.Direction.H2D
        self._block_bytes = block_bytes
        self._in_flight: dict[int, tuple[_Open, int]] = {}
        self._finished: list[int] = []
        self._num_blocks = 0

    def _lanes_of(self, transfer: Transfer) -> list[int]:
        def fits(path: Any, numa_node: int | None) -> bool:
            return (
                path.gpu == transfer.gpu
                and (path.direction == self._h2d) == (transfer.direction == "h2d")
                and numa_node in (None, path.numa_node)
            )

        every = range(len(self._paths))
        found = [i for i in every if fits(self._paths[i], transfer.numa_node)]
        found = found or [i for i in every if fits(self._paths[i], None)]
        return sorted(found, key=lambda i: bool(self._paths[i].is_relay))

    def _cut(self, size_bytes: int) -> list[tuple[int, int]]:
        step = self._block_bytes
        return [
            (offset, min(step, size_bytes - offset))
            for offset in range(0, size_bytes, step)
        ]

    def _issue(self, work: _Open, lane: int, extent: tuple[int, int]) -> Block:
        block = _BaselineBlock(self._num_blocks, work.index, lane, *extent)
        self._in_flight[block.id] = (work, lane)
        self._num_blocks += 1
        work.in_flight += 1
        return block

    def complete(self, block: int, now_ns: int) -> None:
        del now_ns
        work, lane = self._in_flight.pop(block)
        work.in_flight -= 1
        self._lane_is_free(work, lane)
        if not work.left and not work.in_flight:
            self._finished.append(work.index)
            self._is_done(work)

    def _lane_is_free(self, work: _Open, lane: int) -> None:
        del work, lane

    def _is_done(self, work: _Open) -> None:
        del work

    def take_finished(self) -> list[int]:
        finished, self._finished = self._finished, []
        return finished

    def next_wakeup_ns(self) -> int | None:
        return None


class _TransferLevel(_Baseline):
    """First come, first served: a transfer gets every link that is idle, for good."""

    def __init__(self, lanes: Lanes, block_bytes: int) -> None:
        super().__init__(lanes, block_bytes)
        self._queue: list[_Open] = []
        self._running: list[_Open] = []
        self._busy_links: set[tuple[int, Any]] = set()
        self._idle_lanes: set[int] = set()

    def _link(self, lane: int) -> tuple[int, Any]:
        path = self._paths[lane]
        return (path.relay if path.is_relay else path.gpu, path.direction)

    def submit(self, index: int, transfer: Transfer, now_ns: int) -> None:
        del now_ns
        extents = deque(self._cut(transfer.size_bytes))
        work = _Open(index, extents, self._lanes_of(transfer))
        if not work.left:
            self._finished.append(index)
            return
        self._queue.append(work)

    def drain(self, now_ns: int) -> list[Block]:
        del now_ns
        for work in list(self._queue):
            idle = [i for i in work.lanes if self._link(i) not in self._busy_links]
            if not idle:
                continue
            self._queue.remove(work)
            self._running.append(work)
            work.lanes = idle
            self._busy_links.update(map(self._link, idle))
            self._idle_lanes.update(idle)
        blocks = []
        for work in self._running:
            for lane in work.lanes:
                if work.left and lane in self._idle_lanes:
                    self._idle_lanes.remove(lane)
                    blocks.append(self._issue(work, lane, work.left.popleft()))
        return blocks

    def _lane_is_free(self, work: _Open, lane: int) -> None:
        del work
        self._idle_lanes.add(lane)

    def _is_done(self, work: _Open) -> None:
        self._running.remove(work)
        self._busy_links.difference_update(map(self._link, work.lanes))
        self._idle_lanes.difference_update(work.lanes)


class _EqualShares(_Baseline):
    """Everything is issued on arrival, an equal share for each path."""

    def __init__(self, lanes: Lanes, block_bytes: int) -> None:
        super().__init__(lanes, block_bytes)
        self._ready: list[Block] = []

    def submit(self, index: int, transfer: Transfer, now_ns: int) -> None:
        del now_ns
        lanes = self._lanes_of(transfer)
        work = _Open(index, deque(), lanes)
        extents = self._cut(transfer.size_bytes)
        if not extents:
            self._finished.append(index)
        for i, extent in enumerate(extents):
            self._ready.append(self._issue(work, lanes[i % len(lanes)], extent))

    def drain(self, now_ns: int) -> list[Block]:
        del now_ns
        ready, self._ready = self._ready, []
        return ready


_BASELINES: dict[str, Callable[[Lanes, int], Scheduler]] = {
    "transfer": _TransferLevel,
    "equal": _EqualShares,
}


def make_scheduler(policy: Policy, lanes: Lanes) -> Scheduler:
    """Returns what a simulation of `policy` over these lanes steps."""
    if policy.allocation == "block":
        return CoreScheduler(make_config(policy, lanes))
    return _BASELINES[policy.allocation](lanes, policy.block_bytes)
