"""The primitive under `ragged_all_to_all`, linear in its rows, and its transpose.

What they become on each platform is in `_ragged_lowering`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_turbobus import _compat
from jax_turbobus.moe import _ragged_lowering
from jax_turbobus.moe import _ragged_reference as reference
from jax_turbobus.moe._ragged_reference import Groups

__all__ = ["exchange"]

# What the handlers can add up; other floating-point rows are summed as float32.
_SUMMABLE = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")

# operand [batches, operand_rows, ...], output [batches, output_rows, ...],
# table int32[1 or batches, 4, num_slices] -> like output.
_exchange_p = Primitive("ragged_all_to_all")

# The transpose in the operand:
# cotangent [batches, output_rows, ...], table -> [batches, num_rows, ...].
_collect_p = Primitive("ragged_all_to_all_transpose")


def exchange(
    operand: jax.Array,
    output: jax.Array,
    table: jax.Array,
    *,
    axes: tuple[Any, ...],
    groups: Groups,
) -> jax.Array:
    """Returns what the caller receives, over `output`.

    Args:
      operand: ``[operand_rows, ...]``, of whole-byte elements.
      output: ``[output_rows, ...]``, same dtype and row shape.
      table: ``int32[4, num_slices]``: input offsets, send sizes, output offsets and
        receive sizes of the caller.
      axes: axes of the enclosing `jax.shard_map`.
      groups: which indices along them exchange with each other.
    """
    args = (operand, output, table)
    varying = frozenset(axes).union(*map(_compat.varying_axes, args))
    operand, output, table = (_vary(x, varying)[None] for x in args)
    if operand.size == 0 or output.size == 0:
        # Nothing can move; and XLA of JAX 0.11 does not compile such a call on CPU.
        return jnp.squeeze(output, 0)
    sizes = tuple(int(lax.axis_size(axis)) for axis in axes)
    out = _exchange_p.bind(
        operand, output, table, axes=axes, sizes=sizes, groups=groups
    )
    return jnp.squeeze(out, 0)


def _vary(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    missing = tuple(axes - _compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _exchange_abstract_eval(operand: Any, output: Any, *_: Any, **params: Any) -> Any:
    del operand, params
    return output.update(shape=output.shape, weak_type=False)


def _collect_abstract_eval(
    cotangent: Any, table: Any, *, num_rows: int, **params: Any
) -> Any:
    del table, params
    batches, _, *row = cotangent.shape
    return cotangent.update(shape=(batches, num_rows, *row), weak_type=False)


def _no_impl(*args: Any, **params: Any) -> Any:
    del args, params
    raise RuntimeError("ragged_all_to_all: call it inside jax.shard_map")


_exchange_p.def_abstract_eval(_exchange_abstract_eval)
_collect_p.def_abstract_eval(_collect_abstract_eval)
_exchange_p.def_impl(_no_impl)
_collect_p.def_impl(_no_impl)


# Differentiation.


def _zero_tangent(x: Any) -> Any:
    return ad.Zero(_compat.tangent_aval(x))


def _exchange_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> Any:
    operand, output, table = primals
    operand_dot, output_dot, _ = tangents
    result = _exchange_p.bind(operand, output, table, **params)
    if type(operand_dot) is type(output_dot) is ad.Zero:
        return result, _zero_tangent(result)
    operand_dot, output_dot = map(ad.instantiate_zeros, (operand_dot, output_dot))
    return result, _exchange_p.bind(operand_dot, output_dot, table, **params)


def _exchange_transpose(
    cotangent: Any, operand: Any, output: Any, table: Any, **params: Any
) -> Any:
    if type(cotangent) is ad.Zero:
        return [
            ad.Zero(x.aval) if ad.is_undefined_primal(x) else None
            for x in (operand, output)
        ] + [None]
    operand_bar = output_bar = None
    if ad.is_undefined_primal(operand):
        operand_bar = _collect(
            cotangent, table, num_rows=operand.aval.shape[1], **params
        )
    if ad.is_undefined_primal(output):
        output_bar = _keep_unwritten(cotangent, table, **params)
    return [operand_bar, output_bar, None]


def _collect(cotangent: jax.Array, table: jax.Array, **params: Any) -> jax.Array:
    dtype = cotangent.dtype
    if dtype.name not in _SUMMABLE:
        cotangent = cotangent.astype(jnp.float32)
    return jnp.asarray(_collect_p.bind(cotangent, table, **params), dtype)


def _keep_unwritten(
    cotangent: jax.Array,
    table: jax.Array,
    *,
    axes: tuple[Any, ...],
    groups: Groups,
    **params: Any,
) -> jax.Array:
    """Returns the cotangent of `output`: zero where rows arrived."""
    del params
    tables = reference.gather_tables(table, axes, groups)
    rank = reference.group_of(axes, groups)
    written = jax.vmap(
        lambda t: reference.covered_rows(t, rank, cotangent.shape[1]), in_axes=1
    )(tables)
    written = written.reshape(*written.shape, *(1,) * (cotangent.ndim - 2))
    return jnp.where(written, jnp.zeros_like(cotangent), cotangent)


def _collect_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    cotangent, table = primals
    dot, _ = tangents
    result = _collect_p.bind(cotangent, table, **params)
    if type(dot) is ad.Zero:
        return result, _zero_tangent(result)
    return result, _collect_p.bind(dot, table, **params)


def _collect_transpose(
    bar: Any, cotangent: Any, table: Any, *, num_rows: int, **params: Any
) -> Any:
    del num_rows
    if type(bar) is ad.Zero:
        return [ad.Zero(cotangent.aval), None]
    nothing = jnp.zeros(cotangent.aval.shape, bar.dtype)
    nothing = _vary(nothing, _compat.varying_axes(bar))
    return [_exchange_p.bind(bar, nothing, table, **params), None]


ad.primitive_jvps[_exchange_p] = _exchange_jvp
ad.primitive_transposes[_exchange_p] = _exchange_transpose
ad.primitive_jvps[_collect_p] = _collect_jvp
ad.primitive_transposes[_collect_p] = _collect_transpose


# Batching: vmap's axis joins the batches, in front.


def _merge_rows(x: Any, dim: Any, size: int) -> Any:
    x = batching.bdim_at_front(x, dim, size)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _merge_tables(table: Any, dim: Any, size: int, batches: int) -> Any:
    """Returns a table a batch, or one for all if nothing tells them apart."""
    if dim is None and table.shape[0] == 1:
        return table
    table = batching.bdim_at_front(table, dim, size)
    table = jnp.broadcast_to(table, (size, batches, *table.shape[2:]))
    return table.reshape(size * batches, *table.shape[2:])


def _batch(primitive: Primitive, args: Any, dims: Any, **params: Any) -> Any:
    *rows, table = args
    *row_dims, table_dim = dims
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    first, first_dim = rows[0], row_dims[0]
    batches = first.shape[0 if first_dim is None or first_dim else 1]
    merged = [_merge_rows(x, d, size) for x, d in zip(rows, row_dims, strict=True)]
    table = _merge_tables(table, table_dim, size, batches)
    out = primitive.bind(*merged, table, **params)
    return out.reshape(size, batches, *out.shape[1:]), 0


for _p in (_exchange_p, _collect_p):
    batching.primitive_batchers[_p] = lambda args, dims, p=_p, **params: _batch(
        p, args, dims, **params
    )


_ragged_lowering.register(_exchange_p, _collect_p)
