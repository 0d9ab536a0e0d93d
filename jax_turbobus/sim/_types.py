"""What goes into a simulation and what comes out."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

__all__ = [
    "Background",
    "Block",
    "BlockRecord",
    "Direction",
    "Result",
    "Scheduler",
    "Transfer",
]

Direction = Literal["h2d", "d2h"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request: `size_bytes` between a GPU and host memory.

    Attributes:
      gpu: whose memory.
      size_bytes: how much.
      arrival_ns: when its data is ready.
      direction: ``"h2d"`` or ``"d2h"``.
      numa_node: where the host memory is.
      name: for tables; need not be unique.
    """

    gpu: int
    size_bytes: int
    arrival_ns: int = 0
    direction: Direction = "h2d"
    numa_node: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Background:
    """Traffic that the scheduler cannot see, such as another process's copies.

    Attributes:
      resource: its name, as in `Topology.lanes(only_binding_caps=False).caps`.
      bytes_per_s: taken from the resource.
      start_ns: from when.
      end_ns: until when.
    """

    resource: str
    bytes_per_s: float
    start_ns: int
    end_ns: int


class Block(Protocol):
    """A block as a scheduler issues it."""

    @property
    def id(self) -> int: ...
    @property
    def transfer(self) -> int: ...
    @property
    def lane(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class Scheduler(Protocol):
    """What a simulation steps: the C++ scheduler, or a baseline."""

    def submit(self, index: int, transfer: Transfer, now_ns: int) -> None: ...
    def drain(self, now_ns: int) -> list[Block]: ...
    def complete(self, block: int, now_ns: int) -> None: ...
    def take_finished(self) -> list[int]: ...
    def next_wakeup_ns(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block that was copied; `start_ns` is when its first byte moved."""

    transfer: int
    lane: int
    offset_bytes: int
    size_bytes: int
    issue_ns: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Result:
    """A finished simulation.

    Attributes:
      transfers: as submitted.
      finish_ns: when each one's last byte arrived.
      blocks: every block, in order of completion.
      lane_names: ``"gpu0 h2d"`` or ``"gpu0 via gpu1 h2d"`` for each lane.
    """

    transfers: tuple[Transfer, ...]
    finish_ns: tuple[int, ...]
    blocks: tuple[BlockRecord, ...]
    lane_names: tuple[str, ...]
    _durations: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        durations = tuple(
            finish - transfer.arrival_ns
            for transfer, finish in zip(self.transfers, self.finish_ns, strict=True)
        )
        object.__setattr__(self, "_durations", durations)

    @property
    def durations_ns(self) -> tuple[int, ...]:
        """From arrival to the last byte, for each transfer."""
        return self._durations

    @property
    def makespan_ns(self) -> int:
        """When the last transfer finished."""
        return max(self.finish_ns, default=0)

    def bytes_by_lane(self) -> dict[str, int]:
        """Returns the bytes that each lane copied; idle lanes are left out."""
        total: dict[str, int] = {}
        for block in self.blocks:
            name = self.lane_names[block.lane]
            total[name] = total.get(name, 0) + block.size_bytes
        return total
