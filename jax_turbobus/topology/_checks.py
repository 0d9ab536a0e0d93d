"""Arguments of a topology's methods, checked here and named by what they raise."""

import numbers
from typing import Any


def whole(name: str, value: Any, least: int, most: int, why: str = "") -> int:
    """Returns `value` as an int.

    Raises:
      TypeError: it is no whole number.
      ValueError: it is not from `least` to `most`; `why` ends the message.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole:
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {value}{why}")
    return int(value)


def index(name: str, value: Any, size: int) -> int:
    """Returns `value`, which must index one of `size` things."""
    return whole(name, value, 0, size - 1, f"; the topology has {size}")


def core_direction(core: Any, direction: str) -> Any:
    """Returns what the core calls a direction.

    Raises:
      ValueError: there is no such direction.
    """
    if direction not in ("h2d", "d2h"):
        raise ValueError(f"direction: expected 'h2d' or 'd2h', got {direction!r}")
    return core.Direction.H2D if direction == "h2d" else core.Direction.D2H
