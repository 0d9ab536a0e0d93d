"""Whole arrays between pinned host memory and devices."""

import functools
from typing import Any

import jax

from jax_turbobus import _compat, _ffi
from jax_turbobus.offload import _primitives as p
from jax_turbobus.offload._check_together import check_distinct
from jax_turbobus.offload._checks import (
    DEVICE,
    HOST,
    check_array,
    check_out,
    check_space,
    named_leaves,
    space_of,
)
from jax_turbobus.offload._define import laid_like
from jax_turbobus.offload._rows import laid_out, vary_alike

__all__ = ["device_put", "to_device", "to_host"]

Tree = Any


def to_device(x: Tree) -> Tree:
    """Returns `x` in device memory.

    Args:
      x: an array of any dtype and shape in pinned host memory, or a tree of them,
        each moved on its own. A sharded array keeps its sharding: every device
        gets its shard over its own path.

    Returns:
      The same values, bit for bit, with memory kind `"device"`.

    Raises:
      TypeError: a leaf is no `jax.Array`.
      ValueError: a leaf is not in memory of kind `"pinned_host"`.

    Transforms:
      jit, grad (the transpose is `to_host`), vmap, shard_map, scan, checkpoint.
    """
    for name, leaf in named_leaves("x", x):
        check_array("to_device", name, leaf)
        check_space("to_device", name, leaf, HOST)
    return _to_device(x) if isinstance(x, jax.Array) else jax.tree.map(_to_device, x)


def to_host(x: Tree, out: Tree | None = None) -> Tree:
    """Returns `x` in pinned host memory.

    Args:
      x: an array of any dtype and shape in device memory, or a tree of them.
      out: pinned host arrays to write to, a tree like `x`, each with the shape,
        dtype and sharding of its leaf of `x`. An eager call donates them; inside
        `jax.jit` donate the argument they come from, or XLA copies them first.
        Without `out`, host memory is made inside the program.

    Returns:
      The same values, bit for bit, with memory kind `"pinned_host"`; with `out`,
      in its memory.

    Raises:
      TypeError: a leaf is no `jax.Array`, or `out` has another dtype.
      ValueError: a leaf is not in device memory, or `out` has another tree
        structure, shape, sharding or memory kind.

    Transforms:
      jit, grad (the transpose is `to_device`; `out` has no gradient), vmap,
      shard_map, scan, checkpoint.
    """
    leaves = named_leaves("x", x)
    for name, leaf in leaves:
        check_array("to_host", name, leaf)
        check_space("to_host", name, leaf, DEVICE)
    if out is None:
        return _to_host(x) if isinstance(x, jax.Array) else jax.tree.map(_to_host, x)
    found: Any = jax.tree.structure(out)
    expected: Any = jax.tree.structure(x)
    if found != expected:
        raise ValueError(
            f"to_host: argument out: expected a tree like x, {expected}, got {found}"
        )
    check_distinct("to_host", "out", out)
    # Every leaf before anything is written, as in `store`.
    for (name, leaf), (out_name, into) in zip(
        leaves, named_leaves("out", out), strict=True
    ):
        check_out("to_host", leaf, into, name, out_name)
    return jax.tree.map(_to_host_into, x, out)


def device_put(tree: Tree, space: Any) -> Tree:
    """Returns `tree` in the memory `space`; stands in for `jax.device_put`.

    Args:
      tree: arrays in pinned host or device memory. What is already in `space` is
        returned as it is; what is no `jax.Array`, or in other memory, is left to
        `jax.device_put`.
      space: `jax.memory.Space.Device` or `jax.memory.Space.Host`.

    Returns:
      The same values in `space`.

    Raises:
      ValueError: `space` is neither of the two.

    Transforms:
      As `to_device` and `to_host`.
    """
    if space is not DEVICE and space is not HOST:
        raise ValueError(
            "device_put: argument space: expected jax.memory.Space.Device or "
            f"jax.memory.Space.Host, got {space!r}; for devices and shardings use "
            "jax.device_put"
        )
    move = _to_device if space is DEVICE else _to_host

    def put(x: Any) -> Any:
        found = space_of(x) if isinstance(x, jax.Array) else None
        if found not in (HOST, DEVICE):
            return jax.device_put(x, space)
        if found is space:
            return x
        check_array("device_put", "tree", x)
        return move(x)

    return jax.tree.map(put, tree)


def _to_device(x: Any) -> Any:
    if _compat.is_tracer(x):
        _ffi.register()
        return p.h2d_p.bind(x)
    return _compiled(p.h2d_p.bind, x.sharding.with_memory_kind("device"))(x)


def _to_host(x: Any) -> Any:
    if _compat.is_tracer(x):
        _ffi.register()
        return p.d2h(x)
    return _compiled(p.d2h, x.sharding.with_memory_kind("pinned_host"))(x)


def _to_host_into(x: Any, out: Any) -> Any:
    if _compat.is_tracer(x) or _compat.is_tracer(out):
        _ffi.register()
        return p.d2h_into_p.bind(*vary_alike(laid_like(x, jax.typeof(out)), out))
    x = laid_out(x, out.sharding.with_memory_kind("device"))
    return _compiled(p.d2h_into_p.bind, out.sharding, donate=(1,))(x, out)


@functools.lru_cache(maxsize=1024)
def _compiled(move: Any, sharding: Any, donate: tuple[int, ...] = ()) -> Any:
    """Returns the eager call, compiled once for each sharding, shape and dtype."""
    _ffi.register()
    return jax.jit(move, out_shardings=sharding, donate_argnums=donate)
