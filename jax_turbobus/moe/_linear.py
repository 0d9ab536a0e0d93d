"""The exchanges as functions that can be differentiated, any number of times.

Each is linear in every one of its floating operands, so each one's derivative is made
of the others: what `send` spreads `send_grad` adds up, and what `bring` adds up under
weights `bring_grad` spreads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_turbobus.moe import _exchange
from jax_turbobus.moe._routing import Routing

__all__ = ["bring", "send"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def send(routing: Routing, tokens: jax.Array, expert_ids: jax.Array) -> Any:
    """Returns ``rows [num_rows, hidden], group_sizes, wanted, slots``."""
    return _exchange.send(routing, tokens, expert_ids)


def _send_forward(routing: Routing, tokens: jax.Array, expert_ids: jax.Array) -> Any:
    results = send(routing, tokens, expert_ids)
    return results, (expert_ids, results[-1])


def _send_backward(routing: Routing, residuals: Any, cotangents: Any) -> Any:
    expert_ids, slots = residuals
    row_grads = cotangents[0]
    dtype = row_grads.dtype
    if dtype.name not in _exchange.SUMMABLE:
        row_grads = row_grads.astype(jnp.float32)
    return _send_grad(routing, row_grads, expert_ids, slots).astype(dtype), None


send.defvjp(_send_forward, _send_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send_grad(
    routing: Routing, row_grads: jax.Array, expert_ids: jax.Array, slots: jax.Array
) -> jax.Array:
    return _exchange.send_grad(routing, row_grads, expert_ids, slots)


def _send_grad_forward(
    routing: Routing, row_grads: jax.Array, expert_ids: jax.Array, slots: jax.Array
) -> Any:
    return _send_grad(routing, row_grads, expert_ids, slots), expert_ids


def _send_grad_backward(
    routing: Routing, expert_ids: jax.Array, cotangent: jax.Array
) -> Any:
    return send(routing, cotangent, expert_ids)[0], None, None


_send_grad.defvjp(_send_grad_forward, _send_grad_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def bring(
    routing: Routing,
    rows: jax.Array,
    weights: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    """Returns ``[num_tokens, hidden]``: each token's rows, weighted and added up."""
    del group_sizes  # Of the gradient's padding.
    return _exchange.bring(routing, rows, weights, expert_ids, slots)


def _bring_forward(routing: Routing, *operands: jax.Array) -> Any:
    return bring(routing, *operands), operands


def _bring_backward(routing: Routing, residuals: Any, sum_grads: jax.Array) -> Any:
    row_grads, weight_grads = _bring_grad(routing, sum_grads, *residuals)
    return row_grads, weight_grads, None, None, None


bring.defvjp(_bring_forward, _bring_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bring_grad(
    routing: Routing, sum_grads: jax.Array, rows: jax.Array, *others: jax.Array
) -> Any:
    """Returns ``weights * sum_grads`` by row, and ``rows . sum_grads`` by choice."""
    return _exchange.bring_grad(routing, sum_grads, rows, *others)


def _bring_grad_forward(routing: Routing, *operands: jax.Array) -> Any:
    return _bring_grad(routing, *operands), operands


def _bring_grad_backward(routing: Routing, residuals: Any, cotangents: Any) -> Any:
    sum_grads, rows, weights, *plan = residuals
    of_rows, of_weights = cotangents
    sum_grads_grad = bring(routing, of_rows, weights, *plan) + bring(
        routing, rows, of_weights, *plan
    )
    rows_grad, weights_grad = _bring_grad(
        routing, sum_grads, of_rows, of_weights, *plan
    )
    return sum_grads_grad, rows_grad, weights_grad, None, None, None


_bring_grad.defvjp(_bring_grad_forward, _bring_grad_backward)
