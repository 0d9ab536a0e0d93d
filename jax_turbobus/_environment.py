"""What this package reads from the environment: switches, and a timeout."""

import numbers
import os
import re
from typing import Any, overload

__all__ = [
    "PREFIX",
    "as_flag",
    "as_trace",
    "check_seconds",
    "exchange_timeout",
    "flag",
]

PREFIX = "JAX_TURBOBUS_"
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")
# Seconds of a timeout. The core counts milliseconds.
_LEAST, _MOST = 1e-3, 1e9


def as_flag(text: str) -> bool | None:
    """Returns what a word says of a switch; None: it is no such word."""
    word = text.strip().lower()
    return True if word in _ON else False if word in _OFF else None


def as_trace(name: str, text: str) -> bool | str:
    """Returns what a text says of a trace: on, off, or the path of a file.

    A path has a folder or an ending. Any other word or number is more likely a
    mistake than the name of a file.

    Raises:
      ValueError: it is none of them; the message calls it `name`.
    """
    is_on = as_flag(text)
    if is_on is not None:
        return is_on
    if os.path.dirname(text) or re.search(r"\.[A-Za-z]\w*$", text):
        return text
    raise ValueError(
        f"{name}: expected 1 or 0, or the path of a file that has a folder or an ending"
        f" (./name, name.json), got {text!r}"
    )


@overload
def flag(name: str, default: bool) -> bool: ...
@overload
def flag(name: str, default: None = None) -> bool | None: ...
def flag(name: str, default: bool | None = None) -> bool | None:
    """Returns a switch of the environment.

    Args:
      name: of the variable, without ``JAX_TURBOBUS_``.
      default: where it is not set, or empty.

    Raises:
      ValueError: it is set to something that is neither on nor off.
    """
    text = os.environ.get(PREFIX + name, "")
    if not text.strip():
        return default
    value = as_flag(text)
    if value is None:
        raise ValueError(f"{PREFIX}{name}: expected 1 or 0, got {text!r}")
    return value


def exchange_timeout() -> float | None:
    """Returns ``JAX_TURBOBUS_EXCHANGE_TIMEOUT_S``; None if it is not set, or empty.

    Raises:
      ValueError: it is no such number of seconds.
    """
    name = PREFIX + "EXCHANGE_TIMEOUT_S"
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        seconds: Any = float(text)
    except ValueError:
        seconds = text
    return check_seconds(name, seconds)


def check_seconds(name: str, value: Any) -> float:
    """Returns a timeout in seconds.

    Raises:
      ValueError: `value` is none; the message calls it `name`.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not _LEAST <= value <= _MOST:
        raise ValueError(
            f"{name}: seconds: expected a positive number, from {_LEAST:g} to"
            f" {_MOST:g}, got {value!r}"
        )
    return float(value)
