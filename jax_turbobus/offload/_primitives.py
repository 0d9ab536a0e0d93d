"""The primitives behind the offload calls: their types and how they lower.

A primitive is one FFI call of docs/ffi.md. Arguments are checked by the public
functions; the rules for jvp, transpose and vmap are in `_rules`.

None of them has a JAX effect, so checkpoint and custom derivatives take them on
every JAX version. Starts and dones have side effects for XLA alone: equal ones
must stay two.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jax_turbobus import _compat
from jax_turbobus.offload._partition import Dims, lower_in_shard_map, lower_per_shard

__all__ = [
    "after_p",
    "anchor_p",
    "batch_p",
    "buffer_p",
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
    "host_buffer_like",
    "laid_like",
    "mark_p",
    "place",
    "place_p",
    "placed",
    "placed_rows",
    "row_aval",
    "store_p",
    "store_start_p",
    "tie_p",
    "to_host_params",
    "total_p",
]

DEVICE = jax.memory.Space.Device
HOST = jax.memory.Space.Host


def row_aval(stack: Any, axis: int) -> Any:
    """Returns the type of a row of `stack` along `axis`, on the device."""
    shape = stack.shape[:axis] + stack.shape[axis + 1 :]
    spec = tuple(stack.sharding.spec)
    spec += (None,) * (stack.ndim - len(spec))
    sharding = stack.sharding.update(
        spec=jax.sharding.PartitionSpec(*spec[:axis], *spec[axis + 1 :])
    )
    return stack.update(
        shape=shape, sharding=sharding, memory_space=DEVICE, weak_type=False
    )


def laid_like(x: Any, aval: Any) -> Any:
    """Returns `x` split over the devices as `aval` says.

    Only on meshes with explicit axes is there anything to do: elsewhere XLA reshards
    what it must.
    """
    expected, found = aval.sharding, jax.typeof(x).sharding
    if expected.mesh.empty or not expected.mesh.are_all_axes_explicit:
        return x
    if expected.mesh == found.mesh and expected.spec == found.spec:
        return x
    return jax.sharding.reshard(x, expected)


def _to_device_aval(x: Any, **_: Any) -> Any:
    return x.update(memory_space=DEVICE)


def _to_host_aval(x: Any, **_: Any) -> Any:
    return x.update(memory_space=HOST)


def _into_aval(x: Any, out: Any, **_: Any) -> Any:
    del x
    return out.update(memory_space=HOST, weak_type=False)


def _fetch_aval(stack: Any, index: Any, *, axis: int) -> Any:
    del index
    return row_aval(stack, axis)


def _store_aval(stack: Any, index: Any, row: Any, *, axis: int) -> Any:
    del index, row, axis
    return stack.update(memory_space=HOST, weak_type=False)


def _place_aval(row: Any, index: Any, *, axis: int, length: int, **_: Any) -> Any:
    del index
    spec = list(row.sharding.spec) + [None] * (row.ndim - len(row.sharding.spec))
    spec.insert(axis, None)
    return row.update(
        shape=(*row.shape[:axis], length, *row.shape[axis:]),
        sharding=row.sharding.update(spec=jax.sharding.PartitionSpec(*spec)),
        memory_space=HOST,
        weak_type=False,
    )


def _done_aval(buffer: Any, *read: Any, target: str, num_marks: int = 0) -> Any:
    del read, target, num_marks
    return buffer


def _scalar_aval(x: Any) -> Any:
    """Returns the type of an int32 on the devices of `x`."""
    return x.update(
        shape=(),
        dtype=np.dtype(np.int32),
        sharding=x.sharding.update(spec=jax.sharding.PartitionSpec()),
        memory_space=DEVICE,
        weak_type=False,
    )


def _dims(aval: Any, skip: int | None = None) -> Dims:
    """Returns names for the dimensions of a stack, or of its row along `skip`."""
    ndim = aval.ndim + (skip is not None)
    return tuple(f"d{d}" for d in range(ndim) if d != skip)


def _ffi(
    context: Any,
    target: str,
    operands: Sequence[Any],
    *,
    aliases: dict[int, int] | None = None,
    has_side_effect: bool = False,
    **attributes: Any,
) -> Sequence[Any]:
    rule = jax.ffi.ffi_lowering(
        target, operand_output_aliases=aliases, has_side_effect=has_side_effect
    )
    results = rule(context, *operands, **attributes)
    # Without it, XLA takes a call into the fusion that writes its result to a slice
    # (scan's `ys`): it may then run twice, and an alias may be lost.
    barrier: Any = stablehlo.OptimizationBarrierOp(list(results))  # type: ignore[arg-type]
    return list(barrier.results)


def _define(
    name: str,
    abstract_eval: Callable[..., Any],
    emit: Callable[..., Sequence[Any]],
    dims: Callable[..., tuple[list[Dims], Dims, tuple[str, ...]]],
    *,
    follows: Sequence[int] = (),
    leads: bool = False,
    has_side_effect: bool = False,
    platform: str | None = None,
) -> Any:
    """Returns a primitive that is one FFI call.

    Args:
      name: the primitive's name in jaxprs.
      abstract_eval: the type of its result from those of its operands.
      emit: `emit(context, *operands, **params)`: the call for one shard.
      dims: `dims(*avals, **params)`: names for the operands' dimensions and the
        result's, and those that must not be split.
      follows: as in `lower_per_shard`.
      leads: as in `lower_per_shard`.
      has_side_effect: whether XLA must keep equal calls apart.
      platform: the only platform that `emit` is for.
    """
    primitive: Any = Primitive(name)
    primitive.def_abstract_eval(abstract_eval)
    _run_compiled(primitive)
    _register(
        primitive,
        emit,
        dims,
        follows=follows,
        leads=leads,
        has_side_effect=has_side_effect,
        platform=platform,
    )
    return primitive


def _register(
    primitive: Any,
    emit: Callable[..., Sequence[Any]],
    dims: Callable[..., tuple[list[Dims], Dims, tuple[str, ...]]],
    *,
    follows: Sequence[int] = (),
    leads: bool = False,
    has_side_effect: bool = False,
    platform: str | None = None,
) -> None:
    def lower(context: Any, *operands: Any, **params: Any) -> Any:
        if not _compat.partitions_automatically(context):
            return emit(context, *operands, **params)
        call = functools.partial(primitive.bind, **params)
        # Keys have one more dimension in the program than in their type.
        context = context.replace(
            avals_in=list(map(_compat.physical_aval, context.avals_in)),
            avals_out=list(map(_compat.physical_aval, context.avals_out)),
        )
        mesh = _compat.explicit_mesh(context.avals_in)
        if mesh is not None:
            return lower_in_shard_map(context, call, operands, mesh)
        if _compat.is_for_export(context):
            raise NotImplementedError(
                f"{primitive.name}: a transfer of sharded arrays cannot be exported "
                "where only XLA knows how they are split; wrap it in jax.shard_map, "
                "or make the mesh with axis_types=(jax.sharding.AxisType.Explicit, …)"
            )
        operand_dims, result_dims, whole = dims(*context.avals_in, **params)
        return lower_per_shard(
            context,
            call,
            operands,
            operand_dims=operand_dims,
            result_dims=result_dims,
            whole=whole,
            follows=follows,
            leads=leads,
            has_side_effect=has_side_effect,
        )

    mlir.register_lowering(primitive, lower, platform=platform)


def _run_compiled(primitive: Any) -> None:
    """Makes `primitive` one program wherever JAX runs it by itself."""
    _compat.lowers_with_devices(primitive)

    def impl(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return _compiled(primitive, tuple(params.items()))(*args)

    primitive.def_impl(impl)


@functools.cache
def _compiled(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def _alike(*avals: Any, **_: Any) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    dims = _dims(avals[0])
    return [dims] * len(avals), dims, ()


def _fetch_dims(
    stack: Any, index: Any, *, axis: int
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    del index
    dims = _dims(stack)
    return [dims, ()], dims[:axis] + dims[axis + 1 :], (dims[axis],)


def _store_dims(
    stack: Any, index: Any, row: Any, *, axis: int
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    operands, row_dims, whole = _fetch_dims(stack, index, axis=axis)
    del row
    return [*operands, row_dims], operands[0], whole


def _place_dims(
    row: Any, index: Any, *, axis: int, **_: Any
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    del index
    dims = _dims(row)
    return [dims, ()], (*dims[:axis], "rows", *dims[axis:]), ("rows",)


# Host to device.

h2d_p = _define(
    "turbobus_h2d",
    _to_device_aval,
    lambda context, x: _ffi(context, "turbobus_h2d_copy", [x]),
    _alike,
    leads=True,
)
h2d_start_p = _define(
    "turbobus_h2d_start",
    _to_device_aval,
    lambda context, x: _ffi(context, "turbobus_h2d_start", [x], has_side_effect=True),
    _alike,
    has_side_effect=True,
)


def _define_fetch(name: str) -> Any:
    return _define(
        name,
        _fetch_aval,
        lambda context, stack, index, *, axis: _ffi(
            context, "turbobus_fetch", [stack, index], axis=np.int64(axis)
        ),
        _fetch_dims,
        leads=True,
    )


fetch_p = _define_fetch("turbobus_fetch")
# Of a tangent, in a loop over layers: one that cannot be transposed.
fetch_tangent_p = _define_fetch("turbobus_fetch_tangent")
fetch_start_p = _define(
    "turbobus_fetch_start",
    _fetch_aval,
    lambda context, stack, index, *, axis: _ffi(
        context,
        "turbobus_fetch_start",
        [stack, index],
        has_side_effect=True,
        axis=np.int64(axis),
    ),
    _fetch_dims,
    has_side_effect=True,
)

# Several rows, one after the other. It is a primitive and not a loop in the jaxpr
# because JAX adds up gradients of what a loop closes over in device memory.


def _fetch_rows(stack: Any, indices: Any, *, axis: int) -> Any:
    return jax.lax.map(
        lambda i: jax.lax.optimization_barrier(fetch_p.bind(stack, i, axis=axis)),
        indices,
    )


def _fetch_rows_aval(stack: Any, indices: Any, *, axis: int) -> Any:
    row = row_aval(stack, axis)
    spec = jax.sharding.PartitionSpec(None, *row.sharding.spec)
    return row.update(
        shape=(*indices.shape, *row.shape), sharding=row.sharding.update(spec=spec)
    )


def _lower_fetch_rows(context: Any, *operands: Any, **params: Any) -> Any:
    lower = mlir.lower_fun(_fetch_rows, multiple_results=False)
    mesh = _compat.explicit_mesh(context.avals_in)
    if mesh is None:
        return lower(context, *operands, **params)
    with jax.sharding.use_abstract_mesh(mesh):
        return lower(context, *operands, **params)


fetch_rows_p: Any = Primitive("turbobus_fetch_rows")
fetch_rows_p.def_abstract_eval(_fetch_rows_aval)
_run_compiled(fetch_rows_p)
mlir.register_lowering(fetch_rows_p, _lower_fetch_rows)

# Device to host. XLA types a result of ours as host memory only if it is aliased
# to an operand that lies there; where `out` is not given, CUDA programs
# therefore make one. On CPU all memory is alike.

d2h_into_p = _define(
    "turbobus_d2h_into",
    _into_aval,
    lambda context, x, out: _ffi(
        context, "turbobus_d2h_copy", [x, out], aliases={1: 0}
    ),
    _alike,
    follows=(0,),
)
d2h_into_start_p = _define(
    "turbobus_d2h_into_start",
    _into_aval,
    lambda context, x, out: _ffi(
        context,
        "turbobus_d2h_start",
        [x, out],
        aliases={1: 0},
        has_side_effect=True,
    ),
    _alike,
    has_side_effect=True,
    follows=(0,),
)
store_p = _define(
    "turbobus_store",
    _store_aval,
    lambda context, stack, index, row, *, axis: _ffi(
        context,
        "turbobus_store",
        [stack, index, row],
        aliases={0: 0},
        axis=np.int64(axis),
    ),
    _store_dims,
    follows=(2,),
)
store_start_p = _define(
    "turbobus_store_start",
    _store_aval,
    lambda context, stack, index, row, *, axis: _ffi(
        context,
        "turbobus_store_start",
        [stack, index, row],
        aliases={0: 0},
        has_side_effect=True,
        axis=np.int64(axis),
    ),
    _store_dims,
    has_side_effect=True,
    follows=(2,),
)


# A buffer like `x`, split like it, with the axes `sizes` before those of `x`. Neither
# is read: it holds anything. `vmap` over `others` alone makes one for each of them.


def _buffer_aval(x: Any, *others: Any, sizes: tuple[int, ...]) -> Any:
    del others
    spec = (*(None,) * len(sizes), *x.sharding.spec)
    return x.update(
        shape=(*sizes, *x.shape),
        sharding=x.sharding.update(spec=jax.sharding.PartitionSpec(*spec)),
        memory_space=DEVICE,
    )


def _buffer_dims(
    x: Any, *others: Any, sizes: tuple[int, ...]
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    dims = _dims(x)
    operands = [dims]
    for n, other in enumerate(others):
        operands.append(tuple(f"other{n}_{d}" for d in range(other.ndim)))
    added = tuple(f"added{n}" for n in range(len(sizes)))
    return operands, (*added, *dims), added


buffer_p = _define(
    "turbobus_buffer",
    _buffer_aval,
    lambda context, x, *_, sizes: _ffi(
        context.replace(avals_in=context.avals_in[:1]), "turbobus_buffer", [x]
    ),
    _buffer_dims,
    platform="cpu",
    leads=True,
)
_register(
    buffer_p,
    lambda context, *_, sizes: jax.ffi.ffi_lowering("AllocateBuffer", api_version=2)(
        context.replace(avals_in=[])
    ),
    _buffer_dims,
    leads=True,
    platform="cuda",
)


def host_buffer_like(x: Any, *others: Any) -> Any:
    """Returns host memory of the shape, dtype and sharding of `x`, unwritten.

    Args:
      x: an array.
      others: where `vmap` maps one of these and not `x`, there is one buffer for
        each member of the batch.
    """
    return jax.device_put(buffer_p.bind(x, *others, sizes=()), HOST)


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


d2h_p = _define(
    "turbobus_d2h",
    _to_host_aval,
    lambda context, x, **_: _ffi(context, "turbobus_d2h_new", [x]),
    _alike,
    platform="cpu",
)
mlir.register_lowering(d2h_p, _into_new_buffer(d2h_into_p), platform="cuda")
d2h_start_p = _define(
    "turbobus_d2h_start",
    _to_host_aval,
    lambda context, x, **_: _ffi(
        context, "turbobus_d2h_new_start", [x], has_side_effect=True
    ),
    _alike,
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


place_p = _define(
    "turbobus_place",
    _place_aval,
    mlir.lower_fun(_place, multiple_results=False),
    _place_dims,
)

# The second half of a start: waits, and gives the same buffer, ready. `read` is
# what the start reads, kept alive until then. The last ones may be marks (see below).


def _done_dims(
    buffer: Any, *read: Any, target: str, num_marks: int = 0
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    del target, num_marks
    dims = _dims(buffer)
    operands = [dims]
    for r, aval in enumerate(read):
        operands.append(
            dims
            if aval.shape == buffer.shape
            else tuple(f"r{r}_{d}" for d in range(aval.ndim))
        )
    return operands, dims, ()


def _emit_done(
    context: Any, *operands: Any, target: str, num_marks: int = 0
) -> Sequence[Any]:
    del num_marks
    return _ffi(context, target, operands, aliases={0: 0}, has_side_effect=True)


def _emit_done_without_marks(
    context: Any, *operands: Any, target: str, num_marks: int = 0
) -> Sequence[Any]:
    num_operands = len(operands) - num_marks
    context = context.replace(avals_in=context.avals_in[:num_operands])
    return _emit_done(context, *operands[:num_operands], target=target)


done_p = _define(
    "turbobus_done",
    _done_aval,
    _emit_done_without_marks,
    _done_dims,
    has_side_effect=True,
    leads=True,
)
_register(
    done_p, _emit_done, _done_dims, has_side_effect=True, leads=True, platform="cpu"
)

# The gradient of a row of a stack. Under `vmap` it is one gradient for each member of
# the batch, and it depends on where the batch came in what to do with them if the
# stack is not mapped:
#   grad(vmap(f)): `f` was differentiated as a function of a batch that shares a stack.
#     The gradient is the sum over the batch, to be taken before it goes to the host.
#   vmap(grad(f)), jacrev(f): each member of the batch asks for a gradient of its own.
# `batch_p` tells them apart. It is an integer, of no interest, that is mapped over the
# batches which met it before it was differentiated: those of the first kind.

batch_p: Any = Primitive("turbobus_batch")
batch_p.def_abstract_eval(lambda x, *_, differentiated: _scalar_aval(x))
batch_p.def_impl(lambda *_, differentiated: np.int32(0))
mlir.register_lowering(
    batch_p,
    mlir.lower_fun(
        lambda *_, differentiated: jax.numpy.int32(0), multiple_results=False
    ),
)

total_p: Any = Primitive("turbobus_total")
total_p.def_abstract_eval(lambda grad, stack, batch: grad)
total_p.def_impl(lambda grad, stack, batch: grad)
mlir.register_lowering(total_p, lambda context, grad, stack, batch: [grad])

# `x`, for JAX not before `others`; nothing of it is in the program. JAX moves what is
# alike in every step of a differentiated loop out of it: a start, but not its done.

anchor_p: Any = Primitive("turbobus_anchor")
anchor_p.def_abstract_eval(lambda x, *others: x)
anchor_p.def_impl(lambda x, *others: x)
mlir.register_lowering(anchor_p, lambda context, x, *others: [x])

# Where JAX runs operation by operation (`jax.disable_jit`), each is a program, and a
# start moves everything.

h2d_start_p.def_impl(h2d_p.bind)
d2h_start_p.def_impl(d2h_p.bind)
d2h_into_start_p.def_impl(d2h_into_p.bind)
fetch_start_p.def_impl(fetch_p.bind)
store_start_p.def_impl(store_p.bind)
done_p.def_impl(lambda buffer, *read, target, num_marks=0: buffer)

# What the ties below say, for XLA:CPU. It drops those before it orders a program and
# gives out memory: a start might come last, or a done first, and so share memory with
# the computation, and one would wait for the other. `mark_p` gives a mark that what it
# takes is there; `after_p` gives `x`, not before the mark. Dones take the marks of all
# starts, too, or XLA could copy what is in flight for the mark to read. Elsewhere, and
# where XLA splits the program over devices (it would gather `x`), there are none.

mark_p: Any = Primitive("turbobus_mark")
mark_p.def_abstract_eval(lambda *values: _scalar_aval(values[0]))
mark_p.def_impl(lambda *values: np.int32(0))
_lower_zero = mlir.lower_fun(lambda *_: jax.numpy.int32(0), multiple_results=False)


def _lower_mark_cpu(context: Any, *values: Any) -> Any:
    if _compat.partitions_automatically(context):
        return _lower_zero(context, *values)
    return _ffi(context, "turbobus_mark", values)


mlir.register_lowering(mark_p, _lower_zero)
mlir.register_lowering(mark_p, _lower_mark_cpu, platform="cpu")

after_p: Any = Primitive("turbobus_after")
after_p.def_abstract_eval(lambda x, mark: x)
after_p.def_impl(lambda x, mark: x)


def _lower_after_cpu(context: Any, x: Any, mark: Any) -> Any:
    if _compat.partitions_automatically(context):
        return [x]
    return _ffi(context, "turbobus_after", [x, mark], aliases={0: 0})


mlir.register_lowering(after_p, lambda context, x, mark: [x])
mlir.register_lowering(after_p, _lower_after_cpu, platform="cpu")

# All of its operands are there before any of its results is: what keeps start,
# compute and done in this order, and a done in a program that uses only one of
# the results that came with it.

tie_p: Any = Primitive("turbobus_tie")
tie_p.multiple_results = True
tie_p.def_abstract_eval(lambda *avals: list(avals))
tie_p.def_impl(lambda *args: list(args))


def _lower_tie(context: Any, *operands: Any) -> Any:
    del context
    barrier: Any = stablehlo.OptimizationBarrierOp(list(operands)) if operands else None
    return barrier.results if operands else []


def _lower_tie_cpu(context: Any, *operands: Any) -> Any:
    # XLA:CPU drops the barrier in the end. It then starts what it can and waits for
    # nothing that a transfer in flight holds up, except in programs and loop bodies
    # of eight operations or fewer, which it runs one by one. These make it nine.
    if not _compat.partitions_automatically(context):
        nop = jax.ffi.ffi_lowering("turbobus_nop", has_side_effect=True)
        aval = jax.typeof(np.int32(0))
        for _ in range(3):  # in each of three ties
            nop(context.replace(avals_in=[], avals_out=[aval]))
    return _lower_tie(context, *operands)


mlir.register_lowering(tie_p, _lower_tie)
mlir.register_lowering(tie_p, _lower_tie_cpu, platform="cpu")
