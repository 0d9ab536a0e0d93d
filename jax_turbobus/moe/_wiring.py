"""Which links the bytes between two ranks cross, and how long that takes."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jax_turbobus.moe._arguments import check_integer
from jax_turbobus.moe._counts import Matrix
from jax_turbobus.moe._traffic import Traffic
from jax_turbobus.topology import PeerPath, Topology

__all__ = ["Link", "Wiring", "from_rates", "from_topology", "ports"]

# Indices of links, in the order of crossing; a link crossed twice is there twice.
Path = tuple[int, ...]
Paths = tuple[tuple[Path, ...], ...]


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction of one link, or what several of them share.

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
      paths: ``paths[a][b]``: the links that bytes from rank a to rank b cross; empty
        on the diagonal.
      relay_paths: the same for the `relay` schedule, where a slow pair goes through
        a third rank.
      uploads: the part of rank a's paths up to shared memory, which bytes written
        once for all readers cross once; None where ranks share no memory.
      downloads: ``downloads[a][b]``: the rest of the way, crossed by every reader.
      has_peer_access: all ranks can write into each other's memory.
      is_machine: rates are those of a machine, not assumed.
    """

    links: tuple[Link, ...]
    paths: Paths
    relay_paths: Paths
    uploads: tuple[Path, ...] | None = None
    downloads: Paths | None = None
    has_peer_access: bool = True
    is_machine: bool = False

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
        paths = self.relay_paths if traffic.name == "relay" else self.paths
        once = traffic.writes_once and matrix is traffic.dispatch
        # GPUs that reach each other's memory write into it under every schedule.
        once = once and not self.has_peer_access
        if once and self.uploads is not None and self.downloads is not None:
            paths = self.downloads
            for rank, path in enumerate(self.uploads):
                np.add.at(result, list(path), matrix[rank].max(initial=0.0))
        for a, row in enumerate(paths):
            for b, path in enumerate(row):
                np.add.at(result, list(path), matrix[a, b])
        return result

    def link_seconds(self, loads: Matrix, assumed_bytes_per_s: float) -> Matrix:
        """Returns how long each link is busy, ``float64[num_links]``."""
        rates = [k.bandwidth_bytes_per_s or assumed_bytes_per_s for k in self.links]
        return np.asarray(loads / np.array(rates), np.float64)

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


def from_rates(rates: Matrix, *, has_peer_access: bool) -> Wiring:
    """Returns a wiring by what was measured between ranks.

    A rank has a link out and one in, as fast as its fastest pair, and each pair a link
    of its own in between.

    Args:
      rates: ``float64[num_ranks, num_ranks]`` (from, to), bytes per second; the
        diagonal does not count.
      has_peer_access: all ranks can write into each other's memory; if not, they share
        host memory.
    """
    num_ranks = len(rates)
    ranks = range(num_ranks)
    between = np.where(np.eye(num_ranks, dtype=bool), 0.0, rates)
    best = between.max(initial=0.0)  # of ranks that have no other one
    out = [Link(f"rank {r} out", float(between[r].max()) or best) for r in ranks]
    into = [Link(f"rank {r} in", float(between[:, r].max()) or best) for r in ranks]
    pairs = [
        Link(f"rank {a} to rank {b}", float(between[a, b]) or None)
        for a in ranks
        for b in ranks
    ]

    def path(a: int, b: int) -> Path:
        return (a, 2 * num_ranks + a * num_ranks + b, num_ranks + b)

    paths = tuple(tuple(() if a == b else path(a, b) for b in ranks) for a in ranks)
    return Wiring(
        links=(*out, *into, *pairs),
        paths=paths,
        relay_paths=paths,
        uploads=tuple((a,) for a in ranks),
        downloads=tuple(
            tuple(() if a == b else (num_ranks + b,) for b in ranks) for a in ranks
        ),
        has_peer_access=has_peer_access,
        is_machine=True,
    )


def from_topology(
    topology: Topology, num_ranks: int, gpus: Sequence[int] | None = None
) -> Wiring:
    """Returns the links of a machine under its GPUs as ranks.

    What two directions, or all users of a host memory, share is a link of its own.

    Args:
      topology: the machine.
      num_ranks: ranks.
      gpus: the GPU of each rank; by default the first ones in order.

    Raises:
      TypeError: `gpus` are not integers.
      ValueError: there are fewer GPUs than ranks, or `gpus` does not name one of its
        own for each rank.
    """
    chosen = tuple(range(num_ranks)) if gpus is None else _check_gpus(gpus)
    here = len(topology.gpus)
    if len(chosen) != num_ranks or len(set(chosen)) != num_ranks:
        raise ValueError(
            f"gpus: expected a different GPU for each of {num_ranks} ranks, got"
            f" {list(chosen)}"
        )
    if not all(0 <= gpu < here for gpu in chosen):
        raise ValueError(
            f"topology {topology.name!r}: expected a GPU for each of {num_ranks} ranks"
            f" (GPUs {list(chosen)}), it has {here}"
        )
    return _Builder(topology, chosen).build()


