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
    return sum(map(_part_bytes, parts))


def _part_bytes(x: jax.Array) -> int:
    return int(x.shape[1] * x.dtype.itemsize)


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
    ends = itertools.accumulate(map(_part_bytes, parts))
    columns = jnp.split(rows, list(ends)[:-1], axis=1)
    return tuple(map(_from_bytes, columns, parts)), *plan


def _as_bytes(x: jax.Array) -> jax.Array:
    shape = x.shape[0], _part_bytes(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits: jax.Array = lax.bitcast_convert_type(x, jnp.uint8)
    return bits.reshape(shape)


def _from_bytes(rows: jax.Array, like: jax.Array) -> jax.Array:
    shape, dtype = (rows.shape[0], like.shape[1]), like.dtype
    if dtype == jnp.bool_:
        return rows.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _from_bits(rows, (*shape, 2), jnp.zeros((), dtype).real.dtype)
        return lax.complex(parts[..., 0], parts[..., 1])
    return _from_bits(rows, shape, dtype)


def _from_bits(rows: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    bits = rows.reshape(shape if size == 1 else (*shape, size))
    values: jax.Array = lax.bitcast_convert_type(bits, dtype)
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
