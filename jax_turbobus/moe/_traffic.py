"""Who sends how many bytes to whom: our schedules and the peers, as matrices.

Every scheme is reduced to three ``[num_ranks, num_ranks]`` matrices (from, to), in
bytes: dispatch, combine and metadata. Their diagonals are zero: what a rank keeps
crosses no link. `_links` lays such matrices over a topology, `_volume` prints them.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_turbobus.moe._arguments import check_dtype, check_integer

__all__ = [
    "PEERS",
    "SCHEDULES",
    "Counts",
    "ExchangeShape",
    "Traffic",
    "exact_counts",
    "expected_counts",
    "peer_traffic",
    "schedule_traffic",
]

Matrix = npt.NDArray[np.float64]

SCHEDULES = ("packed", "packed_no_dedup", "broadcast", "direct", "relay")
PEERS = (
    "capacity_scatter",
    "gshard_einsum",
    "allgather_filter",
    "ragged_all_to_all",
    "padded_all_to_all",
    "one_copy_padded",
)

_INT32_BYTES = 4
_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class ExchangeShape:
    """The static sizes of one expert exchange.

    Attributes:
      tokens_per_rank: tokens that each rank brings.
      hidden: elements of one row.
      num_experts: experts in all, a multiple of `num_ranks`.
      top_k: experts chosen by a token.
      num_ranks: ranks along the expert axis.
      dtype: dtype of a row.
    """

    tokens_per_rank: int
    hidden: int
    num_experts: int
    top_k: int
    num_ranks: int
    dtype: Any = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("tokens_per_rank", "hidden", "num_experts", "top_k", "num_ranks"):
            least = 0 if name == "tokens_per_rank" else 1
            number = check_integer(name, getattr(self, name), least=least)
            object.__setattr__(self, name, number)
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k: expected at most num_experts={self.num_experts}, got"
                f" {self.top_k}; a token cannot choose more experts than there are"
            )
        if self.num_experts % self.num_ranks:
            wanted = -(-self.num_experts // self.num_ranks) * self.num_ranks
            raise ValueError(
                f"num_experts: expected a multiple of num_ranks={self.num_ranks}, got"
                f" {self.num_experts}; pad to {wanted} experts, or let"
                " moe.plan_placement lay them out"
            )
        object.__setattr__(self, "dtype", check_dtype("dtype", self.dtype))

    @property
    def num_local_experts(self) -> int:
        """Experts that live on one rank."""
        return self.num_experts // self.num_ranks

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""
        return int(self.hidden * self.dtype.itemsize)

    @property
    def rows_per_pair(self) -> int:
        """Rows that one rank can send another at worst."""
        return self.tokens_per_rank * min(self.top_k, self.num_local_experts)

    def expert_slots(self, capacity_factor: float) -> int:
        """Returns the rows a source may send to one expert under a capacity."""
        slots = self.tokens_per_rank * self.top_k
        return math.ceil(capacity_factor * slots / self.num_experts)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Rows between ranks, each ``float64[num_ranks, num_ranks]`` (from, to).

    Attributes:
      copies: (token, expert) pairs; one row each without dedup.
      unique: (token, destination rank) pairs; one row each with dedup.
      slots: top-k slots, duplicates of an expert within a token counted again.
      is_exact: counted from expert ids, not expected for uniform routing.
    """

    copies: Matrix
    unique: Matrix
    slots: Matrix
    is_exact: bool

    @property
    def received_rows(self) -> npt.NDArray[np.float64]:
        """Rows that each rank's experts get, its own tokens' included."""
        return np.asarray(self.copies.sum(axis=0), np.float64)


def expected_counts(shape: ExchangeShape) -> Counts:
    """Returns what uniform routing without duplicates gives on average.

    Source: a rank is missed by a token with probability
    ``C(E - E/R, k) / C(E, k)`` (k experts drawn without replacement).
    """
    e, k, r = shape.num_experts, shape.top_k, shape.num_ranks
    missed = math.comb(e - shape.num_local_experts, k) / math.comb(e, k)
    ones = np.ones((r, r))
    copies = ones * shape.tokens_per_rank * k / r
    unique = ones * shape.tokens_per_rank * (1 - missed)
    return Counts(copies=copies, unique=unique, slots=copies, is_exact=False)


