"""The four exchanges in plain JAX collectives.

What stands in for our own where that cannot run: ranks in several processes, and
platforms without a handler. Every rank gathers all ids, and from them knows all of
everybody's rows; tokens come by an all-gather, sums return by a reduce-scatter. It
moves about ``num_ranks`` times what is needed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_turbobus.moe._arguments import MOST

__all__ = ["EXCHANGES"]


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What is static about an exchange; `axes` are bound here."""

    axes: tuple[Any, ...]
    num_ranks: int
    num_experts: int
    num_rows: int
    expert_capacity: int

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What the rows of this rank are, from everybody's ids and slots.

    Slots are data that a caller may have changed: those outside a result count as none.

    Attributes:
      all_ids: ``int32[num_ranks * num_tokens, top_k]``, by (rank, token).
      all_slots: the rows of these choices in the results of their experts' ranks.
      token: ``int32[num_rows]``, the token of each row, an index of `all_ids`; its
        length where a row belongs to none.
      expert: ``int32[num_rows]``, the id that chose the row; -1 for none.
    """

    all_ids: jax.Array
    all_slots: jax.Array
    token: jax.Array
    expert: jax.Array

    @classmethod
    def of(cls, all_ids: jax.Array, all_slots: jax.Array, sizes: _Sizes) -> "_Rows":
        num_tokens, top_k = all_ids.shape
        me = lax.axis_index(sizes.axes)
        is_mine = (all_ids >= 0) & (all_ids // sizes.num_local == me)
        is_mine &= (all_slots >= 0) & (all_slots < sizes.num_rows)
        row = jnp.where(is_mine, all_slots, sizes.num_rows).reshape(-1)
        token = jnp.repeat(jnp.arange(num_tokens, dtype=jnp.int32), top_k)
        none = jnp.full(sizes.num_rows, -1, jnp.int32)
        return cls(
            all_ids=all_ids,
            all_slots=all_slots,
            token=(none + 1 + num_tokens).at[row].set(token, mode="drop"),
            expert=none.at[row].set(all_ids.reshape(-1), mode="drop"),
        )

    @classmethod
    def gathered(
        cls, expert_ids: jax.Array, slots: jax.Array, sizes: _Sizes
    ) -> "_Rows":
        both = _gather(jnp.stack([expert_ids, slots], -1), sizes)
        return cls.of(both[..., 0], both[..., 1], sizes)

    @property
    def num_tokens(self) -> int:
        """Of all ranks together."""
        return self.all_ids.shape[0]

    def at_rows(self, x: jax.Array) -> jax.Array:
        """Returns a value of each token at the rows of this rank, zero at padding."""
        return x.at[self.token].get(mode="fill", fill_value=0)

    def of_tokens(self, values: jax.Array) -> jax.Array:
        """Returns the sum of each token's values, which come by row."""
        sums = jnp.zeros((self.num_tokens, *values.shape[1:]), values.dtype)
        return sums.at[self.token].add(values, mode="drop")

    def chose(self) -> jax.Array:
        """Returns ``bool[num_rows, top_k]``: which choices of a token are the row."""
        ids = self.all_ids.at[self.token].get(mode="fill", fill_value=-2)
        slots = self.all_slots.at[self.token].get(mode="fill", fill_value=-2)
        row = jnp.arange(len(self.token))
        return (ids == self.expert[:, None]) & (slots == row[:, None])


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Where everybody's rows go.

    Attributes:
      rows: this rank's.
      slots: ``int32[num_tokens, top_k]``, as in `DispatchState`.
      kept: ``int32[num_experts]``, rows of each expert.
      wanted: ``int32[num_experts]``, before cuts.
    """

    rows: _Rows
    slots: jax.Array
    kept: jax.Array
    wanted: jax.Array


def _cut(wanted: jax.Array, sizes: _Sizes) -> jax.Array:
    """Returns how many rows experts keep, ``[num_ranks, num_local]`` like `wanted`."""
    if sizes.expert_capacity:
        return jnp.minimum(wanted, sizes.expert_capacity)
    ascending = jnp.sort(wanted, -1)
    left = sizes.num_rows - (jnp.cumsum(ascending, -1) - ascending)
    num_fuller = jnp.arange(sizes.num_local, 0, -1)
    is_over = ascending > left // num_fuller
    first = jnp.argmax(is_over, -1, keepdims=True)
    level = jnp.where(
        is_over.any(-1, keepdims=True),
        jnp.take_along_axis(left // num_fuller, first, -1),
        ascending[:, -1:],
    )
    kept = jnp.minimum(wanted, level)
    room = jnp.minimum(wanted.sum(-1, keepdims=True), sizes.num_rows)
    is_fuller = wanted > level
    one_more = is_fuller & (
        jnp.cumsum(is_fuller, -1) <= room - kept.sum(-1, keepdims=True)
    )
    return kept + one_more


def _plan(expert_ids: jax.Array, sizes: _Sizes) -> _Plan:
    num_tokens, top_k = expert_ids.shape
    num_choices = sizes.num_ranks * num_tokens * top_k
    if num_choices > MOST:
        raise ValueError(
            f"dispatch: expert_ids: {sizes.num_ranks} ranks x {num_tokens} tokens x"
            f" {top_k} choices are more than {MOST}; exchange in chunks"
            " (expert_parallel)"
        )
    all_ids = _gather(expert_ids, sizes)
    nobody = sizes.num_experts
    earlier = all_ids[:, :, None] == all_ids[:, None, :]
    is_repeated = (earlier & np.tri(top_k, k=-1, dtype=bool)).any(-1)
    is_masked = (all_ids < 0) | (all_ids >= nobody)
    expert = jnp.where(is_masked | is_repeated, nobody, all_ids).reshape(-1)

    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    by_expert = expert[order]
    counts = jnp.bincount(expert, length=nobody + 1).astype(jnp.int32)
    wanted = counts[:nobody].reshape(sizes.num_ranks, sizes.num_local)
    kept = _cut(wanted, sizes).astype(jnp.int32)
    if sizes.expert_capacity:
        begins = jnp.arange(sizes.num_local) * sizes.expert_capacity
        first_row = jnp.broadcast_to(begins, kept.shape)
    else:
        first_row = jnp.cumsum(kept, -1) - kept
    begin = jnp.cumsum(counts) - counts
    place = jnp.arange(num_choices, dtype=jnp.int32) - begin[by_expert]

    def at_expert(of_experts: jax.Array, fill: int) -> jax.Array:
        flat = of_experts.reshape(-1)
        return flat.at[by_expert].get(mode="fill", fill_value=fill)

    is_kept = place < at_expert(kept, 0)
    row = jnp.where(is_kept, at_expert(first_row, 0) + place, -1).astype(jnp.int32)

    slots = jnp.zeros(num_choices, jnp.int32).at[order].set(row).reshape(-1, top_k)
    me = lax.axis_index(sizes.axes)
    my_slots = lax.dynamic_slice_in_dim(slots, me * num_tokens, num_tokens)
    same = expert_ids[:, :, None] == expert_ids[:, None, :]
    is_mine_masked = (expert_ids < 0) | (expert_ids >= nobody)
    shared = jnp.where(same, my_slots[:, None, :], -1).max(-1, initial=-1)
    return _Plan(
        # Of choices that share a row the first one has it.
        rows=_Rows.of(all_ids, slots, sizes),
        slots=jnp.where(is_mine_masked, -1, shared),
        kept=kept.reshape(-1),
        wanted=wanted.reshape(-1),
    )


# XLA refuses collectives of nothing.


def _gather(x: jax.Array, sizes: _Sizes) -> jax.Array:
    """Returns `x` of all ranks, one after the other."""
    if x.size == 0:
        return jnp.zeros((sizes.num_ranks * x.shape[0], *x.shape[1:]), x.dtype)
    gathered: jax.Array = lax.all_gather(x, sizes.axes, tiled=True)
    return gathered


def _sum_to_owners(values: jax.Array, sizes: _Sizes) -> jax.Array:
    """Returns this rank's share of the sum of all ranks' values."""
    if values.size == 0:
        return values[: values.shape[0] // sizes.num_ranks]
    summed: jax.Array = lax.psum_scatter(
        values, sizes.axes, scatter_dimension=0, tiled=True
    )
    return summed


def _accumulated(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _send(sizes: _Sizes, tokens: jax.Array, expert_ids: jax.Array) -> Any:
    plan = _plan(expert_ids, sizes)
    rows = plan.rows.at_rows(_gather(tokens, sizes))
    mine = lax.axis_index(sizes.axes) * sizes.num_local
    kept, wanted = (
        lax.dynamic_slice_in_dim(x, mine, sizes.num_local)
        for x in (plan.kept, plan.wanted)
    )
    return rows, kept, wanted, plan.slots


def _send_grad(
    sizes: _Sizes, row_grads: jax.Array, expert_ids: jax.Array, slots: jax.Array
) -> Any:
    here = _Rows.gathered(expert_ids, slots, sizes)
    sums = _sum_to_owners(here.of_tokens(_accumulated(row_grads)), sizes)
    return (sums.astype(row_grads.dtype),)


def _row_weights(here: _Rows, weights: jax.Array, sizes: _Sizes) -> jax.Array:
    everybodys = _gather(weights, sizes)
    return jnp.where(here.chose(), here.at_rows(everybodys), 0).sum(-1)


def _bring(
    sizes: _Sizes,
    rows: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    weights: jax.Array,
) -> Any:
    here = _Rows.gathered(expert_ids, slots, sizes)
    weighted = _accumulated(rows) * _row_weights(here, weights, sizes)[:, None]
    sums = _sum_to_owners(here.of_tokens(weighted), sizes)
    return (sums.astype(rows.dtype),)


def _bring_grad(
    sizes: _Sizes,
    sum_grads: jax.Array,
    rows: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
) -> Any:
    del group_sizes
    here = _Rows.gathered(expert_ids, slots, sizes)
    grads = _accumulated(here.at_rows(_gather(sum_grads, sizes)))
    row_grads = grads * _row_weights(here, weights, sizes)[:, None]
    products = (_accumulated(rows) * grads).sum(-1)
    of_choices = jnp.where(here.chose(), products[:, None], 0)
    weight_grads = _sum_to_owners(here.of_tokens(of_choices), sizes)
    return row_grads.astype(rows.dtype), weight_grads.astype(weights.dtype)


def _over_batches(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the exchange as its primitive is bound: ``keys, rank, *data``."""

    def run(
        keys: jax.Array,
        rank: jax.Array,
        *data: jax.Array,
        axes: tuple[Any, ...],
        num_experts: Any,
        num_rows: int,
        expert_capacity: Any,
        **others: Any,
    ) -> Sequence[jax.Array]:
        del rank, others
        sizes = _Sizes(
            axes, keys.shape[0], int(num_experts), num_rows, int(expert_capacity)
        )

        def one(*data: jax.Array) -> Any:
            return exchange(sizes, *data)

        for _ in range(data[0].ndim - 2):
            one = jax.vmap(one)
        return tuple(one(*data))

    return run


EXCHANGES = {
    "dispatch": _over_batches(_send),
    "dispatch_grad": _over_batches(_send_grad),
    "combine": _over_batches(_bring),
    "combine_grad": _over_batches(_bring_grad),
}
