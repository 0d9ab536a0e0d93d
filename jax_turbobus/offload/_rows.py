"""Rows of a stack in host memory: one layer at a time to the device and back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_turbobus import _compat, _ffi
from jax_turbobus.offload import _primitives as p
from jax_turbobus.offload._check_together import check_distinct, check_together
from jax_turbobus.offload._checks import (
    check_index,
    check_row,
    check_stack,
    named_leaves,
)
from jax_turbobus.offload._define import laid_like, row_aval

__all__ = ["fetch", "laid_out", "row_index", "store", "vary_alike", "vary_over"]

Tree = Any


def fetch(stack: Tree, i: Any) -> Tree:
    """Returns row `i` of a stack in host memory, in device memory.

    Only that row travels: inside `jax.lax.scan` the stack stays where it is.

    Args:
      stack: an array `[num_layers, ...]` in pinned host memory, or a tree of them.
        It may be sharded along any axis but the first.
      i: an integer scalar, static or traced. As in
        `jax.lax.dynamic_index_in_dim`, a negative one counts from the end, and one
        outside the stack gives the nearest row.

    Returns:
      An array `[...]`, or a tree of them, with memory kind `"device"`.

    Raises:
      TypeError: a leaf of `stack` is no `jax.Array`, or `i` no integer.
      ValueError: a leaf is not in pinned host memory, has no rows, or is sharded
        along its first axis; or `i` is no scalar.

    Transforms:
      jit, vmap, shard_map, scan, checkpoint, grad. The gradient of a stack is a
      whole stack, mostly zeros; in loops over layers use `scan_layers`.
    """
    stacks = named_leaves("stack", stack)
    for name, leaf in stacks:
        check_stack("fetch", leaf, name)
    check_index("fetch", i)
    for name, leaf in stacks:
        check_together("fetch", {name: leaf, "i": i})
    return jax.tree.map(functools.partial(_fetch, i=i), stack)


def store(stack: Tree, i: Any, x: Tree) -> Tree:
    """Returns a stack in host memory with row `i` replaced by `x`, in place.

    Args:
      stack: as in `fetch`. An eager call donates it; inside `jax.jit` donate the
        argument it comes from, or XLA copies the whole stack first.
      i: as in `fetch`.
      x: an array `[...]` in device memory, or a tree like `stack` of them. One that
        is split over the devices otherwise than a row of the stack is resharded
        first, on the devices.

    Returns:
      The stack, with memory kind `"pinned_host"`.

    Raises:
      TypeError: as in `fetch`, or `x` has another dtype.
      ValueError: as in `fetch`, or `x` has another tree structure, shape or memory
        kind.

    Transforms:
      As `fetch`; the transpose fetches.
    """
    found: Any = jax.tree.structure(x)
    expected: Any = jax.tree.structure(stack)
    if found != expected:
        raise ValueError(
            f"store: argument x: expected a tree like stack, {expected}, got {found}"
        )
    check_distinct("store", "stack", stack)
    # All of it before anything is moved: a stack that was written is gone for callers
    # who get an error instead of a result.
    pairs = zip(named_leaves("stack", stack), named_leaves("x", x), strict=True)
    for (stack_name, leaf), (name, row) in pairs:
        check_stack("store", leaf, stack_name)
        check_index("store", i)
        check_row("store", leaf, row, name, stack_name)
        check_together("store", {stack_name: leaf, "i": i})
    return jax.tree.map(lambda leaf, row: _store(leaf, i, row), stack, x)


def _fetch(stack: Any, i: Any) -> Any:
    if _compat.is_tracer(stack) or _compat.is_tracer(i):
        _ffi.register()
        return p.fetch_p.bind(*vary_alike(stack, row_index(i, stack.shape[0])), axis=0)
    compiled = _compiled_fetch(_row_sharding(stack.sharding, stack.ndim))
    return compiled(stack, row_index(i, stack.shape[0]))


def _store(stack: Any, i: Any, x: Any) -> Any:
    if any(map(_compat.is_tracer, (stack, i, x))):
        _ffi.register()
        x = laid_like(x, row_aval(jax.typeof(stack), 0))
        operands = vary_alike(stack, row_index(i, stack.shape[0]), x)
        return p.store_p.bind(*operands, axis=0)
    x = laid_out(x, _row_sharding(stack.sharding, stack.ndim))
    return _compiled_store(stack.sharding)(stack, row_index(i, stack.shape[0]), x)


def row_index(i: Any, length: int) -> Any:
    """Returns `i` as an int32 scalar, counted from the front.

    Args:
      i: a checked index.
      length: how many rows there are.

    Returns:
      The index; one outside the stack is left for the handler to clamp.
    """
    if not hasattr(i, "dtype"):
        return np.int32(max(0, min(i + length if i < 0 else i, length - 1)))
    dtype = np.dtype(i.dtype)
    if dtype.itemsize < 4 or dtype == np.int32:
        i = i.astype(jnp.int32)
        return jnp.where(i < 0, i + length, i)
    # Too wide for an int32: to a row first, then narrower.
    if dtype.kind == "i":
        i = jnp.where(i < 0, i + length, i)
    return jnp.clip(i, 0, length - 1).astype(jnp.int32)


def laid_out(x: Any, sharding: Any) -> Any:
    """Returns a device array split over the same devices as `sharding` says.

    It may be None, or one that is on a single device: then `x` stays as it is.
    """
    if not isinstance(sharding, NamedSharding) or x.sharding == sharding:
        return x
    return jax.device_put(x, sharding)


def vary_alike(*values: Any) -> tuple[Any, ...]:
    """Returns the values as ones that differ over the same axes of a mesh.

    Only inside `jax.shard_map` is there anything to do: a value that is the same
    everywhere is declared to differ.
    """
    axes: frozenset[str] = frozenset()
    axes = axes.union(*map(_compat.varying_axes, values))
    if not axes:
        return values
    return tuple(vary_over(value, axes) for value in values)


def vary_over(x: Any, axes: frozenset[str]) -> Any:
    """Returns `x` as a value that differs over these axes, and those it had."""
    missing = tuple(sorted(axes - _compat.varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


@functools.lru_cache(maxsize=1024)
def _row_sharding(sharding: Any, ndim: int) -> Any:
    """Returns how a row of a stack is laid over the devices, or None if unknown."""
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
        return NamedSharding(
            sharding.mesh, PartitionSpec(*spec[1:]), memory_kind="device"
        )
    if isinstance(sharding, SingleDeviceSharding):
        return sharding.with_memory_kind("device")
    return None


@functools.lru_cache(maxsize=1024)
def _compiled_fetch(sharding: Any) -> Any:
    _ffi.register()
    return jax.jit(functools.partial(p.fetch_p.bind, axis=0), out_shardings=sharding)


@functools.lru_cache(maxsize=1024)
def _compiled_store(sharding: Any) -> Any:
    _ffi.register()
    return jax.jit(
        functools.partial(p.store_p.bind, axis=0),
        out_shardings=sharding,
        donate_argnums=0,
    )
