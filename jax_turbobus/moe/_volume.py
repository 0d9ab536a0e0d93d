"""How many bytes an expert exchange moves, by schedule, peer and link."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_turbobus.moe import _counts, _traffic, _wiring
from jax_turbobus.moe._arguments import check_number
from jax_turbobus.moe._counts import Counts, ExchangeShape
from jax_turbobus.moe._measured import MeasuredLinks
from jax_turbobus.moe._traffic import Traffic
from jax_turbobus.moe._wiring import Wiring
from jax_turbobus.topology import Topology

__all__ = ["TopologyLike", "Volume", "required_recv_capacity", "volume", "wiring_of"]

# A machine, what `Topology.load` makes one from, or what was measured of this one.
TopologyLike = Topology | str | os.PathLike[str] | MeasuredLinks


def required_recv_capacity(
    *,
    tokens_per_rank: int,
    num_experts: int,
    top_k: int,
    num_ranks: int,
    slack: float | None = None,
    expert_ids: npt.ArrayLike | None = None,
) -> int:
    """Returns how many rows a rank must be able to receive.

    Args:
      tokens_per_rank: tokens that each rank brings.
      num_experts: experts in all, a multiple of `num_ranks`.
      top_k: experts chosen by a token.
      num_ranks: ranks along the expert axis.
      slack: that many times the balanced share ``tokens_per_rank * top_k`` (rounded
        up), such as 1.25; rows over it are dropped. Never more than dropless.
      expert_ids: ``int[num_ranks, tokens_per_rank, top_k]`` (or its first two axes
        merged): the exact need of this routing, the fullest rank's.

    Returns:
      A row count, static. Without `slack` and `expert_ids`: the dropless worst case
      ``num_ranks * tokens_per_rank * min(top_k, num_experts / num_ranks)``, all
      tokens to the experts of one rank.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: sizes that do not fit each other, `slack` not a positive number, or
        `slack` and `expert_ids` given at once.
    """
    shape = ExchangeShape(
        tokens_per_rank=tokens_per_rank,
        hidden=1,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
    )
    if slack is not None and expert_ids is not None:
        raise ValueError("slack, expert_ids: expected one of them, got both")
    if expert_ids is not None:
        return int(_counts.exact_counts(shape, expert_ids).received_rows.max())
    dropless = shape.num_ranks * shape.rows_per_pair
    if slack is None:
        return dropless
    slack = check_number("slack", slack)
    return min(dropless, math.ceil(slack * shape.tokens_per_rank * shape.top_k))


@dataclasses.dataclass(frozen=True)
class Volume:
    """The bytes of one exchange under every schedule and peer.

    Attributes:
      shape: the exchange's sizes.
      counts: rows between ranks, expected or exact.
      schedules: ours, by name.
      peers: what JAX users write today, by name.
      wiring: the links under the ranks.
    """

    shape: ExchangeShape
    counts: Counts = dataclasses.field(repr=False)
    schedules: dict[str, Traffic] = dataclasses.field(repr=False)
    peers: dict[str, Traffic] = dataclasses.field(repr=False)
    wiring: Wiring = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.table()

    def __getitem__(self, name: str) -> Traffic:
        schemes = self.schedules | self.peers
        if name not in schemes:
            raise KeyError(f"expected one of {', '.join(schemes)}, got {name!r}")
        return schemes[name]

    def link_bytes(self, name: str) -> dict[str, float]:
        """Returns the bytes that a scheme puts on each link, by link name.

        Args:
          name: a schedule or a peer.
        """
        return self.wiring.describe(self.wiring.loads(self[name]))

    def table(self, *, links: bool = True) -> str:
        """Returns the volumes as text.

        Args:
          links: add a table of bytes by link.
        """
        parts = [self._heading(), self._totals()]
        if links:
            parts.append(self._links())
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Returns everything as plain lists, numbers and strings."""
        schemes = {}
        for kind, group in (("ours", self.schedules), ("peer", self.peers)):
            for name, t in group.items():
                schemes[name] = {
                    "kind": kind,
                    "may_drop": t.may_drop,
                    "dispatch_bytes": t.dispatch.tolist(),
                    "combine_bytes": t.combine.tolist(),
                    "metadata_bytes": t.metadata.tolist(),
                    "sent_bytes": t.sent_bytes.tolist(),
                    "received_bytes": t.received_bytes.tolist(),
                    "total_bytes": t.total_bytes,
                    "link_bytes": self.link_bytes(name),
                }
        shape = dataclasses.asdict(self.shape)
        return {
            "shape": {**shape, "dtype": str(self.shape.dtype)},
            "is_exact": self.counts.is_exact,
            "received_rows": self.counts.received_rows.tolist(),
            "schemes": schemes,
        }

    def _heading(self) -> str:
        s, counts = self.shape, self.counts
        kind = "counted" if counts.is_exact else "expected, uniform routing"
        per_token = counts.unique.sum() / max(1, s.tokens_per_rank * s.num_ranks)
        return (
            f"{s.tokens_per_rank} tokens a rank x {s.num_ranks} ranks, hidden"
            f" {s.hidden} {s.dtype}, {s.num_experts} experts, top-{s.top_k} ({kind})\n"
            f"a token reaches {per_token:.2f} ranks on average; the fullest rank's"
            f" experts receive {counts.received_rows.max():.0f} rows"
        )

    def _totals(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("", "dispatch", "combine", "metadata", "total", "a rank sends", "")
        ]
        for name, t in (self.schedules | self.peers).items():
            sent = t.sent_bytes
            most = f"{_mib(sent.min())} - {_mib(sent.max())}"
            if np.isclose(sent.min(), sent.max()):
                most = _mib(sent.max())
            phases = (t.dispatch.sum(), t.combine.sum(), t.metadata.sum())
            note = "drops rows over its capacity" if t.may_drop else ""
            cells = (*map(_mib, phases), _mib(t.total_bytes))
            rows.append((name, *cells, most, note))
        rows.insert(1 + len(self.schedules), ("-- peers",) + ("",) * 6)
        return "MiB between ranks, both ways\n" + _align(rows)

    def _links(self) -> str:
        names = [link.name for link in self.wiring.links]
        schemes = self.schedules | self.peers
        columns = [
            [_mib(v) for v in self.link_bytes(name).values()] for name in schemes
        ]
        rates = [
            f"{link.bandwidth_bytes_per_s / 1e9:.4g}"
            if link.bandwidth_bytes_per_s
            else "?"
            for link in self.wiring.links
        ]
        rows: list[tuple[str, ...]] = [("link", "GB/s", *schemes)]
        cells = zip(names, rates, *columns, strict=True)
        rows.extend(row for row in cells if any(cell != "0" for cell in row[2:]))
        return "MiB on each link\n" + _align(rows)


