"""The four exchanges as primitives, bound for one call of all ranks.

With `is_start`, `_in_flight.finish` must get all results and all that was read.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_turbobus import _ffi
from jax_turbobus.moe import _devices, _in_flight, _matching, _primitives
from jax_turbobus.moe._routing import Routing

__all__ = [
    "SUMMABLE",
    "bring",
    "bring_grad",
    "count",
    "is_empty",
    "send",
    "send_grad",
    "weight_dtype",
]

# Dtypes that the C++ core adds rows in; others are converted to float32 and back.
SUMMABLE = ("float32", "float64", "bfloat16", "float16")


def weight_dtype(dtype: Any) -> Any:
    """Returns the dtype in which sums of rows of `dtype` accumulate."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _sized(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _send_avals(tokens: Any, expert_ids: Any, *_: Any, **params: Any) -> Any:
    batch, hidden = tokens.shape[:-2], tokens.shape[-1]
    experts = _sized((*batch, params["num_local_experts"]), jnp.int32)
    rows = _sized((*batch, params["num_rows"], hidden), tokens.dtype)
    return rows, experts, experts, _sized(expert_ids.shape, jnp.int32)


def _bring_avals(rows: Any, expert_ids: Any, *_: Any, **params: Any) -> Any:
    del params
    return (_sized((*expert_ids.shape[:-1], rows.shape[-1]), rows.dtype),)


def _bring_grad_avals(
    grads: Any, rows: Any, ids: Any, slots: Any, weights: Any, *_: Any, **params: Any
) -> Any:
    del grads, ids, slots, params
    return _sized(rows.shape, rows.dtype), _sized(weights.shape, weights.dtype)


# The sizes of results are parameters of the primitives only: a handler reads them off
# its results and operands.
_SIZES = ("num_rows", "num_local_experts", "top_k")


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """An exchange, whole and as a start, and the avals of its results."""

    whole: Any
    start: Any
    out_avals: Callable[..., Any]

    @classmethod
    def define(
        cls, name: str, out_avals: Callable[..., Any], **of_start: Any
    ) -> "_Exchange":
        common: Any = {"out_avals": out_avals, "not_attributes": _SIZES}
        whole = _primitives.exchange_primitive(name, **common)
        start = _primitives.start_primitive(name, whole, **of_start, **common)
        return cls(whole, start, out_avals)


# The start takes what counting it early has returned, too.
_send = _Exchange.define("dispatch", _send_avals, num_extra=1)
# The start takes its slots, the last of its data, as the bits of floats (`_halves`).
_send_grad = _Exchange.define("dispatch_grad", _bring_avals, int_bits=(2,))
_bring = _Exchange.define("combine", _bring_avals)
_bring_grad = _Exchange.define("combine_grad", _bring_grad_avals)


# Rows of fewer bytes come from the same call as their plan, which meets only once.
_LARGE_BYTES = 1 << 20

# The second meeting's key: the first one's with the words of the key proper flipped.
_FLIP_KEY = np.array([-1, -1, 0, 0], np.int32)


def _send_in_two(
    keys: jax.Array,
    rank: jax.Array,
    tokens: jax.Array,
    expert_ids: jax.Array,
    *,
    num_rows: int,
    num_local_experts: int,
    **attributes: Any,
) -> Any:
    """Returns what `_send` does, through a call for the plan and one for the rows.

    XLA on CPU devices lets an elementwise consumer write over the result of a call, but
    never over a part of a tuple: with rows in a call of their own, experts that begin
    or end so need no second buffer of fresh pages.
    """
    avals = _send_avals(
        tokens, expert_ids, num_rows=num_rows, num_local_experts=num_local_experts
    )
    plan: Any = jax.ffi.ffi_call("turbobus_moe_dispatch_plan", avals[1:])
    group_sizes, wanted, slots = plan(
        keys, rank, expert_ids, num_rows=np.int64(num_rows), **attributes
    )
    move: Any = jax.ffi.ffi_call("turbobus_moe_dispatch_rows", avals[0])
    rows = move(
        keys ^ _FLIP_KEY, rank, tokens, expert_ids, slots, group_sizes, **attributes
    )
    return rows, group_sizes, wanted, slots


def _lower_send_cpu(ctx: Any, *operands: Any, **params: Any) -> Any:
    rows = ctx.avals_out[0]
    reason = _devices.why_apart(ctx, params["axes"])
    if reason is not None:
        return _primitives.lower_to_collectives(
            "dispatch", ctx, operands, params, reason
        )
    if rows.size * rows.dtype.itemsize < _LARGE_BYTES:
        return _primitives.lower_to_target("dispatch", ctx, operands, params, _SIZES)
    _ffi.register()
    attributes = {k: v for k, v in params.items() if k not in ("axes", "top_k")}
    return mlir.lower_fun(_send_in_two)(ctx, *operands, **attributes)


