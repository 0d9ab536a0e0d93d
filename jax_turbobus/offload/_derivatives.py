"""How the offload primitives differentiate.

Transfers are linear. The tangent of a transfer in two halves is moved by a plain
transfer, so no half ever stands alone in a derivative.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_turbobus import _compat
from jax_turbobus.offload import _buffers, _marks
from jax_turbobus.offload import _primitives as p

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
        "differentiated by stack, and with offload_inputs=True by anything, in reverse "
        "mode (JAX adds up what comes out of a loop in device memory); here by what "
        f"lies on the host as {stack.aval.str_short()}. Differentiate forward over "
        "reverse, jax.jvp(jax.grad(f), (stack,), (tangent,)); by x and what f closes "
        "over pass offload_inputs=False; or loop over a stack in device memory with "
        "jax.lax.scan"
    )


ad.primitive_transposes[p.fetch_p] = _fetch_transpose
ad.primitive_transposes[p.fetch_rows_p] = _fetch_rows_transpose
ad.primitive_transposes[p.fetch_tangent_p] = _fetch_tangent_transpose
ad.primitive_transposes[p.store_p] = _store_transpose
ad.primitive_jvps[p.place_p] = _place_jvp
ad.primitive_transposes[p.place_p] = _place_transpose

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
ad.primitive_jvps[_marks.mark_p] = _mark_jvp
for _primitive in (_marks.after_p, _marks.anchor_p):
    ad.primitive_jvps[_primitive] = lambda primals, tangents, primitive=_primitive: (
        primitive.bind(*primals),
        tangents[0],
    )
ad.primitive_jvps[_marks.tie_p] = lambda primals, tangents: (
    _marks.tie_p.bind(*primals),
    list(tangents),
)


# Memory that holds anything yet.


def _buffer_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    del tangents
    # All of the tangent is written, too. A zero would be made on the device.
    return _buffers.buffer_p.bind(*primals, **params), _buffers.buffer_p.bind(
        *primals, **params
    )


ad.primitive_jvps[_buffers.buffer_p] = _buffer_jvp


def _joint_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    del tangents
    # Nobody reads it: it only has to be one that is no zero.
    return _marks.joint_p.bind(*primals), _marks.joint_p.bind(*primals)


ad.primitive_jvps[_marks.joint_p] = _joint_jvp

# The gradients of a batch that shares a stack.


def _batch_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, differentiated: bool
) -> tuple[Any, Any]:
    del tangents, differentiated
    batch = _marks.batch_p.bind(*primals, differentiated=True)
    return batch, _zero_like(batch)


ad.primitive_jvps[_marks.batch_p] = _batch_jvp


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
