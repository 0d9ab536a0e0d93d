"""Reads what processes publish of their transfers (docs/engine.md, "Live counters").

Files are copied by one read, never mapped: whoever shortens a mapped file kills
its reader. Nothing in them is trusted.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import stat
import struct
from collections.abc import Iterator

__all__ = ["Page", "Row", "command_of", "folders", "printable", "read_pages"]

_HEADER = struct.Struct("<8sIIIII4xqqqq64x")
_ROW = struct.Struct("<48siiIIdqqqI28x")
_MAGIC = b"TBUSLIVE"
_VERSION = 1
_MOST_ROWS = 16384
_KINDS = ("streams", "host", "emulated", "plain")
_BACKED_OFF, _DROPPED, _HAS_RIVAL = 1, 2, 4
_NAME = re.compile(r"([1-9]\d{0,9})\.(\d{1,19})\.(\d{1,19})\.(\d{1,9})")
_FOLDER = re.compile(r"jax_turbobus-top-(\d{1,10})")
# The field of /proc/<pid>/stat after the command's name.
_START_TIME_FIELD = 19


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One lane, or one direction of a link that lanes share.

    Attributes:
      name: such as ``gpu0 h2d via gpu1``.
      gpu: the process's number of the GPU, or of the CPU device; None: a link.
      relay: the GPU that lends its link; None: direct.
      direction: ``"h2d"`` or ``"d2h"``; None: a link, which has it in its name.
      is_link: whether it is a link.
      bandwidth_bytes_per_s: what it should carry; 0: unknown.
      num_bytes: bytes that have arrived.
      num_blocks: blocks that have arrived.
      num_bytes_in_flight: bytes issued and not seen to arrive.
      is_backed_off: gets a probe at most.
      is_dropped: is not used any more.
      has_rival: the lender is busy whenever the borrower is.
    """

    name: str
    gpu: int | None
    relay: int | None
    direction: str | None
    is_link: bool
    bandwidth_bytes_per_s: float
    num_bytes: int
    num_blocks: int
    num_bytes_in_flight: int
    is_backed_off: bool
    is_dropped: bool
    has_rival: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """What one engine of a process publishes.

    Attributes:
      path: the file.
      pid: the process.
      kind: ``"streams"`` (GPUs), ``"host"`` or ``"emulated"`` (CPU devices), or
        ``"plain"`` (copies without an engine).
      num_in_flight: transfers not seen to be over.
      num_ended: transfers that are.
      looked_ns: when the engine last looked for what is over; 0: it is told.
      rows: its lanes and links.
    """

    path: pathlib.Path
    pid: int
    kind: str
    num_in_flight: int
    num_ended: int
    looked_ns: int
    rows: tuple[Row, ...]


def folders(parent: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the folders of pages in `parent` that this user may look into."""
    with contextlib.suppress(OSError):
        for path in sorted(parent.iterdir()):
            found = _FOLDER.fullmatch(path.name)
            if found and os.geteuid() in (0, int(found[1])):
                yield path


def read_pages(parent: pathlib.Path) -> list[Page]:
    """Returns the pages of every living process, and removes those of dead ones.

    Args:
      parent: where the folders of pages are.
    """
    return [page for folder in folders(parent) for page in _read_folder(folder)]


def _read_folder(folder: pathlib.Path) -> Iterator[Page]:
    uid = int(folder.name.rpartition("-")[2])
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        status = os.fstat(directory)
        if status.st_uid != uid or stat.S_IMODE(status.st_mode) & 0o077:
            return  # what is in it could be another's
        for name in sorted(os.listdir(directory)):
            found = _NAME.fullmatch(name)
            if found is None or int(found[3]) != _pid_namespace():
                continue
            pid = int(found[1])
            if _start_time(pid) != int(found[2]):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=directory)
                continue
            page = _parse(folder / name, pid, _content(name, directory, uid))
            if page is not None:
                yield page
    finally:
        os.close(directory)


def _content(name: str, directory: int, uid: int) -> bytes:
    """Returns a file's bytes, none if it is not a plain file of the user's."""
    # A pipe would make the reader wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(name, flags, dir_fd=directory)
    except OSError:
        return b""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
            return b""
        return os.pread(file, _HEADER.size + _MOST_ROWS * _ROW.size, 0)
    except OSError:
        return b""
    finally:
        os.close(file)


def _parse(path: pathlib.Path, pid: int, content: bytes) -> Page | None:
    """Returns the page, or None if it is not one that this version can read."""
    if len(content) < _HEADER.size:
        return None
    magic, version, header_bytes, row_bytes, num_rows, kind, owner, *counts = (
        _HEADER.unpack_from(content)
    )
    if (
        (magic, version, header_bytes, row_bytes, owner)
        != (_MAGIC, _VERSION, _HEADER.size, _ROW.size, pid)
        or num_rows > (len(content) - _HEADER.size) // _ROW.size
        or kind >= len(_KINDS)
    ):
        return None
    num_in_flight, num_ended, looked_ns = (max(count, 0) for count in counts)
    rows = tuple(
        _row(_ROW.unpack_from(content, _HEADER.size + i * _ROW.size))
        for i in range(num_rows)
    )
    return Page(path, pid, _KINDS[kind], num_in_flight, num_ended, looked_ns, rows)


def _row(fields: tuple[bytes, int, int, int, int, float, int, int, int, int]) -> Row:
    name, gpu, relay, direction, is_link, rate, size, blocks, in_flight, states = fields
    return Row(
        name=printable(name.partition(b"\0")[0].decode(errors="replace")),
        gpu=gpu if gpu >= 0 else None,
        relay=relay if relay >= 0 else None,
        direction=None if is_link else "d2h" if direction else "h2d",
        is_link=bool(is_link),
        bandwidth_bytes_per_s=rate if 0 < rate < 1e18 else 0.0,
        num_bytes=max(size, 0),
        num_blocks=max(blocks, 0),
        num_bytes_in_flight=max(in_flight, 0),
        is_backed_off=bool(states & _BACKED_OFF),
        is_dropped=bool(states & _DROPPED),
        has_rival=bool(states & _HAS_RIVAL),
    )


def printable(text: str) -> str:
    """Returns `text` without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def command_of(pid: int) -> str:
    """Returns the command line of a process, as far as it may be seen."""
    try:
        raw = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return printable(raw[:4096].replace(b"\0", b" ").decode(errors="replace").strip())


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_time(pid: int) -> int:
    """Returns when a process started, in ticks of the machine; 0: there is none."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
        # What nobody has waited for yet moves nothing any more.
        return 0 if fields[0] in "ZX" else int(fields[_START_TIME_FIELD])
    except (OSError, IndexError, ValueError):
        return 0
