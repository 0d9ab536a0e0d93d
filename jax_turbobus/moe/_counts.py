"""The sizes of an exchange, and how many rows go from rank to rank."""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_turbobus.moe._arguments import check_dtype, check_integer

__all__ = ["Counts", "ExchangeShape", "Matrix", "exact_counts", "expected_counts"]

# ``[num_ranks, num_ranks]``, from and to.
Matrix = npt.NDArray[np.float64]


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