def volume(
    *,
    tokens_per_rank: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    num_ranks: int,
    dtype: Any = "bfloat16",
    expert_ids: npt.ArrayLike | None = None,
    capacity_factor: float = 1.25,
    topology: TopologyLike | None = None,
    gpus: Sequence[int] | None = None,
) -> Volume:
    """Returns the bytes that every schedule, and every peer, would move.

    Args:
      tokens_per_rank: tokens that each rank brings.
      hidden: elements of one row.
      num_experts: experts in all, a multiple of `num_ranks`.
      top_k: experts chosen by a token.
      num_ranks: ranks along the expert axis.
      dtype: dtype of a row.
      expert_ids: ``int[num_ranks, tokens_per_rank, top_k]`` (or its first two axes
        merged): count this routing instead of expecting a uniform one.
      capacity_factor: of the peers that drop rows over a capacity.
      topology: the machine whose links to count on, or its name or file as for
        `Topology.load`; without one, each rank has a port out and a port in.
      gpus: the topology's GPU under each rank; by default the first ones.

    Returns:
      A `Volume`: dispatch, combine and metadata apart, by pair of ranks and by link.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: sizes, ids or topology do not fit each other, or a topology cannot be
        read.
    """
    shape = ExchangeShape(
        tokens_per_rank=tokens_per_rank,
        hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        dtype=dtype,
    )
    capacity_factor = check_number("capacity_factor", capacity_factor)
    counts = (
        _counts.expected_counts(shape)
        if expert_ids is None
        else _counts.exact_counts(shape, expert_ids)
    )
    return Volume(
        shape=shape,
        counts=counts,
        schedules={
            name: _traffic.schedule_traffic(name, shape, counts)
            for name in _traffic.SCHEDULES
        },
        peers={
            name: _traffic.peer_traffic(name, shape, counts, capacity_factor)
            for name in _traffic.PEERS
        },
        wiring=wiring_of(shape.num_ranks, topology, gpus),
    )


def wiring_of(
    num_ranks: int, topology: TopologyLike | None, gpus: Sequence[int] | None
) -> Wiring:
    """Returns the links under ranks, of a machine or assumed.

    Raises:
      TypeError: `topology` is none, nor a name or path.
      ValueError: `gpus` and `topology` do not fit, or there is no topology.
    """
    if isinstance(topology, MeasuredLinks):
        if gpus is not None:
            raise ValueError(f"gpus: expected None with measured links, got {gpus!r}")
        return topology.wiring(num_ranks)
    if isinstance(topology, str | os.PathLike):
        topology = Topology.load(topology)
    if topology is not None and not isinstance(topology, Topology):
        raise TypeError(
            "topology: expected a Topology, the name of a shipped one or a path, got"
            f" {topology!r}"
        )
    if topology is not None:
        return _wiring.from_topology(topology, num_ranks, gpus)
    if gpus is not None:
        raise ValueError(f"gpus: expected None without a topology, got {gpus!r}")
    return _wiring.ports(num_ranks)


def _mib(size_bytes: float) -> str:
    mib = size_bytes / 2**20
    return f"{mib:.4g}" if mib < 1000 else f"{mib:.0f}"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = (cell.rjust(w) for cell, w in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *rest]).rstrip())
    return "\n".join(lines)
