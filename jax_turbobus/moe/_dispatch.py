"""Tokens to the ranks of their experts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_turbobus.moe import _linear, _matching, _payload, _routing
from jax_turbobus.moe._matching import AxisName
from jax_turbobus.moe._routing import Routing
from jax_turbobus.moe._state import DispatchState

__all__ = ["Operands", "dispatch", "prepared", "received"]


def dispatch(
    tokens: Any,
    expert_ids: jax.Array,
    weights: jax.Array,
    *,
    num_experts: int,
    axis_name: AxisName,
    recv_capacity: int | None = None,
    expert_capacity: int | None = None,
    schedule: str = "auto",
    explain: bool = False,
    valid: jax.Array | None = None,
) -> tuple[Any, jax.Array, DispatchState]:
    """Returns the rows that this rank's experts work on, their sizes, and a state.

    To be called by every rank of `axis_name` inside `jax.shard_map`. Rank r owns the
    experts ``[r * L, (r + 1) * L)``, ``L = num_experts / num_ranks``. A token gets one
    row for each different expert that it chose; rows are ordered by (local expert,
    token's rank, token).

    Args:
      tokens: ``[num_tokens, hidden]``, this rank's, of any dtype of whole bytes;
        `num_tokens` may be 0, and is the same on all ranks. Or a tuple or dict of them,
        whose `hidden` and dtypes may differ (fp8 values and their scales, say):
        they travel in one exchange.
      expert_ids: ``int32[num_tokens, top_k]``. An id outside ``[0, num_experts)``
        masks its choice. An expert that a token names twice works once and counts
        with both weights.
      weights: ``float[num_tokens, top_k]``, applied by `combine` and only there.
      num_experts: experts of all ranks together, a multiple of their number. Static.
      axis_name: mesh axis of the ranks, or a tuple of axes, major first. Static.
      recv_capacity: rows that this rank can receive. Static. By default as many as
        could ever come, ``num_ranks * num_tokens * min(top_k, L)``. If more are wanted
        than fit, the fullest local experts are cut to a common size, each keeping its
        first rows; what is dropped contributes exactly zero, forward and backward, and
        `DispatchState.overflow` tells.
      expert_capacity: pad every local expert to this many rows instead, for a batched
        matmul; each keeps its first rows. Static.
      schedule: how bytes travel, ``"auto"``, ``"packed"``, ``"broadcast"``,
        ``"direct"`` or ``"relay"``. Never changes a result. Static.
      explain: print, when traced, which schedule was taken, the modelled times of
        those there were, and where their figures come from. The log ``jax_turbobus``
        (INFO) has it anyway.
      valid: ``bool[num_tokens]``; False masks all choices of a token.

    Returns:
      ``rows``: ``[recv_capacity, hidden]``, or with `expert_capacity`
      ``[L, expert_capacity, hidden]``; rows that belong to no token are zero; a tree of
      those for a tree of tokens.
      ``group_sizes``: ``int32[L]``, rows of each local expert, for
      `jax.lax.ragged_dot`. ``state``: for `combine`.

    Raises:
      TypeError: a dtype or a static size is of the wrong kind.
      ValueError: shapes, sizes, axis or schedule that cannot be; the message says what
        was expected, what came and what to do.

    Transforms:
      jit, shard_map (``check_vma`` too), grad in `tokens` (and through the state in
      `weights`), vmap (a batch meets as one call), scan, remat. Reverse mode, any
      number of times.

    Source: DESIGN, "Expert exchange"; ThunderEP's filtering and packing.
    """
    static = {
        "num_experts": num_experts,
        "axis_name": axis_name,
        "recv_capacity": recv_capacity,
        "expert_capacity": expert_capacity,
        "schedule": schedule,
        "explain": explain,
    }
    if isinstance(tokens, tuple | dict):
        return _dispatch_tree(tokens, expert_ids, weights, valid, static)
    operands = prepared("dispatch", tokens, expert_ids, weights, valid, **static)
    return received(operands, _linear.send(operands.routing, *operands.sent))


def _dispatch_tree(
    tokens: Any,
    expert_ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array | None,
    static: dict[str, Any],
) -> tuple[Any, jax.Array, DispatchState]:
    """Returns what `dispatch` does, for a tree of arrays.

    Raises:
      ValueError: the tree has no array, or as `dispatch`.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(tokens)
    if not paths:
        raise ValueError("dispatch: tokens: expected at least one array, got none")
    for path, x in paths:
        name = "tokens" + jax.tree_util.keystr(path)
        _routing.check_arrays(
            "dispatch", x, expert_ids, weights, valid, name_of_tokens=name
        )
    parts = [x for _, x in paths]
    routing = _routing.routing_of(
        "dispatch",
        num_tokens=expert_ids.shape[0],
        hidden=_payload.row_bytes(parts),
        top_k=expert_ids.shape[1],
        dtype=jnp.uint8,
        **static,
    )
    if valid is not None:
        expert_ids = jnp.where(valid[:, None], expert_ids, -1)
    expert_ids, weights, *parts = _matching.vary_alike(
        routing.group, (expert_ids, weights, *parts)
    )
    rows, *plan = _payload.send(routing, tuple(parts), expert_ids)
    state = _state_of(routing, expert_ids, weights, plan)
    shaped = [r.reshape(*routing.rows_shape, r.shape[-1]) for r in rows]
    return jax.tree.unflatten(tree, shaped), state.group_sizes, state


def _state_of(
    routing: Routing, expert_ids: jax.Array, weights: jax.Array, plan: Any
) -> DispatchState:
    group_sizes, wanted, slots = plan
    return DispatchState(
        expert_ids=expert_ids,
        weights=weights,
        slots=slots,
        group_sizes=group_sizes,
        wanted=wanted,
        routing=routing,
    )


class Operands(NamedTuple):
    """Checked operands of a dispatch, which vary over the same mesh axes."""

    routing: Routing
    tokens: jax.Array
    expert_ids: jax.Array
    weights: jax.Array

    @property
    def sent(self) -> tuple[jax.Array, jax.Array]:
        """What the exchange itself takes."""
        return self.tokens, self.expert_ids


def prepared(
    op: str,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array | None,
    **static: Any,
) -> Operands:
    """Returns the operands of `dispatch`, or raises what it raises, as `op`."""
    _routing.check_arrays(op, tokens, expert_ids, weights, valid)
    routing = _routing.routing_of(
        op,
        num_tokens=tokens.shape[0],
        hidden=tokens.shape[1],
        top_k=expert_ids.shape[1],
        dtype=tokens.dtype,
        **static,
    )
    if valid is not None:
        expert_ids = jnp.where(valid[:, None], expert_ids, -1)
    # Before the custom VJP: the transpose of this is the sum over the axes on which
    # an operand was the same.
    alike = _matching.vary_alike(routing.group, (tokens, expert_ids, weights))
    return Operands(routing, *alike)


def received(
    operands: Operands, results: Any
) -> tuple[jax.Array, jax.Array, DispatchState]:
    """Returns what `dispatch` does, of the exchange's results."""
    routing, tokens, expert_ids, weights = operands
    rows, *plan = results
    state = _state_of(routing, expert_ids, weights, plan)
    rows = rows.reshape(*routing.rows_shape, tokens.shape[1])
    return rows, state.group_sizes, state
