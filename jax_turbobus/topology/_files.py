"""Topology files: those that come with the package, and those of users."""

import importlib.resources
import os
import stat
from typing import Any

# The core reads no more of a file.
_MOST_FILE_BYTES = 4 << 20


def _shipped() -> Any:
    return importlib.resources.files("jax_turbobus") / "topologies"


def names() -> list[str]:
    """Returns the names of the topologies that come with the package."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in _shipped().iterdir()
        if entry.name.endswith(".json")
    )


def _read(path: str) -> bytes:
    # A pipe or a device may have no end, or keep its reader waiting.
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # open refuses those
        raise ValueError("it is not a regular file")
    with open(path, "rb") as file:
        return file.read(_MOST_FILE_BYTES + 1)  # the core refuses the one too many


def content(name_or_path: str | os.PathLike[str]) -> tuple[bytes, str]:
    """Returns the text of a shipped topology or of a file, and what to call it.

    Raises:
      TypeError: as for `Topology.load`.
      ValueError: as for `Topology.load`, except for what the text says.
    """
    given: object = name_or_path  # whatever the annotation says
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            "topology: expected the name of a shipped topology or the path of a "
            f"file, got {given!r}"
        )
    text = os.fsdecode(name_or_path)
    is_path = not isinstance(name_or_path, str) or os.sep in text
    if not is_path and not text.endswith(".json"):
        if text not in names():
            raise ValueError(
                f"topology: expected one of {', '.join(names())} or the path of a "
                f"JSON file, got {text!r}"
            )
        return _shipped().joinpath(f"{text}.json").read_bytes(), text
    try:
        return _read(text), text
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"topology {text}: cannot be read: {reason}; give the path of a JSON "
            f"file or one of {', '.join(names())}"
        ) from error
