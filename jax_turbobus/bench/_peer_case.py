"""What every way to exchange tokens in `peers` is given, and small parts of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_turbobus.moe import required_recv_capacity
from jax_turbobus.moe._counts import ExchangeShape

__all__ = [
    "Case",
    "Peer",
    "all_to_all",
    "dense",
    "rank_among_equals",
    "scale_rows",
    "weighted_sum",
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


def all_to_all(x: jax.Array, case: Case) -> jax.Array:
    """Returns `x` with blocks swapped: block r of rank s becomes block s of r."""
    swapped: jax.Array = lax.all_to_all(x, case.axis_name, 0, 0, tiled=True)
    return swapped


def weighted_sum(rows: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``[tokens, top_k, hidden]`` rows added up in float32."""
    total = jnp.einsum("tk,tkh->th", weights, rows.astype(jnp.float32))
    return total.astype(dtype)


def rank_among_equals(ids: jax.Array, num_ids: int) -> jax.Array:
    """Returns how many entries before each one have the same id."""
    order = jnp.argsort(ids, stable=True)
    counts = jnp.bincount(ids, length=num_ids)
    begin = jnp.cumsum(counts) - counts
    place = jnp.arange(ids.shape[0]) - begin[ids[order]]
    return jnp.zeros_like(order).at[order].set(place.astype(order.dtype))
