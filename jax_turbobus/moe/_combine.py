"""Rows of experts back to their tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_turbobus.moe import _exchange, _linear, _matching
from jax_turbobus.moe._arguments import check_array
from jax_turbobus.moe._matching import Group
from jax_turbobus.moe._state import DispatchState

__all__ = ["combine", "prepared", "restored"]


def combine(rows: jax.Array, state: DispatchState) -> jax.Array:
    """Returns, for each token, the weighted sum of its experts' rows.

    The weights given to `dispatch` are applied here, once. Sums accumulate in float32
    (float64 for float64 rows) and are rounded once; complex rows are two real ones.
    Masked choices and dropped rows count as zero; rows that belong to no token are
    never read, whatever is in them.

    Args:
      rows: ``[recv_capacity, hidden]``, or ``[num_local_experts, expert_capacity,
        hidden]`` if the dispatch was padded: what this rank's experts made of the rows
        of `dispatch`. `hidden` and dtype may differ from those of the tokens.
      state: of that `dispatch`.

    Returns:
      ``[num_tokens, hidden]`` of the dtype of `rows`; float32 if that is an integer
      dtype.

    Raises:
      TypeError: `state` is not a `DispatchState`, or `rows` cannot be added up.
      ValueError: `rows` has another shape than the dispatch's rows, or the axis of the
        dispatch is none here or has another number of ranks.

    Transforms:
      jit, shard_map (``check_vma`` too), grad in `rows` and in the state's weights,
      vmap (a batch meets as one call), scan, remat. Reverse mode, any number of times.
    """
    operands = prepared(rows, state)
    return restored(_linear.bring(state.routing, *operands), rows.dtype)


def prepared(rows: jax.Array, state: DispatchState) -> tuple[jax.Array, ...]:
    """Returns ``rows, weights, expert_ids, slots, group_sizes`` for the exchange.

    Raises:
      TypeError: as `combine`.
      ValueError: as `combine`.
    """
    if not isinstance(state, DispatchState):
        raise TypeError(
            "combine: state: expected the DispatchState that dispatch returned, got"
            f" {type(state).__name__}"
        )
    check_array("combine: rows", rows)
    routing = state.routing
    num_axes = len(routing.rows_shape)
    if rows.ndim != num_axes + 1 or rows.shape[:-1] != routing.rows_shape:
        expected = ", ".join(map(str, routing.rows_shape))
        raise ValueError(
            f"combine: rows: expected shape [{expected}, hidden], that of the rows of"
            f" this state's dispatch, got {list(rows.shape)}"
        )
    if not jnp.issubdtype(rows.dtype, jnp.number):
        raise TypeError(
            "combine: rows: expected a floating, complex or integer dtype, got"
            f" {rows.dtype}"
        )
    _check_ranks(routing.group)
    rows = _linear.as_summable(rows.reshape(routing.num_rows, rows.shape[-1]))
    weights = state.weights.astype(_exchange.weight_dtype(rows.dtype))
    operands = (rows, weights, state.expert_ids, state.slots, state.group_sizes)
    return tuple(_matching.vary_alike(routing.group, operands))


def restored(sums: jax.Array, dtype: Any) -> jax.Array:
    """Returns the exchange's sums as the sums of rows of `dtype`."""
    if jnp.issubdtype(dtype, jnp.integer):
        return sums
    return _linear.sum_restored(sums, dtype)


def _check_ranks(group: Group) -> None:
    """Refuses a state of other ranks than those that call.

    Raises:
      ValueError: the group's axis is none here, or has another size.
    """
    here = Group.of(group.axis_name, op="combine")
    if here != group:
        raise ValueError(
            f"combine: state: it is of a dispatch over {group.num_ranks} ranks, but"
            f" axis {group.label} has {here.num_ranks} here; combine under the mesh"
            " that dispatched"
        )
