"""Reads the text a demo trains on, and cuts it into windows of bytes."""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["Corpus", "load_files", "load_standard_library", "windows"]

# Reading stops there: a short run sees a few megabytes at most.
_MAX_BYTES = 24 << 20
# Directories that are not the library's own sources; and its tables of characters,
# which are alike in dozens of files: held out, they would not be unseen.
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "__pycache__", "encodings"}
)
_HELD_OUT_PERCENT = 10


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to learn from, and bytes from other files to judge by.

    Attributes:
      name: where the text came from, for people.
      train: `uint8[num_train_bytes]`.
      held_out: `uint8[num_held_out_bytes]`, never trained on.
      num_files: how many files were read.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    num_files: int


def _is_held_out(name: str) -> bool:
    # By a hash of the name: the split doesn't move when files come or go.
    return hashlib.sha256(name.encode()).digest()[0] * 100 < _HELD_OUT_PERCENT * 256


def _join(parts: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"\n".join(parts), dtype=np.uint8)


def _check_length(corpus: Corpus, context: int) -> Corpus:
    # Sixteen windows: less than that is memorised, not learnt.
    for part, data in (("training", corpus.train), ("held-out", corpus.held_out)):
        wanted = 16 * (context + 1)
        if data.size < wanted:
            raise ValueError(
                f"--text: {corpus.name} leaves {data.size} {part} bytes, expected at "
                f"least {wanted}; give more or longer text"
            )
    return corpus


def load_standard_library(context: int, root: Path | None = None) -> Corpus:
    """Returns the Python standard library's own sources, split by file.

    Args:
      context: bytes in a training window.
      root: where the library lies; by default this interpreter's.

    Raises:
      ValueError: there are no sources there, or too few.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    train: list[bytes] = []
    held_out: list[bytes] = []
    total = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _SKIPPED.isdisjoint(name.parts[:-1]):
            continue
        try:
            data = path.read_bytes()
        except OSError:
            continue  # a dangling link of the distribution
        (held_out if _is_held_out(name.as_posix()) else train).append(data)
        total += len(data)
        if total >= _MAX_BYTES:
            break
    if not train:
        raise ValueError(
            f"no Python sources under {root}: this Python was installed without "
            "them; train on other text with --text FILE..."
        )
    corpus = Corpus(
        f"the standard library under {root}",
        _join(train),
        _join(held_out),
        len(train) + len(held_out),
    )
    return _check_length(corpus, context)


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise ValueError(f"--text: {path} is a directory, expected a text file")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError as error:
        raise ValueError(f"--text: cannot read {path}: {error.strerror}") from error
    if not data:
        raise ValueError(f"--text: {path} is empty, expected text")
    if b"\0" in data:
        raise ValueError(
            f"--text: {path} is binary (byte {data.index(0)} is zero), expected text"
        )
    return data


def load_files(paths: Sequence[Path], context: int) -> Corpus:
    """Returns the given files; held out are whole files, or the tail of a single one.

    Args:
      paths: text files in any encoding without zero bytes.
      context: bytes in a training window.

    Raises:
      ValueError: a file is missing, empty, binary, or all are too short.
    """
    texts = {path: _read(path) for path in dict.fromkeys(paths)}
    name = ", ".join(str(path) for path in texts)
    if len(texts) == 1:
        (data,) = texts.values()
        # A tenth, but no less than the shortest text that can be judged.
        tail = max(len(data) * _HELD_OUT_PERCENT // 100, 16 * (context + 1))
        cut = max(len(data) - tail, 0)
        train, held_out = [data[:cut]], [data[cut:]]
    else:
        train = [t for path, t in texts.items() if not _is_held_out(path.name)]
        held_out = [t for path, t in texts.items() if _is_held_out(path.name)]
        # With few files the hash may put all on one side: move the shortest over.
        if not held_out:
            held_out = [min(train, key=len)]
            train.remove(held_out[0])
        elif not train:
            train = [max(held_out, key=len)]
            held_out.remove(train[0])
    corpus = Corpus(name, _join(train), _join(held_out), len(texts))
    return _check_length(corpus, context)


def windows(
    data: np.ndarray, rng: np.random.Generator, count: int, context: int
) -> np.ndarray:
    """Returns `uint8[count, context + 1]`: inputs and, one byte on, their targets."""
    starts = rng.integers(0, data.size - context, size=count)
    return data[starts[:, None] + np.arange(context + 1)]
