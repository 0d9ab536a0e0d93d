"""What JAX users write today to exchange tokens with experts, each checked.

Every peer runs inside `jax.shard_map` over one mesh axis, as
``peer(case, tokens, expert_ids, weights, scale) -> combined``:

* tokens: ``[tokens_per_rank, hidden]``, this rank's.
* expert_ids: ``int32[tokens_per_rank, top_k]``, distinct within a token.
* weights: ``float32[tokens_per_rank, top_k]``.
* scale: ``[num_local_experts, hidden]``: the stand-in expert e multiplies its rows by
  ``scale[e]``, so that what is timed is routing and movement.

`EXACT` peers lose no row as long as no rank receives more than
``case.recv_capacity``; `DROPPING` ones lose what exceeds a capacity per expert.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_turbobus.moe import required_recv_capacity
from jax_turbobus.moe._traffic import ExchangeShape

__all__ = [
    "DROPPING",
    "EVERYONE",
    "EXACT",
    "Case",
    "Peer",
    "chosen",
    "dense",
    "ragged",
    "scale_rows",
]


@dataclasses.dataclass(frozen=True)
class Case:
    """What all schemes of one comparison share.

    Attributes:
      shape: the exchange's sizes.
      recv_capacity: rows that a rank can receive, the same for every exact scheme.
      capacity_factor: of the schemes with a capacity per expert.
      axis_name: the mesh axis of the experts.
      experts: ``experts(rows)``, what a rank's experts make of rows
        ``[num_local_experts, expert_capacity, hidden]``, in place of `scale_rows`.
      expert_capacity: rows of each local expert, in the layout of batched matmuls,
        where `experts` is given. Schemes that take it put rows there at once:
        `allgather_filter`, `one_copy_padded` and `capacity_scatter`.
    """

    shape: ExchangeShape
    recv_capacity: int
    capacity_factor: float = 1.25
    axis_name: str = "expert"
    experts: Callable[[jax.Array], jax.Array] | None = None
    expert_capacity: int = 0

    @classmethod
    def with_slack(
        cls, shape: ExchangeShape, slack: float | None, **values: Any
    ) -> "Case":
        """Returns a case in which a rank can receive `slack` x the balanced share.

        Args:
          shape: the exchange's sizes.
          slack: None: no row is ever lost.
          **values: other attributes.
        """
        capacity = required_recv_capacity(
            tokens_per_rank=shape.tokens_per_rank,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_ranks=shape.num_ranks,
            slack=slack,
        )
        return cls(shape=shape, recv_capacity=capacity, **values)


Peer = Callable[[Case, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def scale_rows(rows: jax.Array, expert: jax.Array, scale: jax.Array) -> jax.Array:
    """Applies the stand-in experts.

    Args:
      rows: ``[rows, hidden]``.
      expert: ``int32[rows]``, local; ``num_local_experts`` marks padding.
      scale: ``[num_local_experts, hidden]``.

    Returns:
      ``[rows, hidden]``, zero where `expert` marks padding.
    """
    padded = jnp.pad(scale, ((0, 1), (0, 0)))
    return rows * padded[expert].astype(rows.dtype)


def dense(
    tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array, scale: jax.Array
) -> jax.Array:
    """Returns what all schemes should: every token beside all experts' scales.

    Args:
      tokens: ``[tokens, hidden]`` of all ranks.
      expert_ids: ``int32[tokens, top_k]``.
      weights: ``float32[tokens, top_k]``.
      scale: ``[num_experts, hidden]``.
    """
    total = jnp.zeros(tokens.shape, jnp.float32)
    for slot in range(expert_ids.shape[1]):
        y = tokens * scale[expert_ids[:, slot]].astype(tokens.dtype)
        total += weights[:, slot, None] * y.astype(jnp.float32)
    return total.astype(tokens.dtype)


def _all_to_all(x: jax.Array, case: Case) -> jax.Array:
    """Returns `x` with blocks swapped: block r of rank s becomes block s of r."""
    swapped: jax.Array = lax.all_to_all(x, case.axis_name, 0, 0, tiled=True)
    return swapped


def _weighted_sum(rows: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``[tokens, top_k, hidden]`` rows added up in float32."""
    total = jnp.einsum("tk,tkh->th", weights, rows.astype(jnp.float32))
    return total.astype(dtype)


