"""A progress bar for a terminal, or a line now and then for a log."""

import shutil
import time
from typing import TextIO

__all__ = ["ProgressBar"]

_EIGHTHS = " ▏▎▍▌▋▊▉"


class ProgressBar:
    """Shows how far a loop is; not thread-safe, used as a context manager.

    On a terminal one line is drawn over and over, at most ten times a second;
    anywhere else a line is written at each tenth of the way.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._started = time.monotonic()
        self._next_draw = 0.0
        self._next_tenth = 1
        self._is_drawn = False

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_drawn:
            self._stream.write("\n")
            self._stream.flush()

    def update(self, done: int, text: str) -> None:
        """Shows that `done` of the total are done, and `text` beside it."""
        now = time.monotonic()
        is_last = done >= self._total
        left = (now - self._started) / max(done, 1) * (self._total - done)
        if self._is_terminal:
            if now < self._next_draw and not is_last:
                return
            self._next_draw = now + 0.1
            line = (
                f"{self._bar(done)} {done}/{self._total}  {text}  {_clock(left)} left"
            )
            columns = shutil.get_terminal_size().columns
            self._stream.write("\r" + line[: columns - 1].ljust(columns - 1))
            self._stream.flush()
            self._is_drawn = True
        elif is_last or done * 10 >= self._next_tenth * self._total:
            self._next_tenth = done * 10 // self._total + 1
            self._stream.write(
                f"step {done}/{self._total}  {text}  {_clock(left)} left\n"
            )
            self._stream.flush()

    def _bar(self, done: int) -> str:
        width = 20
        eighths = 8 * width * min(done, self._total) // self._total
        full, part = divmod(eighths, 8)
        bar = "█" * full + (_EIGHTHS[part] if full < width else "")
        if not _can_write(self._stream, bar):
            bar = "#" * full
        return "|" + bar.ljust(width) + "|"


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
