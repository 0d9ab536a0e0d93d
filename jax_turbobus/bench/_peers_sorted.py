"""Exact ways that sort (token, expert) pairs, and send a row for each of them."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_turbobus.bench._peer_case import (
    Case,
    Peer,
    all_to_all,
    scale_rows,
    weighted_sum,
)

__all__ = ["padded_all_to_all", "ragged", "ragged_all_to_all"]


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
    return weighted_sum(rows, weights, back.dtype)


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
    arrived = all_to_all(padded, case)

    received = s.pair_counts[:, lax.axis_index(case.axis_name)]
    end = jnp.cumsum(received)
    row = jnp.arange(case.recv_capacity)
    source = jnp.searchsorted(end, row, side="right")
    within = row - (end - received)[jnp.minimum(source, r - 1)]
    compact = jnp.where(source < r, source * most + within, r * most)
    rows = arrived.at[compact].get(mode="fill", fill_value=0)
    y = _run_sorted_experts(case, rows, s.arriving, scale)
    spread = jnp.zeros_like(padded).at[compact].set(y, mode="drop")
    return _back_home(all_to_all(spread, case)[place], s.order, weights)