def _check_gpus(gpus: Any) -> tuple[int, ...]:
    if isinstance(gpus, str) or not isinstance(gpus, Iterable):
        raise TypeError(f"gpus: expected a GPU's index for each rank, got {gpus!r}")
    return tuple(check_integer("gpus", gpu, least=0) for gpu in gpus)


class _Builder:
    """Numbers the directions, duplex limits and memories that paths cross."""

    def __init__(self, topology: Topology, gpus: tuple[int, ...]) -> None:
        self._topology = topology
        self._gpus = gpus
        self._links: list[Link] = []
        self._index: dict[str, int] = {}

    def build(self) -> Wiring:
        t, gpus = self._topology, self._gpus
        for link in t.links:
            self._number(f"{link.id} {link.a}>{link.b}", link.a_to_b_bytes_per_s)
            self._number(f"{link.id} {link.b}>{link.a}", link.b_to_a_bytes_per_s)
        empty: list[list[Path]] = [[() for _ in gpus] for _ in gpus]
        paths, relays, downloads = ([list(row) for row in empty] for _ in range(3))
        uploads = [self._host_path(gpu, t.gpus[gpu].numa_node, "d2h") for gpu in gpus]
        for a, src in enumerate(gpus):
            for b, dst in enumerate(gpus):
                if a == b:
                    continue
                ways = t.peer_paths(src, dst)
                plain = next(way for way in ways if way.kind != "relay")
                best = max(ways, key=lambda way: way.bandwidth_bytes_per_s)
                if best.bandwidth_bytes_per_s <= plain.bandwidth_bytes_per_s:
                    best = plain
                paths[a][b] = self._peer_path(plain)
                relays[a][b] = self._peer_path(best)
                downloads[a][b] = self._host_path(dst, t.gpus[src].numa_node, "h2d")
        return Wiring(
            links=tuple(self._links),
            paths=tuple(map(tuple, paths)),
            relay_paths=tuple(map(tuple, relays)),
            uploads=tuple(uploads),
            downloads=tuple(map(tuple, downloads)),
            has_peer_access=all(
                t.has_peer_access(a, b) for a in gpus for b in gpus if a != b
            ),
            is_machine=True,
        )

    def _peer_path(self, way: PeerPath) -> Path:
        start = self._topology.gpus[way.src].id
        return self._walk(start, way.links, memory_uses=2 if way.kind == "host" else 0)

    def _host_path(self, gpu: int, numa_node: int, direction: Any) -> Path:
        direct = self._topology.paths(gpu, direction, numa_node)[0]
        node = self._topology.numa_nodes[numa_node].id
        start = self._topology.gpus[gpu].id if direction == "d2h" else node
        return self._walk(start, direct.links, memory_uses=1)

    def _walk(self, start: str, links: Sequence[int], *, memory_uses: int) -> Path:
        """Returns what is crossed from node `start` on.

        Args:
          start: a node's id.
          links: indices into the topology's links.
          memory_uses: 2 if host memory on the way is written and read, 1 if only one
            of them, 0 if the bytes do not rest there.
        """
        crossed: list[int] = []
        node = start
        nodes = [start]
        for index in links:
            link = self._topology.links[index]
            is_forward = link.a == node
            rate = link.a_to_b_bytes_per_s if is_forward else link.b_to_a_bytes_per_s
            other = link.b if is_forward else link.a
            crossed.append(self._number(f"{link.id} {node}>{other}", rate))
            both = link.duplex_bytes_per_s
            if both and both < link.a_to_b_bytes_per_s + link.b_to_a_bytes_per_s:
                crossed.append(self._number(f"{link.id} both ways", both))
            node = other
            nodes.append(node)
        # The bytes rest in the first host memory that they come to.
        memories = {numa.id: numa for numa in self._topology.numa_nodes}
        numa = next((memories[n] for n in nodes if n in memories), None)
        if memory_uses and numa is not None and numa.memory_bytes_per_s:
            memory = self._number(f"{numa.id} memory", numa.memory_bytes_per_s)
            crossed.extend([memory] * memory_uses)
        return tuple(crossed)

    def _number(self, name: str, rate: float) -> int:
        if name not in self._index:
            self._index[name] = len(self._links)
            self._links.append(Link(name, rate))
        return self._index[name]
