"""What `top` makes of the counters that processes publish: rates, lines, JSON."""

import dataclasses
import pathlib
import time
from typing import Any

from jax_turbobus.commands import _live_pages

__all__ = ["Moving", "Process", "Watch", "lines"]

_GB = 1e9
_KINDS = {
    "streams": "GPUs",
    "host": "CPU devices, links not emulated",
    "emulated": "CPU devices, emulated links",
    "plain": "CPU devices, plain copies",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Moving:
    """A lane or link and how fast it goes.

    Attributes:
      row: its counters.
      bytes_per_s: since the look before; None: there was none.
    """

    row: _live_pages.Row
    bytes_per_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One engine of a process.

    Attributes:
      page: what it publishes.
      command: the process's command line.
      looked_s: how long ago a GPUs' engine has looked for what is over; None: it
        need not look.
      lanes: its lanes.
      links: its links.
    """

    page: _live_pages.Page
    command: str
    looked_s: float | None
    lanes: tuple[Moving, ...]
    links: tuple[Moving, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns it as what `json.dumps` takes."""
        return {
            "pid": self.page.pid,
            "command": self.command,
            "kind": self.page.kind,
            "num_in_flight": self.page.num_in_flight,
            "num_ended": self.page.num_ended,
            "looked_s": self.looked_s,
            "lanes": [_as_json(one) for one in self.lanes],
            "links": [_as_json(one) for one in self.links],
        }


def _as_json(one: Moving) -> dict[str, Any]:
    row = dataclasses.asdict(one.row)
    del row["is_link"]
    return row | {"bytes_per_s": one.bytes_per_s}


class Watch:
    """Remembers the look before, for rates.

    Args:
      parent: where the folders of pages are.
    """

    def __init__(self, parent: pathlib.Path) -> None:
        self._parent = parent
        self._before: dict[pathlib.Path, tuple[float, _live_pages.Page]] = {}

    def look(self) -> list[Process]:
        """Returns every engine of every living process, with rates since last time."""
        now = time.monotonic()
        before, self._before = self._before, {}
        found = []
        for page in _live_pages.read_pages(self._parent):
            self._before[page.path] = (now, page)
            moving = _rates(page, now, before.get(page.path))
            looked_s = None
            if page.kind == "streams" and page.looked_ns:
                looked_s = max(now - page.looked_ns / 1e9, 0.0)
            found.append(
                Process(
                    page,
                    _live_pages.command_of(page.pid),
                    looked_s,
                    tuple(one for one in moving if not one.row.is_link),
                    tuple(one for one in moving if one.row.is_link),
                )
            )
        return found


def _moved(page: _live_pages.Page, row: _live_pages.Row) -> int:
    # An engine of GPUs issues whole transfers at once, and sees that they are over
    # when the next one comes: what it has issued tells its rate sooner.
    in_flight = row.num_bytes_in_flight if page.kind == "streams" else 0
    return row.num_bytes + in_flight


def _rates(
    page: _live_pages.Page, now: float, before: tuple[float, _live_pages.Page] | None
) -> list[Moving]:
    rates: list[float | None] = [None] * len(page.rows)
    if before is not None and now > before[0]:
        old = before[1]
        names = [row.name for row in page.rows]
        # Another engine of the process may have taken the file's name.
        if names == [row.name for row in old.rows]:
            for i, (row, was) in enumerate(zip(page.rows, old.rows, strict=True)):
                difference = _moved(page, row) - _moved(old, was)
                if difference >= 0:
                    rates[i] = difference / (now - before[0])
    return [Moving(row, rate) for row, rate in zip(page.rows, rates, strict=True)]


def lines(processes: list[Process], *, width: int = 100) -> list[str]:
    """Returns a heading a process and a line for each lane or link it has used.

    Args:
      processes: what to show.
      width: of the terminal, in columns.
    """
    if not processes:
        return ["no process of this user has moved anything with jax_turbobus"]
    shown: list[str] = []
    for one in processes:
        page = one.page
        as_of = ""
        if page.num_in_flight and one.looked_s is not None and one.looked_s > 1:
            as_of = f" as of {one.looked_s:.0f} s ago"
        heading = (
            f"process {page.pid} ({_KINDS[page.kind]}): {page.num_in_flight} transfers "
            f"in flight{as_of}, {page.num_ended} over: {one.command}"
        )
        shown.append(heading[:width])
        shown += [
            _line(moving)[:width]
            for moving in (*one.lanes, *one.links)
            if _is_worth_a_line(moving.row)
        ]
    return shown


def _is_worth_a_line(row: _live_pages.Row) -> bool:
    return bool(
        row.num_bytes or row.num_bytes_in_flight or row.is_backed_off or row.is_dropped
    )


def _line(one: Moving) -> str:
    row = one.row
    rate = "     -" if one.bytes_per_s is None else f"{one.bytes_per_s / _GB:6.2f}"
    of = (
        f" of {row.bandwidth_bytes_per_s / _GB:.2f}"
        if row.bandwidth_bytes_per_s
        else ""
    )
    notes = [
        text
        for text, is_so in (
            (
                f"{row.num_bytes_in_flight / _GB:.2f} GB in flight",
                row.num_bytes_in_flight,
            ),
            ("dropped", row.is_dropped),
            ("backed off", row.is_backed_off and not row.is_dropped),
            ("lender busy", row.has_rival and not row.is_dropped),
        )
        if is_so
    ]
    name = ("link " if row.is_link else "") + row.name
    return (
        f"  {name:32} {rate + of:>16} GB/s {row.num_bytes / _GB:10.3f} GB  "
        f"{', '.join(notes)}"
    ).rstrip()
