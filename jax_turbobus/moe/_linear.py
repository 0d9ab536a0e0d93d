"""The exchanges as functions that can be differentiated, any number of times.

Each is linear in every one of its floating operands, so each one's derivative is made
of the others: what `send` spreads `send_grad` adds up, and what `bring` adds up under
weights `bring_grad` spreads.

The rank is an operand of each, made outside: JAX moves what a loop does not change out
of the body of a custom VJP too, as a constant that its second derivative loses (in jax
0.10.2 to 0.12.0).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_turbobus.moe import _exchange, _matching
from jax_turbobus.moe._routing import Routing

__all__ = [
    "as_summable",
    "bring",
    "bring_grad_transposed",
    "send",
    "send_grad",
    "sum_restored",
    "with_rank",
]


def send(routing: Routing, tokens: jax.Array, expert_ids: jax.Array) -> Any:
    """Returns ``rows [num_rows, hidden], group_sizes, wanted, slots``."""
    return _send(routing, *with_rank(routing, tokens, expert_ids))


def bring(
    routing: Routing,
    rows: jax.Array,
    weights: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    """Returns ``[num_tokens, hidden]``: each token's rows, weighted and added up."""
    operands = (rows, weights, expert_ids, slots, group_sizes)
    return _bring(routing, *with_rank(routing, *operands))


def with_rank(routing: Routing, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the rank and the operands, all of which vary over the same axes."""
    alike = _matching.vary_alike(routing.group, operands)
    return _matching.rank_of(routing.group, like=alike[0]), *alike


def as_summable(rows: jax.Array) -> jax.Array:
    """Returns rows of a dtype that exchanges add up.

    Complex ones become real parts and, behind them, imaginary ones; what else cannot be
    added up becomes float32.

    Args:
      rows: ``[num_rows, hidden]``.
    """
    if jnp.issubdtype(rows.dtype, jnp.complexfloating):
        return jnp.concatenate([rows.real, rows.imag], -1)
    return rows if rows.dtype.name in _exchange.SUMMABLE else rows.astype(jnp.float32)


def sum_restored(sums: jax.Array, dtype: Any) -> jax.Array:
    """Returns sums of rows that `as_summable` changed, in the rows' own dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*jnp.split(sums, 2, -1))
    return sums.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(
    routing: Routing, rank: jax.Array, tokens: jax.Array, expert_ids: jax.Array
) -> Any:
    return _exchange.send(routing, rank, tokens, expert_ids)


def _send_forward(routing: Routing, *operands: jax.Array) -> Any:
    results = _send(routing, *operands)
    return results, (operands[-1], results[-1])


def _send_backward(routing: Routing, residuals: Any, cotangents: Any) -> Any:
    return None, send_grad(routing, cotangents[0], *residuals), None


def send_grad(
    routing: Routing, row_grads: jax.Array, expert_ids: jax.Array, slots: jax.Array
) -> jax.Array:
    """Returns ``[num_tokens, hidden]``: each token's row gradients, added up."""
    operands = (as_summable(row_grads), expert_ids, slots)
    sums = _send_grad(routing, *with_rank(routing, *operands))
    return sum_restored(sums, row_grads.dtype)


_send.defvjp(_send_forward, _send_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send_grad(
    routing: Routing,
    rank: jax.Array,
    row_grads: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    return _exchange.send_grad(routing, rank, row_grads, expert_ids, slots)


def _send_grad_forward(
    routing: Routing,
    rank: jax.Array,
    row_grads: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
) -> Any:
    return _send_grad(routing, rank, row_grads, expert_ids, slots), expert_ids


def _send_grad_backward(
    routing: Routing, expert_ids: jax.Array, cotangent: jax.Array
) -> Any:
    return None, send(routing, cotangent, expert_ids)[0], None, None


_send_grad.defvjp(_send_grad_forward, _send_grad_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bring(
    routing: Routing,
    rank: jax.Array,
    rows: jax.Array,
    weights: jax.Array,
    expert_ids: jax.Array,
    slots: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    del group_sizes  # Of the gradient's padding.
    return _exchange.bring(routing, rank, rows, weights, expert_ids, slots)


def _bring_forward(routing: Routing, rank: jax.Array, *operands: jax.Array) -> Any:
    return _bring(routing, rank, *operands), operands


def _bring_backward(routing: Routing, residuals: Any, sum_grads: jax.Array) -> Any:
    row_grads, weight_grads = _bring_grad(
        routing, *with_rank(routing, sum_grads, *residuals)
    )
    return None, row_grads, weight_grads, None, None, None


_bring.defvjp(_bring_forward, _bring_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bring_grad(
    routing: Routing,
    rank: jax.Array,
    sum_grads: jax.Array,
    rows: jax.Array,
    *others: jax.Array,
) -> Any:
    """Returns ``weights * sum_grads`` by row, and ``rows . sum_grads`` by choice."""
    return _exchange.bring_grad(routing, rank, sum_grads, rows, *others)


def _bring_grad_forward(routing: Routing, rank: jax.Array, *operands: jax.Array) -> Any:
    return _bring_grad(routing, rank, *operands), operands


def _bring_grad_backward(routing: Routing, residuals: Any, cotangents: Any) -> Any:
    return None, *bring_grad_transposed(routing, residuals, cotangents)


def bring_grad_transposed(
    routing: Routing, operands: Any, cotangents: Any
) -> tuple[Any, ...]:
    """Returns the cotangents of the operands of `bring`'s gradient.

    Args:
      routing: of the exchange.
      operands: ``sum_grads, rows, weights, expert_ids, slots, group_sizes``.
      cotangents: of the gradients in ``rows`` and ``weights``.
    """
    sum_grads, rows, weights, *plan = operands
    of_rows, of_weights = cotangents
    sum_grads_grad = bring(routing, of_rows, weights, *plan) + bring(
        routing, rows, of_weights, *plan
    )
    rows_grad, weights_grad = _bring_grad(
        routing, *with_rank(routing, sum_grads, of_rows, of_weights, *plan)
    )
    return sum_grads_grad, rows_grad, weights_grad, None, None, None


_bring_grad.defvjp(_bring_grad_forward, _bring_grad_backward)
