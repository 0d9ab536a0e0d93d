"""Options of the command line, checked before any work is done."""

import math
import os
import pathlib
from collections.abc import Collection

__all__ = [
    "OptionError",
    "check_among",
    "check_file",
    "check_folder",
    "check_number",
    "check_whole",
]


class OptionError(ValueError):
    """An option is not what it can be; the message names it."""


def check_whole(option: str, value: int, least: int, most: int = 1 << 40) -> None:
    """Refuses a number out of a range.

    Raises:
      OptionError: it is.
    """
    if not least <= value <= most:
        raise OptionError(
            f"{option}: expected a whole number from {least} to {most}, got {value}"
        )


def check_number(
    option: str, text: str, what: str, *, least: float = 0.0, most: float = 1e9
) -> None:
    """Refuses a text that is no number above `least` and up to `most`.

    Raises:
      OptionError: it is none; the message says that `what` was expected.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least < value <= most:
        raise OptionError(f"{option}: expected {what}, got {text!r}")


def check_among(option: str, name: str, names: Collection[str]) -> None:
    """Refuses a name out of none of `names`.

    Raises:
      OptionError: it is none.
    """
    if name not in names:
        raise OptionError(f"{option}: expected one of {', '.join(names)}, got {name!r}")


def _nearest(path: pathlib.Path) -> pathlib.Path:
    # The folder that is there, in which others would be made.
    return next(folder for folder in path.parents if folder.exists())


def check_folder(option: str, path: str | os.PathLike[str]) -> None:
    """Refuses what cannot be a folder to write files to, be it made first or not.

    Raises:
      OptionError: it is or lies in a file, or may not be written to.
    """
    found = pathlib.Path(os.path.abspath(path))
    there = found if found.exists() else _nearest(found)
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "may not be written to" if there.is_dir() else "is a file"
        raise OptionError(
            f"{option}: expected a folder that can be made or written to, got "
            f"{os.fspath(path)!r}, but {str(there)!r} {why}; give another folder"
        )


def check_file(option: str, path: str | os.PathLike[str]) -> None:
    """Refuses what cannot be written as a file; folders may be made for it.

    Raises:
      OptionError: it is a folder, or lies where nothing may be written.
    """
    found = pathlib.Path(os.path.abspath(path))
    there = found if found.exists() else _nearest(found)
    is_wrong = there.is_dir() if there == found else not there.is_dir()
    if is_wrong or not os.access(there, os.W_OK):
        why = "may not be written to"
        if is_wrong:
            why = "is a folder" if there == found else "is no folder"
        raise OptionError(
            f"{option}: expected a file that can be written, got {os.fspath(path)!r}, "
            f"but {str(there)!r} {why}; give another file"
        )
