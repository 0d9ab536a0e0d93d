"""Measures the host links of this machine's GPUs and keeps the result.

What is measured, by the engine's own lanes on otherwise idle GPUs: each link
alone and both directions together, each relay path, pairs of GPUs together (two
that do not add up share a link upstream), and block sizes with each way to yield.
Then exchanges between GPUs: slots, rates and starts (docs/gpu_exchange.md).
"""

import datetime
import itertools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_turbobus import _ffi, _measure_exchange, _profile_file, gpu
from jax_turbobus._profile_exchange import Exchange, PairRate
from jax_turbobus._profile_file import PathRate, Profile

__all__ = [
    "Exchange",
    "PairRate",
    "Profile",
    "keep",
    "link_groups",
    "measure",
    "slope",
    "smallest_good_block",
]

_MIB = 1 << 20
_BLOCKS = tuple(n * _MIB for n in (1, 2, 4, 8, 16))
# Two links that carry less than this part of their sum are one.
_ADD_UP = 0.85
_GOOD = 0.99


def link_groups(
    uuids: Sequence[str],
    alone: dict[str, float],
    together: dict[tuple[str, str], float],
) -> tuple[tuple[str, ...], ...]:
    """Returns the GPUs that share a link upstream, by group.

    Args:
      uuids: all GPUs.
      alone: bytes per second of each GPU's link.
      together: of each pair of links used at once, added up.

    Returns:
      Groups of at least two; a GPU with a link of its own is in none.
    """
    group = {uuid: uuid for uuid in uuids}
    for (a, b), rate in together.items():
        if rate < _ADD_UP * (alone[a] + alone[b]):
            old, new = group[b], group[a]
            group = {u: new if g == old else g for u, g in group.items()}
    members = (
        tuple(u for u in uuids if group[u] == name)
        for name in dict.fromkeys(group.values())
    )
    return tuple(m for m in members if len(m) > 1)


def smallest_good_block(rates: dict[int, float]) -> int:
    """Returns the smallest block that reaches 99 % of the best rate.

    Args:
      rates: bytes per second by block size.
    """
    best = max(rates.values())
    return min(block for block, rate in rates.items() if rate >= _GOOD * best)


def slope(size: int, rate: float, larger: int, larger_rate: float) -> float:
    """Returns what a path carries once it is under way, in bytes per second.

    What it takes to start and to end is the same for both sizes: the difference
    between them does not have it.

    Args:
      size: bytes of a transfer.
      rate: how fast it was, in bytes per second, from its start to its end.
      larger: bytes of a larger transfer.
      larger_rate: how fast that was.
    """
    time_s = larger / larger_rate - size / rate
    if time_s <= 0:
        return larger_rate  # noise
    return min(max((larger - size) / time_s, larger_rate), 1.1 * larger_rate)


def measure(
    *,
    size_bytes: int = 256 * _MIB,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Returns what this machine's links carry. Takes seconds; needs idle GPUs.

    Args:
      size_bytes: of each transfer.
      repeats: the best of so many counts.
      progress: gets a line before each step.

    Raises:
      ValueError: JAX has no CUDA device, or the CUDA library was not built.
    """
    library = _ffi.cuda()
    engine = gpu.engine()
    if library is None or engine is None:
        raise ValueError(
            "profile: JAX has no CUDA device here, or jax_turbobus was built "
            "without nvcc; there are no links to measure"
        )
    paths = library.stats()["paths"]
    usable = [i for i, path in enumerate(paths) if not path["dropped"]]
    uuids = [one["uuid"] for one in library.gpus()]
    settings = library.settings()

    def rates(
        indices: Sequence[int], block: int | None = None, size: int = size_bytes
    ) -> list[float]:
        runs = [
            library.measure(list(indices), size, block or most) for _ in range(repeats)
        ]
        return [max(run[i] for run in runs) for i in range(len(indices))]

    def rate(path: int) -> float:
        larger = 2 * size_bytes
        return slope(
            size_bytes, rates([path])[0], larger, rates([path], size=larger)[0]
        )

    most = settings["block_bytes"]
    direct = {
        (paths[i]["gpu"], paths[i]["direction"]): i
        for i in usable
        if paths[i]["relay"] is None
    }
    progress("block sizes and yields")
    sweep, yield_kind, block_bytes = _sweep(
        library, rates, direct[0, "h2d"], [b for b in _BLOCKS if b <= most]
    )
    progress("every path alone")
    measured = []
    for i in usable:
        path = paths[i]
        relay = path["relay"]
        measured.append(
            PathRate(
                gpu=uuids[path["gpu"]],
                relay=None if relay is None else uuids[relay],
                direction=path["direction"],
                bytes_per_s=rate(i),
            )
        )
    progress("pairs of links together")
    alone = {
        p.gpu: p.bytes_per_s
        for p in measured
        if (p.relay, p.direction) == (None, "h2d")
    }
    together = {
        (uuids[a], uuids[b]): sum(rates([direct[a, "h2d"], direct[b, "h2d"]]))
        for a, b in itertools.combinations(range(len(uuids)), 2)
    }
    both = [
        {
            "gpu": index,
            "h2d_and_d2h_bytes_per_s": sum(
                rates([direct[index, "h2d"], direct[index, "d2h"]])
            ),
        }
        for index in range(len(uuids))
    ]
    exchange, why_no_exchange = _exchange(library, progress)
    return Profile(
        driver=_driver(),
        gpus=tuple(uuids),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        block_bytes=block_bytes,
        yield_kind=yield_kind,
        paths=tuple(measured),
        groups=link_groups(uuids, alone, together),
        sweep=(*sweep, *both),
        exchange=exchange,
        why_no_exchange=why_no_exchange,
    )


def _exchange(
    library: Any, progress: Callable[[str], None]
) -> tuple[Exchange | None, str]:
    """Returns the figures of exchanges, or None and why there are none."""
    devices = jax.local_devices(backend="cuda")
    try:
        return _measure_exchange.measure(library, devices, progress=progress), ""
    except (RuntimeError, ValueError) as error:
        return None, str(error)


def _sweep(
    library: Any,
    rates: Callable[..., list[float]],
    path: int,
    blocks: Sequence[int],
) -> tuple[list[dict[str, Any]], str, int]:
    default = library.yield_kind()
    rows: list[dict[str, Any]] = []
    try:
        for kind in ("none", "word", "kernel"):
            if kind == "word" and default == "kernel":
                continue  # this GPU offers no waits on memory
            library.set_yield_kind(kind)
            rows += [
                {
                    "yield": kind,
                    "block_bytes": block,
                    "bytes_per_s": rates([path], block)[0],
                }
                for block in blocks
            ]
    finally:
        library.set_yield_kind(default)
    by_kind: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["yield"] != "none":
            blocks_of = by_kind.setdefault(row["yield"], {})
            blocks_of[row["block_bytes"]] = row["bytes_per_s"]
    best = max(by_kind, key=lambda kind: max(by_kind[kind].values()))
    return rows, best, smallest_good_block(by_kind[best])


def keep(found: Profile, path: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Writes a profile to where the next process looks for it.

    Args:
      found: the profile.
      path: another file; None: this machine's.

    Returns:
      The file.
    """
    where = _profile_file.default_path(found.gpus) if path is None else path
    _profile_file.save(found, pathlib.Path(where))
    return pathlib.Path(where)


def _driver() -> str:
    from jax_turbobus import topology

    return topology.discover().driver
