"""The primitives behind the offload calls, and how they lower.

A primitive is one FFI call of docs/ffi.md. Arguments are checked by the public
functions; types of results are in `_shapes`, the rules for jvp and transpose in
`_derivatives`, those for vmap in `_batching`.

None of them has a JAX effect, so checkpoint and custom derivatives take them on
every JAX version. Starts and dones have side effects for XLA alone: equal ones
must stay two.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_turbobus import _compat
from jax_turbobus.offload import _shapes
from jax_turbobus.offload._buffers import host_buffer_like
from jax_turbobus.offload._define import (
    HOST,
    alike,
    define,
    emit_ffi,
    register_lowering,
    run_compiled,
)

__all__ = [
    "d2h",
    "d2h_into_p",
    "d2h_into_start_p",
    "d2h_p",
    "d2h_start_p",
    "done_p",
    "fetch_p",
    "fetch_rows_p",
    "fetch_start_p",
    "fetch_tangent_p",
    "h2d_p",
    "h2d_start_p",
    "place",
    "place_p",
    "placed",
    "placed_rows",
    "store_p",
    "store_start_p",
    "to_host_params",
]


# Host to device.

h2d_p = define(
    "turbobus_h2d",
    _shapes.to_device_aval,
    lambda context, x: emit_ffi(context, "turbobus_h2d_copy", [x]),
    alike,
    leads=True,
)
h2d_start_p = define(
    "turbobus_h2d_start",
    _shapes.to_device_aval,
    lambda context, x: emit_ffi(
        context, "turbobus_h2d_start", [x], has_side_effect=True
    ),
    alike,
    has_side_effect=True,
)


def _define_fetch(name: str) -> Any:
    return define(
        name,
        _shapes.fetch_aval,
        lambda context, stack, index, *, axis: emit_ffi(
            context, "turbobus_fetch", [stack, index], axis=np.int64(axis)
        ),
        _shapes.fetch_dims,
        leads=True,
    )


fetch_p = _define_fetch("turbobus_fetch")
# Of a tangent, in a loop over layers: one that cannot be transposed.
fetch_tangent_p = _define_fetch("turbobus_fetch_tangent")
fetch_start_p = define(
    "turbobus_fetch_start",
    _shapes.fetch_aval,
    lambda context, stack, index, *, axis: emit_ffi(
        context,
        "turbobus_fetch_start",
        [stack, index],
        has_side_effect=True,
        axis=np.int64(axis),
    ),
    _shapes.fetch_dims,
    has_side_effect=True,
)

# Several rows, one after the other. It is a primitive and not a loop in the jaxpr
# because JAX adds up gradients of what a loop closes over in device memory.


def _fetch_rows(stack: Any, indices: Any, *, axis: int) -> Any:
    return jax.lax.map(
        lambda i: jax.lax.optimization_barrier(fetch_p.bind(stack, i, axis=axis)),
        indices,
    )


def _lower_fetch_rows(context: Any, *operands: Any, **params: Any) -> Any:
    lower = mlir.lower_fun(_fetch_rows, multiple_results=False)
    mesh = _compat.explicit_mesh(context.avals_in)
    if mesh is None:
        return lower(context, *operands, **params)
    with jax.sharding.use_abstract_mesh(mesh):
        return lower(context, *operands, **params)


fetch_rows_p: Any = Primitive("turbobus_fetch_rows")
fetch_rows_p.def_abstract_eval(_shapes.fetch_rows_aval)
run_compiled(fetch_rows_p)
mlir.register_lowering(fetch_rows_p, _lower_fetch_rows)

# Device to host. XLA types a result of ours as host memory only if it is aliased
# to an operand that lies there; where `out` is not given, CUDA programs
# therefore make one. On CPU all memory is alike.

d2h_into_p = define(
    "turbobus_d2h_into",
    _shapes.into_aval,
    lambda context, x, out: emit_ffi(
        context, "turbobus_d2h_copy", [x, out], aliases={1: 0}
    ),
    alike,
    follows=(0,),
)
d2h_into_start_p = define(
    "turbobus_d2h_into_start",
    _shapes.into_aval,
    lambda context, x, out: emit_ffi(
        context,
        "turbobus_d2h_start",
        [x, out],
        aliases={1: 0},
        has_side_effect=True,
    ),
    alike,
    has_side_effect=True,
    follows=(0,),
)
store_p = define(
    "turbobus_store",
    _shapes.store_aval,
    lambda context, stack, index, row, *, axis: emit_ffi(
        context,
        "turbobus_store",
        [stack, index, row],
        aliases={0: 0},
        axis=np.int64(axis),
    ),
    _shapes.store_dims,
    follows=(2,),
)
store_start_p = define(
    "turbobus_store_start",
    _shapes.store_aval,
    lambda context, stack, index, row, *, axis: emit_ffi(
        context,
        "turbobus_store_start",
        [stack, index, row],
        aliases={0: 0},
        has_side_effect=True,
        axis=np.int64(axis),
    ),
    _shapes.store_dims,
    has_side_effect=True,
    follows=(2,),
)


@functools.cache
def to_host_params() -> dict[str, Any]:
    """Returns the parameters that `d2h_p` and `d2h_start_p` are bound with.

    JAX takes all results of a program to lie in device memory unless it finds a
    `device_put` to another one in it, and looks for that in the jaxprs among an
    operation's parameters, too. Here is one for it to find.
    """
    return {"moves": jax.make_jaxpr(lambda x: jax.device_put(x, HOST))(np.float32(0))}


def d2h(x: Any) -> Any:
    """Returns `x` in host memory that is made for it."""
    return d2h_p.bind(x, **to_host_params())


def _into_new_buffer(into_p: Any) -> Any:
    return mlir.lower_fun(
        lambda x, **_: into_p.bind(x, host_buffer_like(x)), multiple_results=False
    )


d2h_p = define(
    "turbobus_d2h",
    _shapes.to_host_aval,
    lambda context, x, **_: emit_ffi(context, "turbobus_d2h_new", [x]),
    alike,
    platform="cpu",
)
mlir.register_lowering(d2h_p, _into_new_buffer(d2h_into_p), platform="cuda")
d2h_start_p = define(
    "turbobus_d2h_start",
    _shapes.to_host_aval,
    lambda context, x, **_: emit_ffi(
        context, "turbobus_d2h_new_start", [x], has_side_effect=True
    ),
    alike,
    has_side_effect=True,
    platform="cpu",
)
mlir.register_lowering(d2h_start_p, _into_new_buffer(d2h_into_start_p), platform="cuda")

# A row alone in a stack of zeros in host memory: the tangent or gradient of a stack
# by one of its rows. It is made on the device and moved.


def place(row: Any, index: Any, *, axis: int, length: int) -> Any:
    """Returns a stack of `length` rows along `axis`, zeros but for one, on the host."""
    return place_p.bind(row, index, axis=axis, length=length, **to_host_params())


def placed(row: Any, index: Any, *, axis: int, length: int) -> Any:
    """Returns what `place` does, on the device."""
    is_there = jnp.arange(length, dtype=np.int32) == jnp.clip(index, 0, length - 1)
    is_there = is_there.reshape(-1, *(1,) * (row.ndim - axis))
    return jnp.where(is_there, jnp.expand_dims(row, axis), 0).astype(row.dtype)


def placed_rows(rows: Any, indices: Any, *, axis: int, length: int) -> Any:
    """Returns a stack on the device with these rows, added where they meet."""
    first = placed(rows[0], indices[0], axis=axis, length=length)

    def add(stack: Any, one: Any) -> Any:
        row, index = one
        at = jnp.clip(index, 0, length - 1)
        there = jax.lax.dynamic_index_in_dim(stack, at, axis, keepdims=False)
        added = there + row
        return jax.lax.dynamic_update_index_in_dim(stack, added, at, axis), None

    return jax.lax.scan(add, first, (rows[1:], indices[1:]))[0]


def _place(row: Any, index: Any, *, axis: int, length: int, **_: Any) -> Any:
    return d2h(placed(row, index, axis=axis, length=length))


place_p = define(
    "turbobus_place",
    _shapes.place_aval,
    mlir.lower_fun(_place, multiple_results=False),
    _shapes.place_dims,
)

# The second half of a start: waits, and gives the same buffer, ready. `read` is
# what the start reads, kept alive until then. The last ones may be marks (`_marks`).


def _emit_done(
    context: Any, *operands: Any, target: str, num_marks: int = 0
) -> Sequence[Any]:
    del num_marks
    return emit_ffi(context, target, operands, aliases={0: 0}, has_side_effect=True)


def _emit_done_without_marks(
    context: Any, *operands: Any, target: str, num_marks: int = 0
) -> Sequence[Any]:
    num_operands = len(operands) - num_marks
    context = context.replace(avals_in=context.avals_in[:num_operands])
    return _emit_done(context, *operands[:num_operands], target=target)


done_p = define(
    "turbobus_done",
    _shapes.done_aval,
    _emit_done_without_marks,
    _shapes.done_dims,
    has_side_effect=True,
    leads=True,
)
register_lowering(
    done_p,
    _emit_done,
    _shapes.done_dims,
    has_side_effect=True,
    leads=True,
    platform="cpu",
)

# Where JAX runs operation by operation (`jax.disable_jit`), each is a program, and a
# start moves everything.

h2d_start_p.def_impl(h2d_p.bind)
d2h_start_p.def_impl(d2h_p.bind)
d2h_into_start_p.def_impl(d2h_into_p.bind)
fetch_start_p.def_impl(fetch_p.bind)
store_start_p.def_impl(store_p.bind)
done_p.def_impl(lambda buffer, *read, target, num_marks=0: buffer)