def exact_counts(shape: ExchangeShape, expert_ids: npt.ArrayLike) -> Counts:
    """Counts rows for real routing.

    Args:
      shape: the exchange's sizes.
      expert_ids: ``int[num_ranks, tokens_per_rank, top_k]`` or the same flattened to
        ``int[num_ranks * tokens_per_rank, top_k]``. Ids outside
        ``[0, num_experts)`` are masked slots.

    Returns:
      Exact counts.

    Raises:
      TypeError: `expert_ids` are not integers.
      ValueError: `expert_ids` have another shape.
    """
    ids = np.asarray(expert_ids)
    r, t, k = shape.num_ranks, shape.tokens_per_rank, shape.top_k
    if ids.dtype.kind not in "iu":
        raise TypeError(f"expert_ids: expected integers, got dtype {ids.dtype}")
    if ids.shape not in ((r, t, k), (r * t, k)):
        raise ValueError(
            f"expert_ids: expected shape {(r, t, k)} or {(r * t, k)} (num_ranks,"
            f" tokens_per_rank, top_k), got {ids.shape}"
        )
    ids = ids.reshape(r, t, k)
    valid = (ids >= 0) & (ids < shape.num_experts)
    copies, unique, slots = (np.zeros((r, r)) for _ in range(3))
    for source in range(r):
        chosen = np.zeros((t, shape.num_experts + 1), bool)
        where = np.where(valid[source], ids[source], shape.num_experts)
        np.put_along_axis(chosen, where, True, axis=1)
        by_rank = chosen[:, :-1].reshape(t, r, shape.num_local_experts)
        copies[source] = by_rank.sum(axis=(0, 2))
        unique[source] = by_rank.any(axis=2).sum(axis=0)
        ranks = ids[source][valid[source]] // shape.num_local_experts
        slots[source] = np.bincount(ranks.astype(np.int64), minlength=r)
    return Counts(copies=copies, unique=unique, slots=slots, is_exact=True)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes of one scheme, each matrix ``float64[num_ranks, num_ranks]``.

    Attributes:
      name: a name from `SCHEDULES` or `PEERS`.
      dispatch: rows on their way to the experts.
      combine: rows on their way back.
      metadata: counts, ids and weights.
      local_bytes: bytes that a rank reads and writes in its own memory on top
        (packing, expanding, summing), on average over ranks.
      num_launches: steps one after the other, dispatch and combine together.
      writes_once: on the way out every rank writes its rows once into shared memory
        and all others read them, so its outgoing link carries one copy.
      may_drop: rows over a capacity are lost, so the result is not exact.
    """

    name: str
    dispatch: Matrix
    combine: Matrix
    metadata: Matrix
    local_bytes: float
    num_launches: int
    writes_once: bool = False
    may_drop: bool = False

    @property
    def pair_bytes(self) -> Matrix:
        """Bytes from each rank to each other one, all phases together."""
        return self.dispatch + self.combine + self.metadata

    @property
    def sent_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes that each rank sends, all phases together."""
        return np.asarray(self.pair_bytes.sum(axis=1), np.float64)

    @property
    def received_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes that each rank receives, all phases together."""
        return np.asarray(self.pair_bytes.sum(axis=0), np.float64)

    @property
    def total_bytes(self) -> float:
        """Bytes that cross from one rank to another, over all ranks."""
        return float(self.pair_bytes.sum())


def _off_diagonal(rows: Matrix, row_bytes: float) -> Matrix:
    result = rows * row_bytes
    np.fill_diagonal(result, 0.0)
    return result


def _count_exchange_bytes(shape: ExchangeShape) -> Matrix:
    """Returns the bytes by which every rank tells all its rows per expert."""
    ones = np.ones((shape.num_ranks, shape.num_ranks))
    return _off_diagonal(ones, shape.num_experts * _INT32_BYTES)


def schedule_traffic(name: str, shape: ExchangeShape, counts: Counts) -> Traffic:
    """Returns the traffic of one of our schedules.

    Args:
      name: one of `SCHEDULES`; ``"packed_no_dedup"`` is `packed` with one row for
        each (token, expert), to show what dedup saves.
      shape: the exchange's sizes.
      counts: rows between ranks.

    Returns:
      The schedule's bytes.

    Raises:
      ValueError: there is no such schedule.
    """
    row = shape.row_bytes
    full = np.full((shape.num_ranks, shape.num_ranks), float(shape.tokens_per_rank))
    slot_bytes = _INT32_BYTES + _FLOAT32_BYTES  # an expert id and its weight
    metadata = _count_exchange_bytes(shape)
    copies, unique = (m.sum() / shape.num_ranks for m in (counts.copies, counts.unique))
    if name in ("packed", "relay"):
        return Traffic(
            name=name,
            dispatch=_off_diagonal(counts.unique, row),
            combine=_off_diagonal(counts.unique.T, row),
            metadata=metadata + _off_diagonal(counts.unique, shape.top_k * slot_bytes),
            # Pack, expand; sum at the experts' rank, add up at home.
            local_bytes=row * (2 * unique + unique + copies + copies + 2 * unique),
            num_launches=6 if name == "packed" else 8,
        )
    if name == "packed_no_dedup":
        return Traffic(
            name=name,
            dispatch=_off_diagonal(counts.copies, row),
            combine=_off_diagonal(counts.copies.T, row),
            metadata=metadata + _off_diagonal(counts.slots, slot_bytes),
            local_bytes=row * (2 * copies + 2 * copies + 2 * copies),
            num_launches=6,
        )
    if name == "broadcast":
        return Traffic(
            name=name,
            dispatch=_off_diagonal(full, row),
            combine=_off_diagonal(full, row),
            metadata=_off_diagonal(full, shape.top_k * slot_bytes),
            local_bytes=row * (2 * copies + copies + 2 * full[0].sum()),
            num_launches=4,
            writes_once=True,
        )
    if name == "direct":
        return Traffic(
            name=name,
            dispatch=_off_diagonal(counts.unique, row),
            combine=_off_diagonal(counts.unique.T, row),
            # Every rank reads the places and the weights of all slots.
            metadata=metadata + _off_diagonal(full, shape.top_k * slot_bytes),
            # A row arrives in the place of its first copy: only the others cost.
            local_bytes=row * (2 * (copies - unique) + copies + 2 * unique),
            num_launches=4,
        )
    raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}")


def peer_traffic(
    name: str, shape: ExchangeShape, counts: Counts, capacity_factor: float = 1.25
) -> Traffic:
    """Returns the traffic of what JAX users write today.

    Args:
      name: one of `PEERS`; `jax_turbobus.bench.peers` has the code of each.
      shape: the exchange's sizes.
      counts: rows between ranks.
      capacity_factor: of the two schemes that drop rows over a capacity.

    Returns:
      The peer's bytes.

    Raises:
      ValueError: there is no such peer.
    """
    row, t, k = shape.row_bytes, shape.tokens_per_rank, shape.top_k
    ones = np.ones((shape.num_ranks, shape.num_ranks))
    slot_bytes = _INT32_BYTES + _FLOAT32_BYTES

    def scheme(
        dispatch: Matrix, combine: Matrix, metadata: Matrix, may_drop: bool = False
    ) -> Traffic:
        return Traffic(
            name=name,
            dispatch=dispatch,
            combine=combine,
            metadata=metadata,
            local_bytes=2 * float(dispatch.sum() + combine.sum()) / shape.num_ranks,
            num_launches=6,
            may_drop=may_drop,
        )

    nothing = np.zeros_like(ones)
    if name in ("capacity_scatter", "gshard_einsum"):
        slots = shape.num_local_experts * shape.expert_slots(capacity_factor)
        padded = _off_diagonal(ones, slots * row)
        return scheme(padded, padded, nothing, may_drop=True)
    if name == "allgather_filter":
        return scheme(
            _off_diagonal(ones, t * row),
            _off_diagonal(ones, t * shape.hidden * _FLOAT32_BYTES),
            _off_diagonal(ones, t * k * slot_bytes),
        )
    if name == "ragged_all_to_all":
        rows = _off_diagonal(counts.slots, row)
        return scheme(rows, rows.T, _count_exchange_bytes(shape))
    if name == "padded_all_to_all":
        padded = _off_diagonal(ones, shape.rows_per_pair * row)
        return scheme(padded, padded, _count_exchange_bytes(shape))
    if name == "one_copy_padded":
        padded = _off_diagonal(ones, t * row)
        return scheme(padded, padded, _off_diagonal(ones, t * k * slot_bytes))
    raise ValueError(f"peer: expected one of {', '.join(PEERS)}, got {name!r}")