mlir.register_lowering(_send.whole, _lower_send_cpu, platform="cpu")


def is_empty(routing: Routing, rows: jax.Array, expert_ids: jax.Array) -> bool:
    """Returns whether nothing can move: rows of nothing, or no choice, or no room."""
    return 0 in (expert_ids.size, routing.num_rows, rows.shape[-1])


def _bind(
    exchange: _Exchange,
    routing: Routing,
    rank: jax.Array,
    *operands: jax.Array,
    expert_ids: jax.Array,
    is_start: bool,
) -> Any:
    """Returns the results of an exchange.

    Where there is no choice nothing is exchanged and all results are zero. A key there
    would be a call with a side effect in a program without arguments: XLA takes empty
    ones for constants, and does not compile that. Nor does it compile, in JAX 0.11,
    some calls for empty rows; of those only `send` has a result, its plan.
    """
    params = {
        "num_rows": routing.num_rows,
        "num_local_experts": routing.num_local_experts,
        "top_k": expert_ids.shape[-1],
    }
    has_result = exchange is _send and expert_ids.size != 0
    if is_empty(routing, operands[0], expert_ids) and not has_result:
        avals = exchange.out_avals(*operands, **params)
        nothing = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        return _matching.vary_alike(routing.group, (rank, *nothing))[1:]
    primitive = exchange.start if is_start else exchange.whole
    return primitive.bind(
        _matching.keys_of(routing.group, operands),
        rank,
        *operands,
        axes=routing.group.axes,
        **params,
        **routing.attributes,
    )


def send(
    routing: Routing,
    rank: jax.Array,
    tokens: jax.Array,
    expert_ids: jax.Array,
    *early: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns ``rows [num_rows, hidden], group_sizes, wanted, slots``.

    Args:
      routing: of the exchange.
      rank: that runs this.
      tokens: ``[num_tokens, hidden]``.
      expert_ids: ``int32[num_tokens, top_k]``.
      early: for a start: what `count` returned for the ids.
    """
    rows, group_sizes, wanted, slots = _bind(
        _send,
        routing,
        rank,
        tokens,
        expert_ids,
        *early,
        expert_ids=expert_ids,
        is_start=bool(early),
    )
    return rows, group_sizes, wanted, slots


def count(
    routing: Routing, ids: Sequence[jax.Array], row_bytes: int
) -> list[jax.Array]:
    """Returns what starts of dispatches take beside tokens and ids.

    Args:
      routing: of each of them.
      ids: ``int32[num_tokens, top_k]`` each.
      row_bytes: of a token.
    """
    return _in_flight.count(
        ids,
        routing.group.axes,
        num_rows=np.int64(routing.num_rows),
        row_bytes=np.int64(row_bytes),
        **routing.attributes,
    )


def send_grad(
    routing: Routing,
    rank: jax.Array,
    row_grads: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    *,
    is_start: bool = False,
) -> jax.Array:
    """Returns ``[num_tokens, hidden]``: each token's row gradients, added up."""
    (sums,) = _bind(
        _send_grad,
        routing,
        rank,
        row_grads,
        expert_ids,
        slots,
        expert_ids=expert_ids,
        is_start=is_start,
    )
    return sums  # type: ignore[no-any-return]


def bring(
    routing: Routing,
    rank: jax.Array,
    rows: jax.Array,
    weights: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    *,
    is_start: bool = False,
) -> jax.Array:
    """Returns ``[num_tokens, hidden]``: each token's rows, weighted and added up."""
    (sums,) = _bind(
        _bring,
        routing,
        rank,
        rows,
        expert_ids,
        slots,
        weights,
        expert_ids=expert_ids,
        is_start=is_start,
    )
    return sums  # type: ignore[no-any-return]


def bring_grad(
    routing: Routing,
    rank: jax.Array,
    sum_grads: jax.Array,
    rows: jax.Array,
    weights: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    group_sizes: jax.Array,
    *,
    is_start: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of `bring` in its rows and weights."""
    row_grads, weight_grads = _bind(
        _bring_grad,
        routing,
        rank,
        sum_grads,
        rows,
        expert_ids,
        slots,
        weights,
        group_sizes,
        expert_ids=expert_ids,
        is_start=is_start,
    )
    return row_grads, weight_grads
