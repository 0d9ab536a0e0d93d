"""The demo's words: sizes, tables and framed text."""

from collections.abc import Mapping, Sequence

from jax_turbobus.demo.compare import Comparison
from jax_turbobus.demo.emulate import Emulation
from jax_turbobus.demo.traffic import ExchangeBytes

__all__ = ["bytes_moved", "framed", "size", "table"]

# Each scheme in a few words, for people who did not write it.
_SCHEMES = {
    "turbobus": "jax_turbobus",
    "allgather_filter": "all-gather + filter",
    "ragged_all_to_all": "ragged all-to-all",
    "padded_all_to_all": "padded all-to-all",
    "one_copy_padded": "one copy a device, padded",
    "capacity_scatter": "capacity scatter (drops rows)",
    "gshard_einsum": "GShard einsum (drops rows)",
}


def size(num_bytes: float) -> str:
    """Returns bytes in the unit people read best, such as ``"1.5 MiB"``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.3g} {unit}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells in columns: the first flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def bytes_moved(
    links: Mapping[str, float], exchanged: ExchangeBytes, num_steps: int
) -> str:
    """Returns two tables: bytes on each link, and what the peers would have moved.

    Args:
      links: bytes that host transfers put on each link.
      exchanged: bytes of the expert exchanges.
      num_steps: steps that they were summed over.
    """
    parts = []
    for title, by_link in (
        ("host transfers (Adam's moments)", links),
        ("expert exchange, forward and backward", exchanged.by_link),
    ):
        if by_link:
            rows = [("link", "in all", "a step")]
            rows += [(n, size(b), size(b / num_steps)) for n, b in by_link.items()]
            parts.append(f"{title}\n{table(rows)}")
    used = exchanged.by_peer.get(exchanged.in_use)
    if used:
        rows = [("", "in all", "to this run")]
        for name, moved in sorted(exchanged.by_peer.items(), key=lambda pair: pair[1]):
            words = _SCHEMES[name]
            if name == exchanged.in_use:
                words += " (this run)"
            rows.append((words, size(moved), f"{moved / used:.2f} x"))
        parts.append(f"bytes between devices for this routing\n{table(rows)}")
    return "\n\n".join(parts)


def emulation(emulated: Emulation) -> str:
    """Returns a line about the links that are emulated."""
    return (
        f"links     emulated: {emulated.topology.name}, {len(emulated.topology.gpus)} "
        f"GPUs, all rates times {emulated.rate_scale:.2g} so that this machine keeps up"
    )


def comparison(compared: Comparison) -> str:
    """Returns a table of the same transfers, direct and pooled."""
    rows = [("", "direct", "pooled", "")]
    rows += [
        (
            timing.name,
            f"{1e3 * timing.direct_s:.1f} ms",
            f"{1e3 * timing.pooled_s:.1f} ms",
            f"{timing.direct_s / timing.pooled_s:.2f} x",
        )
        for timing in compared.timings
    ]
    return "\n".join(
        (
            f"the same {size(compared.size_bytes)} a device over {compared.links}, "
            f"best of {compared.repeats}",
            table(rows),
            "  Idle links help who transfers alone; where all transfer, none is idle.",
        )
    )


def framed(written: str) -> str:
    """Returns text with a bar at its left, control characters made visible."""
    visible = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for c in written
    )
    lines = visible.rstrip().split("\n")
    return "\n".join(f"  | {line}".rstrip() for line in lines) + "\n"