def _rank_among_equals(ids: jax.Array, num_ids: int) -> jax.Array:
    """Returns how many entries before each one have the same id."""
    order = jnp.argsort(ids, stable=True)
    counts = jnp.bincount(ids, length=num_ids)
    begin = jnp.cumsum(counts) - counts
    place = jnp.arange(ids.shape[0]) - begin[ids[order]]
    return jnp.zeros_like(order).at[order].set(place.astype(order.dtype))


# With a capacity per expert: rows beyond it are dropped, first choices kept first.


def _slot_in_expert(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    by_choice = expert_ids.T.reshape(-1)
    slot = _rank_among_equals(by_choice, num_experts)
    return slot.reshape(expert_ids.shape[::-1]).T


def _run_padded_experts(buffer: jax.Array, case: Case, scale: jax.Array) -> jax.Array:
    """Returns what the experts make of ``[num_experts, slots, hidden]``."""
    e, slots, hidden = buffer.shape
    r, local = case.shape.num_ranks, case.shape.num_local_experts
    there = _all_to_all(buffer, case).reshape(r, local, slots, hidden)
    if case.experts is None:
        there = there * scale[:, None].astype(there.dtype)
    else:
        rows = there.swapaxes(0, 1).reshape(local, r * slots, hidden)
        rows = case.experts(rows).reshape(local, r, slots, hidden)
        there = rows.swapaxes(0, 1)
    return _all_to_all(there.reshape(e, slots, hidden), case)


def _slots(case: Case) -> int:
    """Returns rows that each rank may send to an expert."""
    if case.experts is None:
        return case.shape.expert_slots(case.capacity_factor)
    return case.expert_capacity // case.shape.num_ranks


def capacity_scatter(
    case: Case,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Returns the sums; rows scattered into fixed slots of each expert."""
    e, hidden = case.shape.num_experts, case.shape.hidden
    slots = _slots(case)
    slot = _slot_in_expert(expert_ids, e)
    place = jnp.where(slot < slots, expert_ids * slots + slot, e * slots)
    copies = jnp.repeat(tokens, expert_ids.shape[1], axis=0)
    buffer = jnp.zeros((e * slots, hidden), tokens.dtype)
    buffer = buffer.at[place.reshape(-1)].set(copies, mode="drop")
    back = _run_padded_experts(buffer.reshape(e, slots, hidden), case, scale)
    rows = back.reshape(-1, hidden).at[place].get(mode="fill", fill_value=0)
    return _weighted_sum(rows, weights, tokens.dtype)


def gshard_einsum(
    case: Case,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Returns the same by one-hot ``[tokens, experts, slots]`` masks and matmuls."""
    e = case.shape.num_experts
    slots = case.shape.expert_slots(case.capacity_factor)
    expert_hot = jax.nn.one_hot(expert_ids, e, dtype=tokens.dtype)
    slot_hot = jax.nn.one_hot(_slot_in_expert(expert_ids, e), slots, dtype=tokens.dtype)
    mask = jnp.einsum("tke,tks->tes", expert_hot, slot_hot)
    gate = jnp.einsum(
        "tk,tke,tks->tes", weights.astype(tokens.dtype), expert_hot, slot_hot
    )
    buffer = jnp.einsum("tes,th->esh", mask, tokens)
    back = _run_padded_experts(buffer, case, scale)
    return jnp.einsum("tes,esh->th", gate, back)


# Exact.


def _sums_by_copy(
    case: Case,
    copies: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Returns what this rank's experts add to each copy of a token, in float32.

    Args:
      case: the sizes.
      copies: ``[copies, hidden]``, tokens that are here.
      expert_ids: ``int32[copies, top_k]``, of all experts; others' are left out.
      weights: ``float32[copies, top_k]``.
      scale: of this rank's experts.
    """
    local, k = case.shape.num_local_experts, case.shape.top_k
    mine = expert_ids - lax.axis_index(case.axis_name) * local
    expert = jnp.where((mine >= 0) & (mine < local), mine, local).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    total = jnp.zeros(copies.shape, jnp.float32)
    if case.experts is None:
        kept = order[: case.recv_capacity]
        copy, expert = kept // k, expert[kept]
        rows = scale_rows(copies[copy], expert, scale).astype(jnp.float32)
        rows = rows * weights.reshape(-1)[kept][:, None]
        return total.at[copy].add(rows)
    # Where each expert's pairs begin, and one gather of the tokens to their places.
    counts = jnp.bincount(expert, length=local)
    place = jnp.arange(case.expert_capacity)
    index = (jnp.cumsum(counts) - counts)[:, None] + place
    is_row = place < counts[:, None]
    nowhere = expert.shape[0]
    pair = jnp.where(is_row, order[jnp.minimum(index, nowhere - 1)], nowhere)
    rows = copies.at[pair // k].get(mode="fill", fill_value=0)
    rows = case.experts(rows).astype(jnp.float32)
    rows = rows * weights.reshape(-1).at[pair].get(mode="fill", fill_value=0)[..., None]
    return total.at[pair // k].add(rows, mode="drop")


def allgather_filter(
    case: Case,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Returns the sums; everybody gets all tokens and keeps what its experts need."""

    def gather(x: jax.Array) -> jax.Array:
        everyones: jax.Array = lax.all_gather(x, case.axis_name, axis=0, tiled=True)
        return everyones

    everyone, ids, gates = gather(tokens), gather(expert_ids), gather(weights)
    total = _sums_by_copy(case, everyone, ids, gates, scale)
    home: jax.Array = lax.psum_scatter(
        total, case.axis_name, scatter_dimension=0, tiled=True
    )
    return home.astype(tokens.dtype)


@dataclasses.dataclass(frozen=True)
class _Sorted:
    """(token, expert) pairs sorted by expert, so by rank too, and their counts.

    Attributes:
      order: ``int[pairs]``: flat slot of each sorted pair.
      to_rank: ``int[pairs]``: where each sorted pair goes.
      pair_counts: ``int[num_ranks, num_ranks]``: rows from rank to rank.
      begin: ``int[num_ranks]``: first sorted pair for each rank.
      arriving: ``int32[recv_capacity]``: local expert of each row received, rows
        ordered by source and expert; `num_local_experts` in padding.
    """

    order: jax.Array
    to_rank: jax.Array
    pair_counts: jax.Array
    begin: jax.Array
    arriving: jax.Array


def _sort_pairs(case: Case, expert_ids: jax.Array) -> _Sorted:
    r, local = case.shape.num_ranks, case.shape.num_local_experts
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=case.shape.num_experts)
    every = lax.all_gather(counts, case.axis_name).reshape(r, r, local)
    pair_counts = every.sum(axis=2)
    me = lax.axis_index(case.axis_name)
    mine = pair_counts[me]
    by_source = every[:, me].reshape(-1)
    kinds = jnp.append(jnp.tile(jnp.arange(local), r), local)
    left = jnp.maximum(0, case.recv_capacity - by_source.sum())
    arriving = jnp.repeat(
        kinds,
        jnp.append(by_source, left),
        total_repeat_length=case.recv_capacity,
    )
    return _Sorted(
        order=order,
        to_rank=flat[order] // local,
        pair_counts=pair_counts,
        begin=jnp.cumsum(mine) - mine,
        arriving=arriving.astype(jnp.int32),
    )


def _run_sorted_experts(
    case: Case, rows: jax.Array, expert: jax.Array, scale: jax.Array
) -> jax.Array:
    """Returns scaled rows; in between in expert order, as grouped matmuls want."""
    order = jnp.argsort(expert, stable=True)
    y = scale_rows(rows[order], expert[order], scale)
    return jnp.zeros_like(y).at[order].set(y, unique_indices=True)


def _back_home(back: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns each token's weighted sum of its sorted rows."""
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
    rows = back[inverse].reshape(*weights.shape, -1)
    return _weighted_sum(rows, weights, back.dtype)


def ragged(exchange: Callable[..., jax.Array]) -> Peer:
    """Returns a scheme over `exchange`, which has `lax.ragged_all_to_all`'s signature.

    Rows sorted by expert go to their ranks without padding, and come back so.
    """

    def peer(
        case: Case,
        tokens: jax.Array,
        expert_ids: jax.Array,
        weights: jax.Array,
        scale: jax.Array,
    ) -> jax.Array:
        s = _sort_pairs(case, expert_ids)
        me = lax.axis_index(case.axis_name)
        sent, received = s.pair_counts[me], s.pair_counts[:, me]
        before = jnp.cumsum(s.pair_counts, axis=0) - s.pair_counts
        rows = exchange(
            tokens[s.order // case.shape.top_k],
            jnp.zeros((case.recv_capacity, case.shape.hidden), tokens.dtype),
            s.begin,
            sent,
            before[me],
            received,
            axis_name=case.axis_name,
        )
        y = _run_sorted_experts(case, rows, s.arriving, scale)
        after = jnp.cumsum(s.pair_counts, axis=1) - s.pair_counts
        back = exchange(
            y,
            jnp.zeros((s.order.shape[0], case.shape.hidden), tokens.dtype),
            jnp.cumsum(received) - received,
            received,
            after[:, me],
            sent,
            axis_name=case.axis_name,
        )
        return _back_home(back, s.order, weights)

    return peer


ragged_all_to_all = ragged(lax.ragged_all_to_all)


def padded_all_to_all(
    case: Case,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Returns the sums; every pair of ranks padded to its worst case."""
    shape, hidden = case.shape, case.shape.hidden
    most, r = shape.rows_per_pair, shape.num_ranks
    s = _sort_pairs(case, expert_ids)
    place = s.to_rank * most + jnp.arange(s.order.shape[0]) - s.begin[s.to_rank]
    padded = jnp.zeros((r * most, hidden), tokens.dtype)
    padded = padded.at[place].set(tokens[s.order // shape.top_k], unique_indices=True)
    arrived = _all_to_all(padded, case)

    received = s.pair_counts[:, lax.axis_index(case.axis_name)]
    end = jnp.cumsum(received)
    row = jnp.arange(case.recv_capacity)
    source = jnp.searchsorted(end, row, side="right")
    within = row - (end - received)[jnp.minimum(source, r - 1)]
    compact = jnp.where(source < r, source * most + within, r * most)
    rows = arrived.at[compact].get(mode="fill", fill_value=0)
    y = _run_sorted_experts(case, rows, s.arriving, scale)
    spread = jnp.zeros_like(padded).at[compact].set(y, mode="drop")
    return _back_home(_all_to_all(spread, case)[place], s.order, weights)


def one_copy_padded(
    case: Case,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Returns the sums; a token goes once to each rank it needs, with its ids.

    Every pair is padded to all tokens of the source; the expert's rank sends back one
    weighted sum a token.
    """
    shape = case.shape
    t, r, local = shape.tokens_per_rank, shape.num_ranks, shape.num_local_experts
    needs = jax.nn.one_hot(expert_ids // local, r, dtype=jnp.int32).max(axis=1)
    slot = jnp.cumsum(needs, axis=0) - needs
    place = jnp.where(needs > 0, jnp.arange(r) * t + slot, r * t)

    def send(x: jax.Array, fill: float) -> jax.Array:
        buffer = jnp.full((r * t, *x.shape[1:]), fill, x.dtype)
        for rank in range(r):
            buffer = buffer.at[place[:, rank]].set(x, mode="drop")
        return _all_to_all(buffer, case)

    rows, ids, gates = send(tokens, 0), send(expert_ids, -1), send(weights, 0)
    sums = _sums_by_copy(case, rows, ids, gates, scale)
    back = _all_to_all(sums.astype(tokens.dtype), case)
    parts = back.at[place].get(mode="fill", fill_value=0)
    return parts.astype(jnp.float32).sum(axis=1).astype(tokens.dtype)


EXACT: dict[str, Peer] = {
    "allgather_filter": allgather_filter,
    "ragged_all_to_all": ragged_all_to_all,
    "padded_all_to_all": padded_all_to_all,
    "one_copy_padded": one_copy_padded,
}
DROPPING: dict[str, Peer] = {
    "capacity_scatter": capacity_scatter,
    "gshard_einsum": gshard_einsum,
}
EVERYONE = {**EXACT, **DROPPING}


def chosen(only: str) -> dict[str, Peer]:
    """Returns the peers that `only` names, separated by commas; empty: everyone."""
    names = only.split(",") if only else list(EVERYONE)
    return {name: EVERYONE[name] for name in names}
