"""What the offload calls refuse, and in which words."""

import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus import _compat
from jax_turbobus.offload._define import DEVICE, HOST

__all__ = [
    "DEVICE",
    "HOST",
    "check_array",
    "check_function",
    "check_index",
    "check_out",
    "check_row",
    "check_space",
    "check_stack",
    "check_values",
    "devices_of",
    "named_leaves",
    "space_of",
]

KINDS = {DEVICE: "device", HOST: "pinned_host"}

_MOVE_THERE = {
    HOST: "put it there with jax.device_put(x, jax.memory.Space.Host) or to_host(x)",
    DEVICE: "put it there with jax.device_put(x, jax.memory.Space.Device) or "
    "to_device(x)",
}


def space_of(x: Any) -> Any:
    """Returns the memory space of an array or tracer; None for other kinds."""
    if _compat.is_tracer(x):
        return jax.typeof(x).memory_space
    kind = x.sharding.memory_kind
    return HOST if kind == "pinned_host" else DEVICE if kind == "device" else None


def named_leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of an argument, each with the name that messages call it."""
    if isinstance(tree, jax.Array):
        return [(name, tree)]
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def check_array(call: str, name: str, x: Any) -> None:
    """Refuses what is no array of a type that can be moved.

    Raises:
      TypeError: `x` is not a `jax.Array`, or its elements have no bytes.
      ValueError: it was donated or deleted.
    """
    if not isinstance(x, jax.Array):
        raise TypeError(
            f"{call}: argument {name}: expected a jax.Array, got "
            f"{type(x).__module__}.{type(x).__qualname__}; "
            "make it one with jax.device_put"
        )
    _check_alive(call, name, x)
    if not _is_movable(x.dtype):
        raise TypeError(
            f"{call}: argument {name}: arrays of {x.dtype} cannot be moved; expected "
            "another numeric or boolean dtype, or keys"
        )


def _check_alive(call: str, name: str, x: Any) -> None:
    if isinstance(x, jax.Array) and not _compat.is_tracer(x) and x.is_deleted():
        raise ValueError(
            f"{call}: argument {name}: this array ({x.dtype}{list(x.shape)}) was "
            "donated to an earlier call or deleted; use the result of that call"
        )


@functools.lru_cache(maxsize=256)
def _is_movable(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    # XLA packs elements of 1 and 6 bits otherwise than the arrays that it gets.
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and _compat.element_bits(
        dtype
    ) not in (1, 6)


def check_space(call: str, name: str, x: Any, space: Any) -> None:
    """Refuses an array in another memory than `space`.

    Raises:
      ValueError: it lies elsewhere.
    """
    found = space_of(x)
    if found is space:
        return
    kind = KINDS.get(found) or (
        str(found) if _compat.is_tracer(x) else x.sharding.memory_kind
    )
    raise ValueError(
        f"{call}: argument {name}: expected memory kind {KINDS[space]!r}, got "
        f"{kind!r} ({x.dtype}{list(x.shape)}); {_way_there(x, space)}"
    )


def _way_there(x: Any, space: Any) -> str:
    if space is not HOST or not _compat.is_tracer(x):
        return _MOVE_THERE[space]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return (
            "while tracing, JAX's types do not tell of keys that they are on the host: "
            "move jax.random.key_data(keys) instead, and make keys of it on the device "
            "with jax.random.wrap_key_data"
        )
    return (
        f"{_MOVE_THERE[space]}. Of an argument of jax.jit, only an array says that it "
        "is on the host, neither in_shardings nor a jax.ShapeDtypeStruct; lower with "
        "the array, or with jax.typeof(array) and array.sharding in in_shardings"
    )


def check_function(call: str, name: str, f: Any) -> None:
    """Refuses what cannot be called.

    Raises:
      TypeError: so it is.
    """
    if not callable(f):
        raise TypeError(
            f"{call}: argument {name}: expected a function, got {type(f).__qualname__}"
        )


def check_out(
    call: str, x: Any, out: Any, source: str = "x", name: str = "out"
) -> None:
    """Refuses an `out` that the bytes of `x` would not fill exactly.

    Args:
      call: whose argument it is.
      x: what goes there.
      out: the argument.
      source: which argument `x` is.
      name: which argument `out` is.

    Raises:
      TypeError: `out` is no array, or its dtype differs.
      ValueError: its memory kind, shape, sharding or mesh axes differ.
    """
    check_array(call, name, out)
    if out is x:
        raise ValueError(
            f"{call}: argument {name} is {source} itself; expected another array"
        )
    check_space(call, name, out, HOST)
    if out.dtype != x.dtype:
        raise TypeError(
            f"{call}: argument {name}: expected dtype {x.dtype} as {source}, got "
            f"{out.dtype}; cast {source}, or make out of the same dtype"
        )
    if out.shape != x.shape:
        raise ValueError(
            f"{call}: argument {name}: expected shape {x.shape} as {source}, got "
            f"{out.shape}"
        )
    if _compat.is_tracer(x) or _compat.is_tracer(out):
        expected, found = jax.typeof(x).sharding, jax.typeof(out).sharding
        matches = expected.mesh.empty or found.mesh.empty or expected == found
    else:
        expected, found = x.sharding.with_memory_kind("pinned_host"), out.sharding
        matches = found == expected or found.is_equivalent_to(expected, x.ndim)
    if not matches:
        told = str if str(expected) != str(found) else _with_devices
        raise ValueError(
            f"{call}: argument {name}: expected the sharding of {source}, "
            f"{told(expected)}, got {told(found)}; make it with jax.device_put(…, "
            f"{source}.sharding.with_memory_kind('pinned_host'))"
        )


def check_values(call: str, name: str, tree: Any) -> None:
    """Refuses a tree with leaves that a compiled function cannot take.

    Raises:
      TypeError: a leaf is no array and no number.
      ValueError: one was donated or deleted.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | numbers.Number):
            raise TypeError(
                f"{call}: argument {name}{jax.tree_util.keystr(path)}: expected arrays "
                f"or numbers, got {type(leaf).__qualname__}; close over what is none"
            )
        _check_alive(call, name + jax.tree_util.keystr(path), leaf)


