"""`ragged_all_to_all`: `jax.lax.ragged_all_to_all` on every backend, with gradients.

The checks, and the choice between our exchange and plain JAX collectives.
"""

import logging
import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_turbobus import _compat
from jax_turbobus.moe import _matching, _ragged_primitive
from jax_turbobus.moe import _ragged_reference as reference
from jax_turbobus.moe._arguments import check_numpy_dtype
from jax_turbobus.moe._ragged_reference import Groups

__all__ = ["ragged_all_to_all"]

_OP = "ragged_all_to_all"
_log = logging.getLogger("jax_turbobus")


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: Any,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> jax.Array:
    """Returns `output` with the rows that the other ranks sent written into it.

    A drop-in for `jax.lax.ragged_all_to_all`. Slice ``i`` of the caller, rows
    ``input_offsets[i] : input_offsets[i] + send_sizes[i]`` of its `operand`, goes to
    rank ``i // (num_slices / num_ranks)``, where it is written from row
    ``output_offsets[i]`` of the result on.

    Beyond what JAX's does: it runs on CPU devices; where slices meet in a result, the
    one of the later source rank (then the later slice) wins; an operand row sent to
    several places gets the sum of their cotangents, an overwritten one none; `vmap`
    takes any mixture of batched and shared arguments; sizes that do not fit are an
    error on all ranks that names rank and slice, never a write out of bounds. GPUs find
    that out when they run: there such a slice moves no row, and a later call of the
    process raises the error.

    Args:
      operand: ``[operand_rows, ...]``, any dtype.
      output: ``[output_rows, ...]``, same dtype and row shape.
      input_offsets: ``int[num_slices]``, rows of `operand`; traced. `num_slices` is a
        multiple of the ranks in a group.
      send_sizes: ``int[num_slices]``, rows.
      output_offsets: ``int[num_slices]``, rows of the *receiver's* result.
      recv_sizes: ``int[num_slices]``: `send_sizes` as the receivers see them,
        ``lax.all_to_all(send_sizes, axis_name, 0, 0, tiled=True)``.
      axis_name: the mapped axis or axes whose ranks exchange; static.
      axis_index_groups: static groups of axis indices, of one size, that cover the
        axis; ranks exchange inside their group.

    Returns:
      ``[output_rows, ...]``, like `output`.

    Raises:
      TypeError: offsets, sizes or groups are not integers, or dtypes differ.
      ValueError: shapes, lengths or groups that do not fit, or `axis_name` names no
        axis, or one twice.
      NameError: `axis_name` is not bound here.

    Transforms:
      jit, shard_map (``check_vma`` on or off), vmap, grad, jvp, scan, remat.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.lax.ragged_all_to_all.html
    """
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    groups = _check_groups(axis_index_groups, _axis_size(axes))
    num_ranks = len(groups[0]) if groups else _axis_size(axes)
    fields = {
        "input_offsets": input_offsets,
        "send_sizes": send_sizes,
        "output_offsets": output_offsets,
        "recv_sizes": recv_sizes,
    }
    for name, x in (("operand", operand), ("output", output)):
        dtype = getattr(x, "dtype", None)
        if isinstance(dtype, np.dtype):
            check_numpy_dtype(f"{_OP}: {name}", dtype)
    operand, output = jnp.asarray(operand), jnp.asarray(output)
    _check_rows(operand, output)
    table = jnp.stack(_check_fields(fields, num_ranks))

    carried, restore = _carrier(operand.dtype)
    rows = (operand.astype(carried), output.astype(carried))
    reason = _why_not_ours(axes)
    if reason is None:
        result = _ragged_primitive.exchange(*rows, table, axes=axes, groups=groups)
    else:
        _log.info("%s: plain JAX collectives: %s", _OP, reason)
        result = reference.exchange(*rows, table, axis_name=axes, groups=groups)
    return result.astype(restore)


def _axis_size(axes: tuple[Any, ...]) -> int:
    # To JAX's collectives an integer is an axis of the array.
    is_name = [
        isinstance(axis, Hashable) and not isinstance(axis, int) for axis in axes
    ]
    if not axes or not all(is_name) or len(set(axes)) != len(axes):
        raise ValueError(
            f"{_OP}: axis_name: expected the name of a mesh axis, or a tuple of"
            f" different ones, got {axes if len(axes) != 1 else axes[0]!r}"
        )
    try:
        return math.prod(int(lax.axis_size(axis)) for axis in axes)
    except NameError as error:
        raise NameError(
            f"{_OP}: axis_name={axes if len(axes) > 1 else axes[0]!r} is not bound"
            f" here ({error}); call it inside jax.shard_map over a mesh with that axis"
        ) from None


