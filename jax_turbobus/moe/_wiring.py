"""Which links the bytes between two ranks cross, and how long that takes."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_turbobus.moe._traffic import Matrix, Traffic

__all__ = ["Link", "Wiring", "ports"]


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction of one link.

    Attributes:
      name: for people, such as ``"rank 0 out"``.
      bandwidth_bytes_per_s: what it carries; None if nobody knows.
    """

    name: str
    bandwidth_bytes_per_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The links under an exchange, and the way from each rank to each other.

    Attributes:
      links: all of them, one entry a direction.
      paths: ``paths[a][b]``: indices into `links` that bytes from rank a to rank b
        cross, in order; empty on the diagonal.
      relay_paths: the same for the `relay` schedule, where a slow pair goes through
        a third rank.
      uploads: ``uploads[a]``: the part of rank a's paths up to shared memory, which
        bytes written once for all readers cross once; None where ranks share none.
      downloads: ``downloads[b]``: the rest of the way, crossed by every reader.
      has_peer_access: ranks can write into each other's memory.
    """

    links: tuple[Link, ...]
    paths: tuple[tuple[tuple[int, ...], ...], ...]
    relay_paths: tuple[tuple[tuple[int, ...], ...], ...]
    uploads: tuple[tuple[int, ...], ...] | None = None
    downloads: tuple[tuple[int, ...], ...] | None = None
    has_peer_access: bool = True

    @property
    def num_ranks(self) -> int:
        """Ranks that this wiring joins."""
        return len(self.paths)

    def loads(self, traffic: Traffic, matrix: Matrix | None = None) -> Matrix:
        """Returns the bytes that cross each link, ``float64[num_links]``.

        Args:
          traffic: says how its scheme uses the links.
          matrix: one of its matrices; all of them together if not given.
        """
        if matrix is None:
            return (
                self.loads(traffic, traffic.dispatch)
                + self.loads(traffic, traffic.combine)
                + self.loads(traffic, traffic.metadata)
            )
        result = np.zeros(len(self.links))
        once = traffic.writes_once and matrix is traffic.dispatch
        if once and self.uploads is not None and self.downloads is not None:
            for rank in range(self.num_ranks):
                result[list(self.uploads[rank])] += matrix[rank].max(initial=0.0)
                result[list(self.downloads[rank])] += matrix[:, rank].sum()
            return result
        paths = self.relay_paths if traffic.name == "relay" else self.paths
        for a, row in enumerate(paths):
            for b, path in enumerate(row):
                result[list(path)] += matrix[a, b]
        return result

    def link_seconds(self, loads: Matrix, assumed_bytes_per_s: float) -> Matrix:
        """Returns how long each link is busy, ``float64[num_links]``."""
        rates = [k.bandwidth_bytes_per_s or assumed_bytes_per_s for k in self.links]
        result: npt.NDArray[np.float64] = loads / np.array(rates)
        return result

    def describe(self, loads: Matrix) -> dict[str, Any]:
        """Returns bytes by link name."""
        return {
            link.name: float(load) for link, load in zip(self.links, loads, strict=True)
        }


def ports(num_ranks: int, bandwidth_bytes_per_s: float | None = None) -> Wiring:
    """Returns a wiring where each rank has one link out and one in, nothing shared.

    Args:
      num_ranks: ranks.
      bandwidth_bytes_per_s: of each port, if known.
    """
    out = [Link(f"rank {r} out", bandwidth_bytes_per_s) for r in range(num_ranks)]
    into = [Link(f"rank {r} in", bandwidth_bytes_per_s) for r in range(num_ranks)]
    paths = tuple(
        tuple(() if a == b else (a, num_ranks + b) for b in range(num_ranks))
        for a in range(num_ranks)
    )
    return Wiring(links=(*out, *into), paths=paths, relay_paths=paths)