def devices_of(sharding: Any) -> list[Any]:
    """Returns the devices of a sharding, of a mesh in its order."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)


def _with_devices(sharding: Any) -> str:
    if isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        return str(sharding)
    return f"{sharding.spec} over {devices_of(sharding)}"


def check_index(call: str, index: Any) -> None:
    """Refuses what is no integer scalar.

    Raises:
      TypeError: another dtype, or no number at all.
      ValueError: it has dimensions, or was donated or deleted.
    """
    if isinstance(index, bool) or not hasattr(index, "dtype"):
        if isinstance(index, int) and not isinstance(index, bool):
            return
        raise TypeError(
            f"{call}: argument i: expected an integer or an integer scalar array, "
            f"got {type(index).__qualname__}"
        )
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(
            f"{call}: argument i: expected an integer dtype, got {index.dtype}; "
            "cast it with .astype(jnp.int32)"
        )
    if index.shape != ():
        raise ValueError(
            f"{call}: argument i: expected a scalar, got shape {index.shape}; use "
            "jax.vmap to take several rows"
        )
    _check_alive(call, "i", index)


def check_stack(call: str, stack: Any, name: str = "stack", space: Any = HOST) -> None:
    """Refuses a stack without rows, or split between them.

    Raises:
      TypeError: it is no array.
      ValueError: it is in another memory than `space`, has no rows, rows in host
        memory that do not end on a byte, or is sharded along its first axis.
    """
    check_array(call, name, stack)
    check_space(call, name, stack, space)
    if stack.ndim == 0 or stack.shape[0] == 0:
        raise ValueError(
            f"{call}: argument {name}: expected shape [num_layers, ...] with at least "
            f"one layer, got {stack.shape}"
        )
    # While tracing, only a mesh with explicit axes tells how it is split.
    sharding = jax.typeof(stack).sharding
    if not _compat.is_tracer(stack):
        sharding = stack.sharding
    spec: tuple[Any, ...] = ()
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = tuple(sharding.spec)
    if spec and spec[0] is not None:
        raise ValueError(
            f"{call}: argument {name}: its first axis, the layers, must not be "
            f"sharded, got {jax.sharding.PartitionSpec(*spec)}; shard another axis"
        )
    if space is not HOST:
        return
    row = stack.shape[1:]
    if not _compat.is_tracer(stack) or sharding.mesh.are_all_axes_explicit:
        row = _shard_shape(sharding, stack.shape)[1:]
    if math.prod(row) * _compat.element_bits(stack.dtype) % 8:
        shard = "" if row == stack.shape[1:] else ", one device's shard of it,"
        raise ValueError(
            f"{call}: argument {name}: a row of {row} {stack.dtype}{shard} does not "
            "end on a byte; pad its last dimension, or shard it otherwise"
        )


@functools.lru_cache(maxsize=256)
def _shard_shape(sharding: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sharding.shard_shape(shape))


def check_row(
    call: str, stack: Any, x: Any, name: str = "x", stack_name: str = "stack"
) -> None:
    """Refuses a row that does not fit the stack.

    Raises:
      TypeError: it is no array, or its dtype differs.
      ValueError: it is not on the device, or its shape differs.
    """
    check_array(call, name, x)
    check_space(call, name, x, DEVICE)
    if x.dtype != stack.dtype:
        raise TypeError(
            f"{call}: argument {name}: expected dtype {stack.dtype} as {stack_name}, "
            f"got {x.dtype}"
        )
    if x.shape != stack.shape[1:]:
        raise ValueError(
            f"{call}: argument {name}: expected shape {stack.shape[1:]}, a row of "
            f"{stack_name} {stack.shape}, got {x.shape}"
        )
    if _compat.is_tracer(x) or _compat.is_tracer(stack):
        return
    if x.sharding.device_set != stack.sharding.device_set:
        raise ValueError(
            f"{call}: argument {name}: expected it on the devices of {stack_name}, "
            f"{devices_of(stack.sharding)}, got {devices_of(x.sharding)}; move it with "
            "jax.device_put"
        )
