"""How the offload primitives differentiate and batch.

Transfers are linear. The tangent of a transfer in two halves is moved by a plain
transfer, so no half ever stands alone in a derivative.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from jax_turbobus import _compat
from jax_turbobus.offload import _marks
from jax_turbobus.offload import _primitives as p
from jax_turbobus.offload._define import laid_like, row_aval

__all__: list[str] = []

Zero = ad.Zero


def _zero_like(value: Any) -> Any:
    return Zero(_compat.tangent_aval(value))


# Copies.

ad.deflinear2(p.h2d_p, lambda ct, x: [p.d2h(ct)])
ad.deflinear2(p.d2h_p, lambda ct, x, **_: [p.h2d_p.bind(ct)])


def _copy_jvp(primitive: Any, move_tangent: Any) -> Any:
    """Returns the rule: the tangent of operand 0 is moved, `out` has no say."""

    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[Any, Any]:
        result = primitive.bind(*primals, **params)
        if isinstance(tangents[0], Zero):
            return result, _zero_like(result)
        return result, move_tangent(tangents[0])

    return jvp


for _primitive, _tangent in (
    (p.h2d_start_p, p.h2d_p.bind),
    (p.d2h_start_p, p.d2h),
    (p.d2h_into_p, p.d2h),
    (p.d2h_into_start_p, p.d2h),
):
    ad.primitive_jvps[_primitive] = _copy_jvp(_primitive, _tangent)


def _move_batch_dim(primitive: Any) -> Any:
    def batch(
        args: Sequence[Any], dims: Sequence[Any], **params: Any
    ) -> tuple[Any, Any]:
        return primitive.bind(*args, **params), dims[0]

    return batch


for _primitive in (p.h2d_p, p.h2d_start_p, p.d2h_p, p.d2h_start_p):
    batching.primitive_batchers[_primitive] = _move_batch_dim(_primitive)


def _batch_size(args: Sequence[Any], dims: Sequence[Any]) -> Any:
    return next(x.shape[d] for x, d in zip(args, dims, strict=True) if _is_mapped(d))


def _is_mapped(dim: Any) -> bool:
    return dim is not None


def _at(x: Any, dim: Any, size: int, to: int) -> Any:
    """Returns a device array with its batch dimension at `to`."""
    if not _is_mapped(dim):
        return jnp.broadcast_to(
            jnp.expand_dims(x, to), (*x.shape[:to], size, *x.shape[to:])
        )
    return jnp.moveaxis(x, dim, to)


def _batch_into(primitive: Any) -> Any:
    def batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
        x, out = args
        if not _is_mapped(dims[1]):
            raise ValueError(
                "to_host under vmap: argument out must be mapped over the batch, "
                f"as x is; got an unmapped out of shape {out.shape} for x of shape "
                f"{x.shape} mapped over axis {dims[0]}. Add out to in_axes, or leave "
                "it out"
            )
        size = _batch_size(args, dims)
        x = laid_like(_at(x, dims[0], size, dims[1]), jax.typeof(out))
        return primitive.bind(x, out), dims[1]

    return batch


for _primitive in (p.d2h_into_p, p.d2h_into_start_p):
    batching.primitive_batchers[_primitive] = _batch_into(_primitive)

# Rows. A tangent of a stack is a stack in host memory too.


def _fetch_jvp(primitive: Any, tangent_primitive: Any) -> Any:
    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], *, axis: int
    ) -> tuple[Any, Any]:
        row = primitive.bind(*primals, axis=axis)
        if isinstance(tangents[0], Zero):
            return row, _zero_like(row)
        return row, tangent_primitive.bind(tangents[0], primals[1], axis=axis)

    return jvp


def _store_jvp(primitive: Any) -> Any:
    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], *, axis: int
    ) -> tuple[Any, Any]:
        stack = primitive.bind(*primals, axis=axis)
        stack_dot, _, row_dot = tangents
        _, index, row = primals
        if isinstance(row_dot, Zero):
            if isinstance(stack_dot, Zero):
                return stack, _zero_like(stack)
            row_dot = jnp.zeros_like(row)
        if isinstance(stack_dot, Zero):
            length = stack.shape[axis]
            return stack, p.place(row_dot, index, axis=axis, length=length)
        return stack, p.store_p.bind(stack_dot, index, row_dot, axis=axis)

    return jvp


for _primitive, _tangent_primitive in (
    (p.fetch_p, p.fetch_p),
    (p.fetch_start_p, p.fetch_tangent_p),
    (p.fetch_tangent_p, p.fetch_tangent_p),
    (p.fetch_rows_p, p.fetch_rows_p),
):
    ad.primitive_jvps[_primitive] = _fetch_jvp(_primitive, _tangent_primitive)
for _primitive in (p.store_p, p.store_start_p):
    ad.primitive_jvps[_primitive] = _store_jvp(_primitive)


def _fetch_transpose(ct: Any, stack: Any, index: Any, *, axis: int) -> list[Any]:
    aval = stack.aval if ad.is_undefined_primal(stack) else jax.typeof(stack)
    if isinstance(ct, Zero):
        return [Zero(aval), None]
    return [p.place(ct, index, axis=axis, length=aval.shape[axis]), None]


def _store_transpose(
    ct: Any, stack: Any, index: Any, row: Any, *, axis: int
) -> list[Any]:
    if isinstance(ct, Zero):
        operands = (stack, index, row)
        return [Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    row_ct = p.fetch_p.bind(ct, index, axis=axis)
    stack_ct = None
    if ad.is_undefined_primal(stack):
        stack_ct = p.store_p.bind(ct, index, jnp.zeros_like(row_ct), axis=axis)
    return [stack_ct, None, row_ct if ad.is_undefined_primal(row) else None]


def _place_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    stack = p.place_p.bind(*primals, **params)
    if isinstance(tangents[0], Zero):
        return stack, _zero_like(stack)
    return stack, p.place_p.bind(tangents[0], primals[1], **params)


def _place_transpose(
    ct: Any, row: Any, index: Any, *, axis: int, **_: Any
) -> list[Any]:
    if isinstance(ct, Zero):
        return [Zero(row.aval), None]
    return [p.fetch_p.bind(ct, index, axis=axis), None]


def _fetch_rows_transpose(ct: Any, stack: Any, indices: Any, *, axis: int) -> list[Any]:
    aval = stack.aval
    if isinstance(ct, Zero) or not indices.size:
        return [Zero(aval), None]
    rows = p.placed_rows(ct, indices, axis=axis, length=aval.shape[axis])
    return [p.d2h(rows), None]


def _fetch_tangent_transpose(ct: Any, stack: Any, index: Any, *, axis: int) -> Any:
    del ct, index, axis
    raise NotImplementedError(
        "scan_layers: argument stack: a derivative of scan_layers cannot itself be "
        "differentiated by stack in reverse mode (JAX adds up what comes out of a loop "
        f"in device memory); stack is {stack.aval.str_short()}. Differentiate forward "
        "over reverse, jax.jvp(jax.grad(f), (stack,), (tangent,)), or loop over a "
        "stack in device memory with jax.lax.scan"
    )


ad.primitive_transposes[p.fetch_p] = _fetch_transpose
ad.primitive_transposes[p.fetch_rows_p] = _fetch_rows_transpose
ad.primitive_transposes[p.fetch_tangent_p] = _fetch_tangent_transpose
ad.primitive_transposes[p.store_p] = _store_transpose
ad.primitive_jvps[p.place_p] = _place_jvp
ad.primitive_transposes[p.place_p] = _place_transpose


_MAPPED_INDEX = (
    "vmap over the index of a row that moves beside a computation; use fetch or "
    "store, which may be mapped over it"
)


def _flatten_rows(stack: Any, dim: int, index: Any, axis: int) -> tuple[Any, Any]:
    """Returns a batch of stacks as one, and the index of each one's row in it.

    `index` may have more dimensions behind that of the batch: several rows of each.
    """
    if dim != 0 or axis != 0:
        raise NotImplementedError(
            "vmap over both the stack and the index of fetch or store: the stack "
            f"must be mapped over axis 0, with its layers next; got axis {dim} with "
            f"layers along {axis + (dim <= axis)}"
        )
    size, length = stack.shape[:2]
    flat = jax.lax.reshape(stack, (size * length, *stack.shape[2:]))
    clamped = jnp.clip(index, 0, length - 1)
    first = jnp.arange(size, dtype=jnp.int32) * length
    return flat, first.reshape(size, *(1,) * (index.ndim - 1)) + clamped


def _batch_fetch(primitive: Any) -> Any:
    def batch(
        args: Sequence[Any], dims: Sequence[Any], *, axis: int
    ) -> tuple[Any, int]:
        stack, index = args
        if not _is_mapped(dims[1]):
            # One row of every stack: the batch dimension stays where it was.
            shifted = axis + (dims[0] <= axis)
            row = primitive.bind(stack, index, axis=shifted)
            return row, dims[0] - (dims[0] > shifted)
        if primitive is not p.fetch_p:
            raise NotImplementedError(_MAPPED_INDEX)
        if _is_mapped(dims[0]):
            stack, index = _flatten_rows(stack, dims[0], index, axis)
        rows = p.fetch_rows_p.bind(stack, index, axis=axis)
        return rows, 0

    return batch


def _batch_fetch_rows(
    args: Sequence[Any], dims: Sequence[Any], *, axis: int
) -> tuple[Any, int]:
    stack, indices = args
    if not _is_mapped(dims[1]):
        shifted = axis + (dims[0] <= axis)
        rows = p.fetch_rows_p.bind(stack, indices, axis=shifted)
        return rows, 1 + dims[0] - (dims[0] > shifted)
    indices = jnp.moveaxis(indices, dims[1], 0)
    if _is_mapped(dims[0]):
        stack, indices = _flatten_rows(stack, dims[0], indices, axis)
    rows = p.fetch_rows_p.bind(stack, indices.reshape(-1), axis=axis)
    return rows.reshape(*indices.shape, *rows.shape[1:]), 0


def _batch_store(primitive: Any) -> Any:
    def batch(
        args: Sequence[Any], dims: Sequence[Any], *, axis: int
    ) -> tuple[Any, int]:
        stack, index, row = args
        if not _is_mapped(dims[0]):
            raise ValueError(
                "store under vmap: argument stack must be mapped over the batch, "
                "as the index or x is; otherwise all would write to one row. Add "
                "stack to in_axes"
            )
        size = _batch_size(args, dims)
        if not _is_mapped(dims[1]):
            shifted = axis + (dims[0] <= axis)
            row = _at(row, dims[2], size, dims[0] - (dims[0] > shifted))
            row = laid_like(row, row_aval(jax.typeof(stack), shifted))
            return primitive.bind(stack, index, row, axis=shifted), dims[0]
        if primitive is not p.store_p:
            raise NotImplementedError(_MAPPED_INDEX)
        shape = stack.shape
        stack, index = _flatten_rows(stack, dims[0], index, axis)
        rows = _at(row, dims[2], size, 0)

        def body(b: Any, stack: Any) -> Any:
            row = laid_like(rows[b], row_aval(jax.typeof(stack), 0))
            return p.store_p.bind(stack, index[b], row, axis=0)

        stack = jax.lax.fori_loop(0, size, body, stack)
        return jax.lax.reshape(stack, shape), 0

    return batch


def _batch_place(
    args: Sequence[Any], dims: Sequence[Any], *, axis: int, length: int, **_: Any
) -> tuple[Any, int]:
    row, index = args
    if not _is_mapped(dims[1]):
        # One row of every stack: the batch dimension stays before or after it.
        shifted = axis + (dims[0] <= axis)
        stack = p.place(row, index, axis=shifted, length=length)
        return stack, dims[0] + (dims[0] > axis)
    rows = _at(row, dims[0], _batch_size(args, dims), 0)
    return p.d2h(
        jax.vmap(lambda *each: p.placed(*each, axis=axis, length=length))(rows, index)
    ), 0


for _primitive in (p.fetch_p, p.fetch_start_p, p.fetch_tangent_p):
    batching.primitive_batchers[_primitive] = _batch_fetch(_primitive)
batching.primitive_batchers[p.fetch_rows_p] = _batch_fetch_rows
for _primitive in (p.store_p, p.store_start_p):
    batching.primitive_batchers[_primitive] = _batch_store(_primitive)

batching.primitive_batchers[p.place_p] = _batch_place

# Second halves and order.


def _done_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    return p.done_p.bind(*primals, **params), tangents[0]


def _mark_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    del tangents
    mark = _marks.mark_p.bind(*primals)
    return mark, _zero_like(mark)


ad.primitive_jvps[p.done_p] = _done_jvp
batching.primitive_batchers[p.done_p] = _move_batch_dim(p.done_p)
ad.primitive_jvps[_marks.mark_p] = _mark_jvp
batching.primitive_batchers[_marks.mark_p] = lambda args, dims: (
    _marks.mark_p.bind(*args),
    None,
)
for _primitive in (_marks.after_p, _marks.anchor_p):
    ad.primitive_jvps[_primitive] = lambda primals, tangents, primitive=_primitive: (
        primitive.bind(*primals),
        tangents[0],
    )
    batching.primitive_batchers[_primitive] = _move_batch_dim(_primitive)
ad.primitive_jvps[_marks.tie_p] = lambda primals, tangents: (
    _marks.tie_p.bind(*primals),
    list(tangents),
)
batching.primitive_batchers[_marks.tie_p] = lambda args, dims: (
    _marks.tie_p.bind(*args),
    list(dims),
)


# Memory that holds anything yet.


def _buffer_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    del tangents
    # All of the tangent is written, too. A zero would be made on the device.
    return p.buffer_p.bind(*primals, **params), p.buffer_p.bind(*primals, **params)


def _buffer_batch(
    args: Sequence[Any], dims: Sequence[Any], *, sizes: tuple[int, ...]
) -> tuple[Any, int]:
    if _is_mapped(dims[0]):
        return p.buffer_p.bind(*args, sizes=sizes), dims[0] + len(sizes)
    return p.buffer_p.bind(*args, sizes=(_batch_size(args, dims), *sizes)), 0


ad.primitive_jvps[p.buffer_p] = _buffer_jvp
batching.primitive_batchers[p.buffer_p] = _buffer_batch

# The gradients of a batch that shares a stack.


def _batch_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, differentiated: bool
) -> tuple[Any, Any]:
    del tangents, differentiated
    batch = _marks.batch_p.bind(*primals, differentiated=True)
    return batch, _zero_like(batch)


def _batch_batch(
    args: Sequence[Any], dims: Sequence[Any], *, differentiated: bool
) -> tuple[Any, Any]:
    batch = _marks.batch_p.bind(*args, differentiated=differentiated)
    if differentiated:
        return batch, None
    return _at(batch, None, _batch_size(args, dims), 0), 0


ad.primitive_jvps[_marks.batch_p] = _batch_jvp
batching.primitive_batchers[_marks.batch_p] = _batch_batch


def _total_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    grad, stack, batch = args
    over_grad, over_stack, over_batch = map(_is_mapped, dims)
    if over_grad and over_batch and not over_stack:
        return _marks.total_p.bind(
            grad.sum(dims[0], dtype=grad.dtype), stack, batch
        ), None
    return _marks.total_p.bind(grad, stack, batch), dims[0]


def _total_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    grad, stack, batch = primals
    total = _marks.total_p.bind(grad, stack, batch)
    if isinstance(tangents[0], Zero):
        return total, _zero_like(total)
    return total, _marks.total_p.bind(tangents[0], stack, batch)


ad.primitive_jvps[_marks.total_p] = _total_jvp
ad.primitive_transposes[_marks.total_p] = lambda ct, grad, stack, batch: [
    ct,
    None,
    None,
]
batching.primitive_batchers[_marks.total_p] = _total_batch
