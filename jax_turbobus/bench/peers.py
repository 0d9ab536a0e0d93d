"""What JAX users write today to exchange tokens with experts, each checked.

Every peer runs inside `jax.shard_map` over one mesh axis, as
``peer(case, tokens, expert_ids, weights, scale) -> combined``:

* tokens: ``[tokens_per_rank, hidden]``, this rank's.
* expert_ids: ``int32[tokens_per_rank, top_k]``, distinct within a token.
* weights: ``float32[tokens_per_rank, top_k]``.
* scale: ``[num_local_experts, hidden]``: the stand-in expert e multiplies its rows by
  ``scale[e]``, so that what is timed is routing and movement.

`EXACT` peers (here and in `_peers_sorted`) lose no row as long as no rank receives
more than ``case.recv_capacity``; `DROPPING` ones (in `_peers_dropping`) lose what
exceeds a capacity per expert.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_turbobus.bench._peer_case import Case, Peer, all_to_all, dense, scale_rows
from jax_turbobus.bench._peers_dropping import capacity_scatter, gshard_einsum
from jax_turbobus.bench._peers_sorted import (
    padded_all_to_all,
    ragged,
    ragged_all_to_all,
)

__all__ = [
    "DROPPING",
    "EVERYONE",
    "EXACT",
    "Case",
    "Peer",
    "chosen",
    "dense",
    "ragged",
    "ragged_all_to_all",
    "scale_rows",
]


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
        return all_to_all(buffer, case)

    rows, ids, gates = send(tokens, 0), send(expert_ids, -1), send(weights, 0)
    sums = _sums_by_copy(case, rows, ids, gates, scale)
    back = all_to_all(sums.astype(tokens.dtype), case)
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
