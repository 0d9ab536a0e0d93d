"""The frame that all benchmarks share: rows, their bounds, JSON and table."""

import dataclasses
import json
import math
import operator
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_turbobus.bench._machine import header

__all__ = ["Row", "Timing", "alternate", "header", "table", "write_json"]

_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}


# Of a median that means something.
_LEAST_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a benchmark: a figure of ours, a peer's, and what is asked.

    Attributes:
      case: what was run, such as ``"h2d 16 MiB"``.
      metric: what the figures are, unit included, such as ``"forward, ms"``.
      ours: our figure.
      peer: the peer's, from the same run, or None where there is no peer.
      peer_name: who the peer is.
      ratio: ours / peer.
      required: a bound such as ``"<= 0.3"``, on `ratio` where there is a peer and
        else on `ours`; None for a row that only informs.
      ok: whether the bound holds; None if there is none.
      program: what one compiled program held, such as ``{"layers": 8}``, where that
        is more than what the figures are of; None elsewhere.
      note: what a reader has to know about the figures, if anything.
    """

    case: str
    metric: str
    ours: float
    peer: float | None
    peer_name: str | None
    ratio: float | None
    required: str | None
    ok: bool | None
    program: Mapping[str, int] | None = None
    note: str | None = None

    @classmethod
    def make(
        cls,
        case: str,
        metric: str,
        ours: float,
        *,
        peer: float | None = None,
        peer_name: str | None = None,
        required: str | None = None,
        program: Mapping[str, int] | None = None,
        note: str | None = None,
    ) -> "Row":
        """Returns a row with its ratio and verdict worked out.

        Raises:
          ValueError: `required` is not a comparison and a number, or a peer has
            a figure and no name.
        """
        if (peer is None) != (peer_name is None):
            raise ValueError(
                f"{case}: peer and peer_name go together, got {peer!r}, {peer_name!r}"
            )
        ratio = None if peer is None else (ours / peer if peer else float("inf"))
        ok = (
            None
            if required is None
            else _holds(ours if ratio is None else ratio, required)
        )
        return cls(
            case, metric, ours, peer, peer_name, ratio, required, ok, program, note
        )

    @classmethod
    def failure(
        cls,
        case: str,
        metric: str,
        note: str | None = None,
        *,
        ours: float = 0.0,
        required: str | None = None,
    ) -> "Row":
        """Returns a row that fails, whatever its figure is.

        Args:
          case: what was to be run.
          metric: what became of it, or what the figure would have been of.
          note: why.
          ours: our figure, where there is one.
          required: what was asked, where it can be said.
        """
        return dataclasses.replace(
            cls.make(case, metric, ours, note=note), required=required, ok=False
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the row as plain values, without a program or note if it has none."""
        values = dataclasses.asdict(self)
        for name in ("program", "note"):
            if values[name] is None:
                del values[name]
        return values

    @property
    def failed(self) -> bool:
        """Whether something was asked of this row and does not hold."""
        return self.ok is False


def _holds(value: float, required: str) -> bool:
    sign, _, number = required.partition(" ")
    if sign not in _BOUNDS or not number:
        raise ValueError(
            f"required: expected a bound such as '<= 0.3', got {required!r}"
        )
    return _BOUNDS[sign](value, float(number))


@dataclasses.dataclass(frozen=True)
class Timing:
    """Durations of one function, in the order they were measured.

    Attributes:
      seconds: one a round.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Seconds."""
        return min(self.seconds)


def alternate(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 11,
    warmup: int = 2,
    repeat: int = 1,
    limit_s: float = math.inf,
) -> dict[str, Timing]:
    """Times functions in turn, so that drift of the machine hits all alike.

    Every round runs each function once, forwards in even rounds and backwards in
    odd ones. A function must block until its work is done
    (`jax.block_until_ready`).

    Args:
      functions: what to time, by name.
      rounds: measured rounds.
      warmup: rounds before them that do not count (compilation, first touch).
      repeat: calls a measurement, for functions too short for the clock; the
        duration is divided by it.
      limit_s: after so many seconds no round starts, if one has been for warming up
        and three have been measured.

    Returns:
      A `Timing` for each name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions.items())
    begin = time.perf_counter()
    num_measured = 0
    for i in range(warmup + rounds):
        is_late = time.perf_counter() - begin > limit_s
        if is_late and num_measured >= _LEAST_ROUNDS:
            break
        is_measured = i >= (min(warmup, 1) if is_late else warmup)
        num_measured += is_measured
        for name, function in order if i % 2 == 0 else reversed(order):
            start = time.perf_counter()
            for _ in range(repeat):
                function()
            duration = (time.perf_counter() - start) / repeat
            if is_measured:
                seconds[name].append(duration)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text, one a line, under a heading."""
    lines = [("case", "metric", "ours", "peer", "ratio", "required", "")]
    for row in rows:
        peer = "" if row.peer is None else f"{row.peer:.4g} ({row.peer_name})"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        verdict = {None: "", True: "ok", False: "NOT MET"}[row.ok]
        lines.append(
            (
                row.case,
                row.metric,
                f"{row.ours:.4g}",
                peer,
                ratio,
                row.required or "",
                " ".join(filter(None, (verdict, row.note))),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def write_json(
    path: str | pathlib.Path, rows: Sequence[Row], head: Mapping[str, Any]
) -> None:
    """Writes ``{"header": …, "rows": […]}``, a row a line so that runs diff well.

    Args:
      path: where to; its folder is made.
      rows: the benchmark's rows.
      head: what `header` returned.
    """
    body = ",\n".join("  " + json.dumps(row.to_json()) for row in rows)
    top = json.dumps(dict(head), indent=1)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"header": {top},\n"rows": [\n{body}\n]}}\n')
