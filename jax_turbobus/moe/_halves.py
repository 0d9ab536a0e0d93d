"""Exchanges in two halves that can be differentiated: a start, and its finish.

Between the halves stand computations that the exchange runs beside. What passes from a
start to its finish is a `Handle`: what is linear in the exchange and what comes of
it, none of which may be touched. Each half's derivative is the other half of the
transposed exchange: what was started last forwards is started first backwards, and
overlaps the same computation. In a handle's cotangent what the forward exchange reads
and what it writes have changed places.

What a gradient reads beside that must stay until it is finished, too, and can come
there in a cotangent only. So a dispatch carries a blank, whose cotangent is its
slots, as the bits of floats.

Derivatives of derivatives are right, but their exchanges are whole (`_linear`). So are
all under `vmap`: it sums cotangents, and copies operands that are mapped otherwise.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_turbobus.moe import _exchange, _in_flight, _linear
from jax_turbobus.moe._routing import Routing

__all__ = ["Handle", "finish_bring", "finish_send", "start_bring", "start_send"]


class Handle(NamedTuple):
    """An exchange under way.

    Attributes:
      linear: operands that it is linear in, and results that are linear in them.
      others: its other results; None in a cotangent.
    """

    linear: tuple[jax.Array, ...]
    others: tuple[jax.Array | None, ...] = ()


def _finish(routing: Routing, results: Any, read: Any) -> list[jax.Array]:
    return _in_flight.finish(results, read, routing.group.axes)


def _zeros(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.zeros_like, arrays))


# Send: linear = (tokens, rows, blank), others = (group_sizes, wanted, slots).


def start_send(
    routing: Routing, tokens: jax.Array, expert_ids: jax.Array, early: jax.Array
) -> Handle:
    """Returns a dispatch under way; see `_linear.send`.

    Args:
      routing: of the exchange.
      tokens: ``[num_tokens, hidden]``.
      expert_ids: ``int32[num_tokens, top_k]``.
      early: what `_exchange.count` returned for the ids.
    """
    operands = (tokens, expert_ids, early)
    return _start_send(routing, *_linear.with_rank(routing, *operands))


def finish_send(
    routing: Routing, handle: Handle, expert_ids: jax.Array, early: jax.Array
) -> Any:
    """Returns ``rows, group_sizes, wanted, slots``.

    Args:
      routing: of the exchange.
      handle: of its start.
      expert_ids: as for `start_send`, the same array.
      early: the same, too.
    """
    return _finish_send(routing, handle, expert_ids, early)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _start_send(
    routing: Routing,
    rank: jax.Array,
    tokens: jax.Array,
    expert_ids: jax.Array,
    early: jax.Array,
) -> Handle:
    rows, *others = _exchange.send(routing, rank, tokens, expert_ids, early)
    return Handle((tokens, rows, _in_flight.blank(others[-1])), tuple(others))


def _start_send_forward(routing: Routing, *operands: jax.Array) -> Any:
    handle = _start_send(routing, *operands)
    return handle, operands[2]


def _start_send_backward(
    routing: Routing, expert_ids: jax.Array, cotangent: Handle
) -> Any:
    sums = _finish_send_grad(routing, Handle(cotangent.linear), expert_ids)
    return None, sums, None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finish_send(
    routing: Routing, handle: Handle, expert_ids: jax.Array, early: jax.Array
) -> Any:
    tokens, rows, _ = handle.linear
    results = (rows, *handle.others)
    return tuple(_finish(routing, results, (tokens, expert_ids, early)))


def _finish_send_forward(
    routing: Routing, handle: Handle, expert_ids: jax.Array, early: jax.Array
) -> Any:
    results = _finish_send(routing, handle, expert_ids, early)
    return results, (expert_ids, results[-1])


def _finish_send_backward(routing: Routing, residuals: Any, cotangents: Any) -> Any:
    expert_ids, slots = residuals
    bits = lax.bitcast_convert_type(slots, jnp.float32)
    operands = _linear.with_rank(routing, cotangents[0], expert_ids, bits)
    handle = _start_send_grad(routing, *operands)
    return handle._replace(others=(None,) * 3), None, None


_start_send.defvjp(_start_send_forward, _start_send_backward)
_finish_send.defvjp(_finish_send_forward, _finish_send_backward)


# Its transpose: linear = (token_grads, row_grads, slots), the slots as floats.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _start_send_grad(
    routing: Routing,
    rank: jax.Array,
    row_grads: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
) -> Handle:
    sums = _exchange.send_grad(
        routing, rank, row_grads, expert_ids, slots, is_start=True
    )
    return Handle((sums, row_grads, slots))


def _start_send_grad_forward(routing: Routing, *operands: jax.Array) -> Any:
    return _start_send_grad(routing, *operands), operands[2]


def _start_send_grad_backward(
    routing: Routing, expert_ids: jax.Array, cotangent: Handle
) -> Any:
    of_sums, of_rows, _ = cotangent.linear
    rows = _linear.send(routing, of_sums, expert_ids)[0]
    return None, of_rows + rows, None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finish_send_grad(
    routing: Routing, handle: Handle, expert_ids: jax.Array
) -> jax.Array:
    sums, *read = handle.linear
    (sums,) = _finish(routing, (sums,), (*read, expert_ids))
    return sums


def _finish_send_grad_forward(
    routing: Routing, handle: Handle, expert_ids: jax.Array
) -> Any:
    return _finish_send_grad(routing, handle, expert_ids), handle.linear[1:]


def _finish_send_grad_backward(
    routing: Routing, read: Any, cotangent: jax.Array
) -> Any:
    del routing
    return Handle((cotangent, *_zeros(*read))), None


_start_send_grad.defvjp(_start_send_grad_forward, _start_send_grad_backward)
_finish_send_grad.defvjp(_finish_send_grad_forward, _finish_send_grad_backward)


# Bring: linear = (rows, weights, sums).


def start_bring(
    routing: Routing,
    rows: jax.Array,
    weights: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    group_sizes: jax.Array,
) -> Handle:
    """Returns a combine under way; see `_linear.bring`."""
    operands = (rows, weights, expert_ids, slots, group_sizes)
    return _start_bring(routing, *_linear.with_rank(routing, *operands))


def finish_bring(routing: Routing, handle: Handle, *operands: jax.Array) -> jax.Array:
    """Returns ``[num_tokens, hidden]``: the sums of the combine.

    Args:
      routing: of the exchange.
      handle: of its start.
      operands: those of `start_bring`, the same arrays.
    """
    return _finish_bring(routing, handle, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _start_bring(
    routing: Routing,
    rank: jax.Array,
    rows: jax.Array,
    weights: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    group_sizes: jax.Array,
) -> Handle:
    del group_sizes  # Of the gradient's padding.
    sums = _exchange.bring(
        routing, rank, rows, weights, expert_ids, slots, is_start=True
    )
    return Handle((rows, weights, sums))


def _start_bring_forward(routing: Routing, rank: jax.Array, *operands: Any) -> Any:
    return _start_bring(routing, rank, *operands), operands


def _start_bring_backward(routing: Routing, residuals: Any, cotangent: Handle) -> Any:
    grads = _finish_bring_grad(routing, cotangent, *residuals)
    return None, *grads, None, None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finish_bring(routing: Routing, handle: Handle, *operands: jax.Array) -> jax.Array:
    *in_order, sums = handle.linear
    (sums,) = _finish(routing, (sums,), (*in_order, *operands[2:-1]))
    return sums


def _finish_bring_forward(
    routing: Routing, handle: Handle, *operands: jax.Array
) -> Any:
    # The gradient's start has to read the arrays that its finish keeps, which are
    # residuals of this start. Those in the handle have been put in order since:
    # to JAX they are others, of which a loop makes copies, and whose own gradients
    # would be added to what is under way.
    return _finish_bring(routing, handle, *operands), operands


def _finish_bring_backward(
    routing: Routing, residuals: Any, sum_grads: jax.Array
) -> Any:
    operands = _linear.with_rank(routing, sum_grads, *residuals)
    return _start_bring_grad(routing, *operands), *(None for _ in residuals)


_start_bring.defvjp(_start_bring_forward, _start_bring_backward)
_finish_bring.defvjp(_finish_bring_forward, _finish_bring_backward)


# Its gradient: linear = (row_grads, weight_grads, sum_grads).


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _start_bring_grad(
    routing: Routing,
    rank: jax.Array,
    sum_grads: jax.Array,
    rows: jax.Array,
    weights: jax.Array,
    *plan: jax.Array,
) -> Handle:
    grads = _exchange.bring_grad(
        routing, rank, sum_grads, rows, weights, *plan, is_start=True
    )
    return Handle((*grads, sum_grads))


def _start_bring_grad_forward(routing: Routing, rank: jax.Array, *operands: Any) -> Any:
    return _start_bring_grad(routing, rank, *operands), operands


def _start_bring_grad_backward(
    routing: Routing, operands: Any, cotangent: Handle
) -> Any:
    *of_grads, of_sums = cotangent.linear
    grads = _linear.bring_grad_transposed(routing, operands, of_grads)
    return None, grads[0] + of_sums, *grads[1:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finish_bring_grad(
    routing: Routing, handle: Handle, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    *grads, sum_grads = handle.linear
    row_grads, weight_grads = _finish(routing, grads, (sum_grads, *operands))
    return row_grads, weight_grads


def _finish_bring_grad_forward(
    routing: Routing, handle: Handle, *operands: jax.Array
) -> Any:
    grads = _finish_bring_grad(routing, handle, *operands)
    return grads, (handle.linear[-1], operands)


def _finish_bring_grad_backward(
    routing: Routing, residuals: Any, cotangents: Any
) -> Any:
    del routing
    sum_grads, operands = residuals
    return Handle((*cotangents, *_zeros(sum_grads))), *(None for _ in operands)


_start_bring_grad.defvjp(_start_bring_grad_forward, _start_bring_grad_backward)
_finish_bring_grad.defvjp(_finish_bring_grad_forward, _finish_bring_grad_backward)
