"""Several arrays of one token in one exchange, as fp8 rows and their scales."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_turbobus.moe import _linear
from jax_turbobus.moe._routing import Routing

__all__ = ["row_bytes", "send"]


def row_bytes(parts: Sequence[jax.Array]) -> int:
    """Returns the bytes of a token, of ``[num_tokens, n]`` parts."""
    return sum(x.shape[1] * x.dtype.itemsize for x in parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def send(routing: Routing, parts: tuple[jax.Array, ...], expert_ids: jax.Array) -> Any:
    """Returns ``rows, group_sizes, wanted, slots``, rows as a tuple like `parts`.

    Args:
      routing: of rows of ``uint8[row_bytes(parts)]``.
      parts: ``[num_tokens, n]`` each, of any dtypes of whole bytes.
      expert_ids: ``int32[num_tokens, top_k]``.
    """
    packed = jnp.concatenate([_as_bytes(x) for x in parts], axis=1)
    rows, *plan = _linear.send(routing, packed, expert_ids)
    ends = itertools.accumulate(x.shape[1] * x.dtype.itemsize for x in parts)
    columns = jnp.split(rows, list(ends)[:-1], axis=1)
    return tuple(map(_from_bytes, columns, parts)), *plan


def _as_bytes(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits: jax.Array = lax.bitcast_convert_type(x, jnp.uint8)
    return bits.reshape(x.shape[0], -1)


def _from_bytes(rows: jax.Array, like: jax.Array) -> jax.Array:
    num_rows, dtype = rows.shape[0], like.dtype
    if dtype == jnp.bool_:
        return rows.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real = jnp.zeros((), dtype).real.dtype
        parts = _from_bits(rows.reshape(num_rows, like.shape[1], 2, -1), real)
        return lax.complex(parts[..., 0], parts[..., 1])
    return _from_bits(rows.reshape(num_rows, like.shape[1], -1), dtype)


def _from_bits(bytes_: jax.Array, dtype: Any) -> jax.Array:
    if jnp.dtype(dtype).itemsize == 1:
        bytes_ = bytes_[..., 0]
    values: jax.Array = lax.bitcast_convert_type(bytes_, dtype)
    return values


def _forward(
    routing: Routing, parts: tuple[jax.Array, ...], expert_ids: jax.Array
) -> Any:
    results = send(routing, parts, expert_ids)
    return results, (expert_ids, results[-1])


def _backward(routing: Routing, residuals: Any, cotangents: Any) -> Any:
    grads = (
        _linear.send_grad(routing, g, *residuals) if _is_inexact(g) else None
        for g in cotangents[0]
    )
    return tuple(grads), None


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


send.defvjp(_forward, _backward)
