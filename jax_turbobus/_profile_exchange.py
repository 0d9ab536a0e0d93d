"""What a profile says of exchanges between GPUs: slots, rates and starts."""

import dataclasses
import sys
from typing import Any

__all__ = ["STARTS", "Exchange", "PairRate", "is_amount", "parse"]

# How a small exchange may go: between GPUs that reach each other's memory; through
# host memory, by the kernels themselves, or by rings of slots under a schedule.
STARTS = ("peer", "mail", "packed", "broadcast")
_PATHS = ("peer", "host")
# As in cc/moe/cuda/ring.cc.
_MOST_SLOTS = 64
_SLOT_BYTES = (64 << 10, 1 << 30)


@dataclasses.dataclass(frozen=True)
class PairRate:
    """What goes from one GPU to another while every GPU sends and receives.

    Attributes:
      source: UUID.
      reader: UUID; the source's where there is only one GPU.
      path: ``"peer"``, copies into the other's memory, or ``"host"``, through slots.
      bytes_per_s: bytes per second.
    """

    source: str
    reader: str
    path: str
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the GPUs of a machine exchange best.

    Attributes:
      num_slots: slots of a ring.
      slot_bytes: of each. Together the least memory that reaches 98 % of the best
        rate.
      pairs: rates.
      starts: seconds that dispatch and combine take beside their bytes, by the names in
        `STARTS`; what could not be measured is missing.
      sweep: rates through host memory by slots, for a reader.
      remarks: sentences: what was not measured, and why.
    """

    num_slots: int
    slot_bytes: int
    pairs: tuple[PairRate, ...] = ()
    starts: dict[str, float] = dataclasses.field(default_factory=dict)
    sweep: tuple[dict[str, Any], ...] = ()
    remarks: tuple[str, ...] = ()

    def rate(self, source: str, reader: str, path: str) -> float | None:
        """Returns what a pair carries in bytes per second; None: not measured."""
        for pair in self.pairs:
            if (pair.source, pair.reader, pair.path) == (source, reader, path):
                return pair.bytes_per_s
        return None


def parse(data: Any) -> Exchange:
    """Returns the part of a profile's JSON.

    Args:
      data: as `json` read it.

    Raises:
      KeyError: a field is missing.
      TypeError: a field is of the wrong kind.
      ValueError: a figure is impossible.
    """
    pairs = tuple(PairRate(**pair) for pair in data["pairs"])
    for pair in pairs:
        ends: tuple[Any, ...] = (pair.source, pair.reader)
        is_named = all(isinstance(end, str) for end in ends)
        if not is_named or pair.path not in _PATHS or not is_amount(pair.bytes_per_s):
            raise ValueError(f"an impossible pair: {pair}")
    starts = dict(data["starts"])
    for name, seconds in starts.items():
        if name not in STARTS or not is_amount(seconds, may_be_zero=True):
            raise ValueError(f"an impossible start: {name!r} {seconds!r}")
    return Exchange(
        num_slots=_whole("num_slots", data["num_slots"], 1, _MOST_SLOTS),
        slot_bytes=_whole("slot_bytes", data["slot_bytes"], *_SLOT_BYTES),
        pairs=pairs,
        starts=starts,
        sweep=tuple(dict(row) for row in data.get("sweep", ())),
        remarks=tuple(map(str, data.get("remarks", ()))),
    )


def is_amount(value: Any, *, may_be_zero: bool = False) -> bool:
    """Returns whether a figure is a number that was measured: positive and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Python's integers may be larger than any float.
    return 0 <= value <= sys.float_info.max and (may_be_zero or value > 0)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {value!r}")
    return value
