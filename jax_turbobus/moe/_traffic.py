"""Who sends how many bytes to whom: our schedules and the peers, as matrices.

Every scheme is reduced to three ``[num_ranks, num_ranks]`` matrices (from, to), in
bytes: dispatch, combine and metadata. Their diagonals are zero: what a rank keeps
crosses no link. `_wiring` lays such matrices over a topology, `_volume` prints them.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from jax_turbobus.moe._counts import Counts, ExchangeShape, Matrix

__all__ = [
    "PEERS",
    "SCHEDULES",
    "Traffic",
    "peer_traffic",
    "schedule_traffic",
]

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