def _check_groups(groups: Sequence[Sequence[int]] | None, size: int) -> Groups:
    if groups is None:
        return None
    try:
        result = tuple(tuple(map(operator.index, group)) for group in groups)
    except TypeError:
        raise TypeError(
            f"{_OP}: axis_index_groups: expected groups of axis indices, such as"
            f" [[0, 1], [2, 3]], got {groups!r}"
        ) from None
    if sorted(i for group in result for i in group) != list(range(size)):
        raise ValueError(
            f"{_OP}: axis_index_groups: expected each axis index in 0..{size - 1}"
            f" exactly once, got {result}"
        )
    if len({len(group) for group in result}) != 1:
        raise ValueError(
            f"{_OP}: axis_index_groups: expected groups of one size, got"
            f" {[len(group) for group in result]} in {result}"
        )
    return result


def _check_rows(operand: jax.Array, output: jax.Array) -> None:
    for name, x in (("operand", operand), ("output", output)):
        if x.ndim < 1:
            raise ValueError(f"{_OP}: {name}: expected rows, got a scalar")
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{_OP}: {name}: dtype {x.dtype} has no bytes to move; for random"
                " keys, exchange jax.random.key_data(keys)"
            )
    if operand.dtype != output.dtype:
        raise TypeError(
            f"{_OP}: operand and output: expected one dtype, got {operand.dtype} and"
            f" {output.dtype}"
        )
    if operand.shape[1:] != output.shape[1:]:
        raise ValueError(
            f"{_OP}: operand and output: expected rows of one shape, got"
            f" {operand.shape} and {output.shape}, which differ after the first axis"
        )


def _check_fields(fields: dict[str, Any], num_ranks: int) -> list[jax.Array]:
    arrays = {name: jnp.asarray(x) for name, x in fields.items()}
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{_OP}: {name}: expected integers, got {x.dtype}")
        if x.ndim != 1 or x.shape[0] < 1:
            raise ValueError(
                f"{_OP}: {name}: expected shape (num_slices,) with at least one slice,"
                f" got {x.shape}"
            )
        if x.shape != arrays["input_offsets"].shape:
            raise ValueError(
                f"{_OP}: {name}: expected as many entries as input_offsets"
                f" ({arrays['input_offsets'].shape[0]}), got {x.shape[0]}"
            )
        if x.shape[0] % num_ranks:
            raise ValueError(
                f"{_OP}: {name}: expected a multiple of the {num_ranks} ranks that"
                f" exchange, got {x.shape[0]} entries"
            )
    return [_to_int32(x) for x in arrays.values()]


def _to_int32(x: jax.Array) -> jax.Array:
    """Returns `x` saturated, so that what is beyond int32 stays refused."""
    limits, wanted = np.iinfo(x.dtype), np.iinfo(np.int32)
    if int(limits.max) > wanted.max:
        x = jnp.minimum(x, np.array(wanted.max, x.dtype))
    if int(limits.min) < wanted.min:
        x = jnp.maximum(x, np.array(wanted.min, x.dtype))
    return x.astype(jnp.int32)


def _carrier(dtype: Any) -> tuple[Any, Any]:
    """Returns the dtype that rows travel in, and their own.

    Elements of less than a byte have no address: they travel as wider ones that
    hold them exactly.
    """
    if _compat.element_bits(dtype) < 8 and dtype != jnp.bool_:
        if jnp.issubdtype(dtype, jnp.signedinteger):
            return jnp.int8, dtype
        if jnp.issubdtype(dtype, jnp.unsignedinteger):
            return jnp.uint8, dtype
        return jnp.float32, dtype
    return dtype, dtype


def _why_not_ours(axes: tuple[Any, ...]) -> str | None:
    try:
        _matching.Group.of(axes, op=_OP)
    except ValueError as error:
        return str(error)
    if jax.process_count() > 1:
        return f"{jax.process_count()} processes"
    return None
