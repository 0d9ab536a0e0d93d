"""Measures the host links of this machine's GPUs and keeps the result.

What is measured, by the engine's own lanes on otherwise idle GPUs: each link
alone and both directions together, each relay path, pairs of GPUs together (two
that do not add up share a link upstream), and block sizes with each way to yield.
Then exchanges between GPUs: slots, rates and starts
(docs/gpu_exchange_packed.md, "What `profile` measures").
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
from jax_turbobus._version import __version__

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
_GOOD = 0.98


def link_groups(
    uuids: Sequence[str], shares: dict[tuple[str, str], float]
) -> tuple[tuple[str, ...], ...]:
    """Returns the GPUs that share a link upstream, by group.

    Args:
      uuids: all GPUs.
      shares: what each pair of links carries when both are used at once, of the sum
        of what each carries alone, in the direction in which that is less.

    Returns:
      Groups of at least two; a GPU with a link of its own is in none.
    """
    group = {uuid: uuid for uuid in uuids}
    for (a, b), share in shares.items():
        if share < _ADD_UP:
            old, new = group[b], group[a]
            group = {u: new if g == old else g for u, g in group.items()}
    members = (
        tuple(u for u in uuids if group[u] == name)
        for name in dict.fromkeys(group.values())
    )
    return tuple(m for m in members if len(m) > 1)


def smallest_good_block(*lanes: dict[int, float]) -> int:
    """Returns the smallest block that reaches 98 % of the best rate on every lane.

    Args:
      lanes: of each, bytes per second by block size.
    """
    return min(
        block
        for block in lanes[0]
        if all(rates[block] >= _GOOD * max(rates.values()) for rates in lanes)
    )


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
    lanes = _Lanes(library, size_bytes, repeats)
    progress("block sizes and yields")
    sweep, yield_kind, block_bytes = _sweep(lanes)
    progress("every path alone")
    paths = tuple(map(lanes.path_rate, lanes.usable))
    progress("pairs of links together")
    alone = {(p.gpu, p.direction): p.bytes_per_s for p in paths if p.relay is None}
    groups = link_groups(lanes.uuids, _shares(lanes, alone))
    both = [
        {
            "gpu": index,
            "h2d_and_d2h_bytes_per_s": sum(
                lanes.rates([lanes.direct[index, "h2d"], lanes.direct[index, "d2h"]])
            ),
        }
        for index in range(len(lanes.uuids))
    ]
    exchange, why_no_exchange = _exchange(library, progress)
    return Profile(
        made_by=__version__,
        driver=_driver(),
        gpus=tuple(lanes.uuids),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        block_bytes=block_bytes,
        yield_kind=yield_kind,
        paths=paths,
        groups=groups,
        sweep=(*sweep, *both),
        exchange=exchange,
        why_no_exchange=why_no_exchange,
    )


class _Lanes:
    """The engine's lanes, to be measured.

    Attributes:
      uuids: of the GPUs, by the process's numbers.
      usable: indices of the paths that were not dropped.
      direct: those of them that are a GPU's own, by GPU and direction.
    """

    def __init__(self, library: Any, size_bytes: int, repeats: int) -> None:
        self.library = library
        self.paths = library.stats()["paths"]
        self.uuids = [one["uuid"] for one in library.gpus()]
        self.usable = [i for i, path in enumerate(self.paths) if not path["dropped"]]
        self.direct = {
            (self.paths[i]["gpu"], self.paths[i]["direction"]): i
            for i in self.usable
            if self.paths[i]["relay"] is None
        }
        self.most_block_bytes = library.settings()["block_bytes"]
        self._size_bytes = size_bytes
        self._repeats = repeats

    def rates(
        self, indices: Sequence[int], block: int | None = None, size: int | None = None
    ) -> list[float]:
        """Returns the best bytes per second of paths that are used at once."""
        block = block or self.most_block_bytes
        size = size or self._size_bytes
        runs = [
            self.library.measure(list(indices), size, block)
            for _ in range(self._repeats)
        ]
        return [max(run[i] for run in runs) for i in range(len(indices))]

    def path_rate(self, index: int) -> PathRate:
        """Returns what a path carries alone, once it is under way."""
        path, size = self.paths[index], self._size_bytes
        (rate,), (larger,) = self.rates([index]), self.rates([index], size=2 * size)
        return PathRate(
            gpu=self.uuids[path["gpu"]],
            relay=None if path["relay"] is None else self.uuids[path["relay"]],
            direction=path["direction"],
            bytes_per_s=slope(size, rate, 2 * size, larger),
        )

    def samples(self) -> list[int]:
        """Returns one path of each kind, the first GPU's own one in first."""
        first: dict[tuple[bool, str], int] = {}
        for i in [self.direct[0, "h2d"], *self.usable]:
            path = self.paths[i]
            first.setdefault((path["relay"] is None, path["direction"]), i)
        return list(first.values())


def _shares(
    lanes: _Lanes, alone: dict[tuple[str, str], float]
) -> dict[tuple[str, str], float]:
    shares = {}
    for a, b in itertools.combinations(range(len(lanes.uuids)), 2):
        pair = lanes.uuids[a], lanes.uuids[b]
        shares[pair] = min(
            sum(lanes.rates([lanes.direct[a, way], lanes.direct[b, way]]))
            / sum(alone[uuid, way] for uuid in pair)
            for way in ("h2d", "d2h")
        )
    return shares


def _exchange(
    library: Any, progress: Callable[[str], None]
) -> tuple[Exchange | None, str]:
    """Returns the figures of exchanges, or None and why there are none."""
    devices = jax.local_devices(backend="cuda")
    try:
        return _measure_exchange.measure(library, devices, progress=progress), ""
    except (RuntimeError, ValueError) as error:
        return None, str(error)


def _sweep(lanes: _Lanes) -> tuple[list[dict[str, Any]], str, int]:
    """Returns all rates, the cheapest yield, and the block to use with it.

    Yields are compared on one path; a block must do for every kind of path.
    """
    library = lanes.library
    default = library.yield_kind()
    blocks = [block for block in _BLOCKS if block <= lanes.most_block_bytes]
    rows: list[dict[str, Any]] = []

    def by_block(kind: str, path: int) -> dict[int, float]:
        library.set_yield_kind(kind)
        found = {block: lanes.rates([path], block)[0] for block in blocks}
        is_relayed = lanes.paths[path]["relay"] is not None
        rows.extend(
            {
                "path": f"{lanes.paths[path]['direction']}{' relayed' * is_relayed}",
                "yield": kind,
                "block_bytes": block,
                "bytes_per_s": rate,
            }
            for block, rate in found.items()
        )
        return found

    first, *others = lanes.samples()
    try:
        by_block("none", first)  # for a reader
        # Some GPUs offer no waits on memory.
        kinds = ("kernel",) if default == "kernel" else ("word", "kernel")
        by_kind = {kind: by_block(kind, first) for kind in kinds}
        best = max(by_kind, key=lambda kind: max(by_kind[kind].values()))
        of_others = [by_block(best, path) for path in others]
    finally:
        library.set_yield_kind(default)
    return rows, best, smallest_good_block(by_kind[best], *of_others)


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
