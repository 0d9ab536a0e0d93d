"""How the offload primitives batch: their rules for `vmap`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jax_turbobus.offload import _buffers, _marks
from jax_turbobus.offload import _primitives as p
from jax_turbobus.offload._define import laid_like, row_aval

__all__: list[str] = []


def _move_batch_dim(primitive: Any) -> Any:
    def batch(
        args: Sequence[Any], dims: Sequence[Any], **params: Any
    ) -> tuple[Any, Any]:
        return primitive.bind(*args, **params), dims[0]

    return batch


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


def _batch_buffer(
    args: Sequence[Any], dims: Sequence[Any], *, sizes: tuple[int, ...]
) -> tuple[Any, int]:
    if _is_mapped(dims[0]):
        return _buffers.buffer_p.bind(*args, sizes=sizes), dims[0] + len(sizes)
    return _buffers.buffer_p.bind(*args, sizes=(_batch_size(args, dims), *sizes)), 0


def _batch_batch(
    args: Sequence[Any], dims: Sequence[Any], *, differentiated: bool
) -> tuple[Any, Any]:
    batch = _marks.batch_p.bind(*args, differentiated=differentiated)
    if differentiated:
        return batch, None
    return _at(batch, None, _batch_size(args, dims), 0), 0


def _batch_joint(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    return _at(_marks.joint_p.bind(*args), None, _batch_size(args, dims), 0), 0


def _batch_total(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    grad, stack, batch = args
    over_grad, over_stack, over_batch = map(_is_mapped, dims)
    if over_grad and over_batch and not over_stack:
        return _marks.total_p.bind(
            grad.sum(dims[0], dtype=grad.dtype), stack, batch
        ), None
    return _marks.total_p.bind(grad, stack, batch), dims[0]


def _batch_mark(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, None]:
    del dims
    return _marks.mark_p.bind(*args), None


def _batch_tie(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, list[Any]]:
    return _marks.tie_p.bind(*args), list(dims)


_RULES: dict[Any, Any] = {
    **{
        primitive: _move_batch_dim(primitive)
        for primitive in (
            p.h2d_p,
            p.h2d_start_p,
            p.d2h_p,
            p.d2h_start_p,
            p.done_p,
            _marks.after_p,
            _marks.anchor_p,
        )
    },
    p.d2h_into_p: _batch_into(p.d2h_into_p),
    p.d2h_into_start_p: _batch_into(p.d2h_into_start_p),
    p.fetch_p: _batch_fetch(p.fetch_p),
    p.fetch_start_p: _batch_fetch(p.fetch_start_p),
    p.fetch_tangent_p: _batch_fetch(p.fetch_tangent_p),
    p.fetch_rows_p: _batch_fetch_rows,
    p.store_p: _batch_store(p.store_p),
    p.store_start_p: _batch_store(p.store_start_p),
    p.place_p: _batch_place,
    _buffers.buffer_p: _batch_buffer,
    _marks.mark_p: _batch_mark,
    _marks.tie_p: _batch_tie,
    _marks.batch_p: _batch_batch,
    _marks.joint_p: _batch_joint,
    _marks.total_p: _batch_total,
}
for _primitive, _rule in _RULES.items():
    batching.primitive_batchers[_primitive] = _rule
