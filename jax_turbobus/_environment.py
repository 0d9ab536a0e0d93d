"""Switches that this package reads from the environment."""

import os
from typing import overload

__all__ = ["PREFIX", "as_flag", "flag"]

PREFIX = "JAX_TURBOBUS_"
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")


def as_flag(text: str) -> bool | None:
    """Returns what a word says of a switch; None: it is no such word."""
    word = text.strip().lower()
    return True if word in _ON else False if word in _OFF else None


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
