"""Where the rows of a dispatch went: data, carried from dispatch to combine."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_turbobus.moe._routing import Routing

__all__ = ["DispatchState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchState:
    """What `combine` needs to bring rows back, as arrays of this rank.

    A pytree: it may be a result, a residual, a scan carry or batched by `vmap`, and
    two dispatches never share one. Gradients flow through `weights`.

    Attributes:
      expert_ids: ``int32[num_tokens, top_k]``, as given; -1 where `valid` was False.
      weights: ``float[num_tokens, top_k]``, as given.
      slots: ``int32[num_tokens, top_k]``: the row of each choice in the result of its
        expert's rank; -1 if the choice is masked or its row was dropped.
      group_sizes: ``int32[num_local_experts]``: rows that each local expert got.
      wanted: ``int32[num_local_experts]``: rows that it would have got without a
        capacity.
      routing: the static half.
    """

    expert_ids: jax.Array
    weights: jax.Array
    slots: jax.Array
    group_sizes: jax.Array
    wanted: jax.Array
    routing: Routing = dataclasses.field(metadata={"static": True})

    @property
    def overflow(self) -> jax.Array:
        """``int32[]``: rows wanted of this rank if that was more than it kept, else 0.

        Not 0 means that rows were dropped; as a `recv_capacity` it would hold them.
        """
        wanted = self.wanted.sum(-1, dtype=jnp.int32)
        kept = self.group_sizes.sum(-1, dtype=jnp.int32)
        return jnp.where(wanted > kept, wanted, 0)
