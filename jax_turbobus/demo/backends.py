"""The two ways the demo can move its bytes: this library's calls, or plain JAX.

The model, the optimizer and the training step are the same text for both.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_turbobus import moe, offload
from jax_turbobus.demo.model import Exchange

__all__ = ["BACKENDS", "Backend", "get"]


@dataclasses.dataclass(frozen=True)
class Backend:
    """How bytes move.

    Attributes:
      name: as given on the command line.
      peer: the name `moe.volume` has for its exchange; None: it is ours.
      exchange: tokens to their experts and back, inside `shard_map`.
      to_device: a tree in host memory to the device, inside `jit`.
      to_host: a tree on the device into host memory, overwriting a donated tree.
    """

    name: str
    peer: str | None
    exchange: Exchange
    to_device: Callable[[Any], Any]
    to_host: Callable[[Any, Any], Any]


def _allgather_filter(
    expert_fn: Callable[[jax.Array], jax.Array],
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    *,
    num_experts: int,
    expert_capacity: int,
    axis_name: str,
) -> tuple[jax.Array, jax.Array]:
    """Runs experts in plain JAX: all tokens go everywhere, each rank keeps its own.

    Returns:
      See `Exchange`.
    """
    num_local = num_experts // jax.lax.axis_size(axis_name)
    top_k = expert_ids.shape[1]
    everyones_tokens = jax.lax.all_gather(tokens, axis_name, tiled=True)
    ids = jax.lax.all_gather(expert_ids, axis_name, tiled=True).reshape(-1)
    gates = jax.lax.all_gather(weights, axis_name, tiled=True).reshape(-1)
    # Place of each (token, choice) among those of its expert, in token order.
    chosen = jax.nn.one_hot(ids, num_experts, dtype=jnp.int32)
    place = jnp.take_along_axis(jnp.cumsum(chosen, 0) - 1, ids[:, None], axis=1)[:, 0]
    local = ids - jax.lax.axis_index(axis_name) * num_local
    kept = (local >= 0) & (local < num_local) & (place < expert_capacity)
    slot = jnp.where(kept, local * expert_capacity + place, num_local * expert_capacity)
    copies = jnp.repeat(everyones_tokens, top_k, axis=0)
    rows = jnp.zeros((num_local * expert_capacity, tokens.shape[1]), tokens.dtype)
    rows = rows.at[slot].set(copies, mode="drop")
    out = expert_fn(rows.reshape(num_local, expert_capacity, -1))
    out = out.reshape(num_local * expert_capacity, -1)
    back = out.at[slot].get(mode="fill", fill_value=0) * gates[:, None]
    back = back.reshape(-1, top_k, tokens.shape[1]).sum(axis=1)
    mine = jax.lax.psum_scatter(back, axis_name, tiled=True)
    is_local = (local >= 0) & (local < num_local)
    return mine, jnp.sum(is_local & ~kept, dtype=jnp.int32)


def _device_put(tree: Any, space: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, space), tree)


def _reference() -> Backend:
    return Backend(
        name="reference",
        peer="allgather_filter",
        exchange=_allgather_filter,
        to_device=lambda tree: _device_put(tree, jax.memory.Space.Device),
        # XLA writes into the donated buffers by itself.
        to_host=lambda tree, out: _device_put(tree, jax.memory.Space.Host),
    )


def _dispatch_combine(
    expert_fn: Callable[[jax.Array], jax.Array],
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    *,
    num_experts: int,
    expert_capacity: int,
    axis_name: str,
) -> tuple[jax.Array, jax.Array]:
    """Runs the experts on the rows that `moe.dispatch` brings.

    Returns:
      See `Exchange`.
    """
    rows, _, state = moe.dispatch(
        tokens,
        expert_ids,
        weights,
        num_experts=num_experts,
        axis_name=axis_name,
        expert_capacity=expert_capacity,
    )
    dropped = state.wanted.sum() - state.group_sizes.sum()
    return moe.combine(expert_fn(rows), state), dropped


def _turbobus() -> Backend:
    return Backend(
        name="turbobus",
        peer=None,
        exchange=_dispatch_combine,
        to_device=offload.to_device,
        to_host=offload.to_host,
    )


BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": _reference,
    "turbobus": _turbobus,
}


def get(name: str) -> Backend:
    """Returns the backend called `name`.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in BACKENDS:
        raise ValueError(
            f"--backend: expected one of {', '.join(BACKENDS)}, got {name}"
        )
    return BACKENDS[name]()
