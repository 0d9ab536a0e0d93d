"""Ways with a capacity per expert: rows beyond it are dropped, later choices first."""

import jax
import jax.numpy as jnp

from jax_turbobus.bench._peer_case import (
    Case,
    all_to_all,
    rank_among_equals,
    weighted_sum,
)

__all__ = ["capacity_scatter", "gshard_einsum"]


def _slot_in_expert(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    by_choice = expert_ids.T.reshape(-1)
    slot = rank_among_equals(by_choice, num_experts)
    return slot.reshape(expert_ids.shape[::-1]).T


def _run_padded_experts(buffer: jax.Array, case: Case, scale: jax.Array) -> jax.Array:
    """Returns what the experts make of ``[num_experts, slots, hidden]``."""
    e, slots, hidden = buffer.shape
    r, local = case.shape.num_ranks, case.shape.num_local_experts
    there = all_to_all(buffer, case).reshape(r, local, slots, hidden)
    if case.experts is None:
        there = there * scale[:, None].astype(there.dtype)
    else:
        rows = there.swapaxes(0, 1).reshape(local, r * slots, hidden)
        rows = case.experts(rows).reshape(local, r, slots, hidden)
        there = rows.swapaxes(0, 1)
    return all_to_all(there.reshape(e, slots, hidden), case)


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
    return weighted_sum(rows, weights, tokens.dtype)


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
