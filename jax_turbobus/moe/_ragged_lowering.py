"""What `ragged_all_to_all` and its transpose become on CPU devices, GPUs and elsewhere.

What ranks must know of each other (a key that names the call, and everybody's
offsets and sizes) is gathered in the lowering: so each call in a program has a key of
its own, whatever JAX's transforms did to the call before. GPUs of one process need
neither: a call is known by its place in the run, and tables are read where they lie, or
mailed.
"""

import functools
import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jax_turbobus import _compat, _ffi
from jax_turbobus.moe import _devices, _keys
from jax_turbobus.moe import _ragged_reference as reference
from jax_turbobus.moe._ragged_reference import Groups

__all__ = ["register"]

_TARGET = "turbobus_ragged_all_to_all"
_log = logging.getLogger("jax_turbobus")

# What a handler for GPUs takes: `kMaxRaggedSlices` in cc/moe/cuda/ragged.h.
_MAX_GPU_SLICES = 16384


def _meet(
    table: jax.Array, axes: tuple[Any, ...], groups: Groups, *deps: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns ``keys, rank, tables`` of the caller's group, through one all-gather."""
    key = _keys.new_key(*deps)
    words = jnp.concatenate([key, table.reshape(-1)])
    gathered = reference.gather_tables(words, axes, groups)
    tables = gathered[:, key.size :].reshape(-1, *table.shape)
    return (
        gathered[:, : key.size],
        reference.group_of(axes, groups),
        jnp.swapaxes(tables, 0, 1),
    )


def _label(axes: tuple[Any, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)


def _exchange_cpu(
    operand: jax.Array, output: jax.Array, table: jax.Array, **params: Any
) -> jax.Array:
    axes, groups = params["axes"], params["groups"]
    call = jax.ffi.ffi_call(
        _TARGET,
        jax.ShapeDtypeStruct(output.shape, output.dtype),
        input_output_aliases={4: 0},
    )
    meeting = _meet(table, axes, groups, operand)
    return call(*meeting, operand, output, axis=_label(axes))


def _collect_cpu(
    cotangent: jax.Array, table: jax.Array, *, num_rows: int, **params: Any
) -> jax.Array:
    axes, groups = params["axes"], params["groups"]
    batches, _, *row = cotangent.shape
    shape = (batches, num_rows, *row)
    call = jax.ffi.ffi_call(
        f"{_TARGET}_transpose", jax.ShapeDtypeStruct(shape, cotangent.dtype)
    )
    return call(*_meet(table, axes, groups, cotangent), cotangent, axis=_label(axes))


def _exchange_anywhere(
    operand: jax.Array, output: jax.Array, table: jax.Array, **params: Any
) -> jax.Array:
    table = jnp.broadcast_to(table, (operand.shape[0], *table.shape[1:]))
    return jax.vmap(
        lambda *args: reference.exchange(
            *args, axis_name=params["axes"], groups=params["groups"]
        )
    )(operand, output, table)


def _collect_anywhere(
    cotangent: jax.Array, table: jax.Array, *, num_rows: int, **params: Any
) -> jax.Array:
    table = jnp.broadcast_to(table, (cotangent.shape[0], *table.shape[1:]))
    return jax.vmap(
        lambda *args: reference.collect(
            *args,
            num_rows=num_rows,
            axis_name=params["axes"],
            groups=params["groups"],
        )
    )(cotangent, table)


def _exchange_gpu(
    operand: jax.Array,
    output: jax.Array,
    table: jax.Array,
    *,
    ranks: dict[str, np.ndarray],
    is_onto_zeros: bool,
    **params: Any,
) -> jax.Array:
    axis = _label(params["axes"])
    result = jax.ShapeDtypeStruct(output.shape, output.dtype)
    if is_onto_zeros:
        onto_zeros = jax.ffi.ffi_call(f"{_TARGET}_onto_zeros", result)
        return _unfused(onto_zeros, table, operand, axis=axis, **ranks)
    call = jax.ffi.ffi_call(_TARGET, result, input_output_aliases={2: 0})
    return _unfused(call, table, operand, output, axis=axis, **ranks)


def _unfused(call: Any, *operands: jax.Array, **attributes: Any) -> jax.Array:
    """Returns the result of a call that XLA takes into no fusion.

    In one that writes a loop's results to their slice, the result of a call would not
    share its buffer with `output`, and the call might run once more outside.
    """
    result = call(*lax.optimization_barrier(operands), **attributes)
    return lax.optimization_barrier(result)  # type: ignore[no-any-return]


# A splat of zero of any dtype. Minus zero is none.
_ZERO = re.compile(r"dense<(0|false|0\.0+e\+00|\(0\.0+e\+00,0\.0+e\+00\))> :")


def _is_zeros(value: Any) -> bool:
    """Returns whether an IR value is known to be zeros, as `jnp.zeros` makes them.

    Most callers pass such an `output`. The handler zeroes what does not arrive, so that
    nobody writes rows twice.
    """
    op = value.owner
    while getattr(op, "name", "") in (
        "stablehlo.broadcast_in_dim",
        "stablehlo.reshape",
    ):
        op = op.operands[0].owner
    if getattr(op, "name", "") != "stablehlo.constant":
        return False
    constant = op.attributes["value"]
    if not isinstance(constant, ir.DenseElementsAttr) or not constant.is_splat:
        return False
    return _ZERO.match(str(constant)) is not None


def _collect_gpu(
    cotangent: jax.Array,
    table: jax.Array,
    *,
    num_rows: int,
    ranks: dict[str, np.ndarray],
    **params: Any,
) -> jax.Array:
    batches, _, *row = cotangent.shape
    call = jax.ffi.ffi_call(
        f"{_TARGET}_transpose",
        jax.ShapeDtypeStruct((batches, num_rows, *row), cotangent.dtype),
    )
    return _unfused(call, table, cotangent, axis=_label(params["axes"]), **ranks)


def _gpu_ranks(ctx: Any, axes: tuple[Any, ...], groups: Groups) -> dict[str, Any]:
    """Returns the attributes that tell a handler its rank and its group."""
    ranks = _devices.ranks_of(ctx, axes)
    if groups is None:
        return ranks
    position = np.zeros((2, sum(map(len, groups))), np.int64)
    for i, group in enumerate(groups):
        position[0, list(group)] = i
        position[1, list(group)] = np.arange(len(group))
    index = ranks["ranks"]
    return ranks | {
        "ranks": position[1, index],
        "groups": ranks["groups"] * len(groups) + position[0, index],
    }


def _why_not_on_gpus(
    ctx: Any, num_slices: int, num_batches: int, num_rows: int, num_ranks: int
) -> str | None:
    """Returns why handlers for GPUs cannot do it, or None.

    Args:
      ctx: of the lowering.
      num_slices: of each rank.
      num_batches: entries of the leading axis.
      num_rows: the most rows of an operand or result, of all batches together.
      num_ranks: that exchange with each other.
    """
    if num_ranks > _devices.MAX_GPU_RANKS:
        return f"{num_ranks} ranks, at most {_devices.MAX_GPU_RANKS} on GPUs"
    if num_slices > _MAX_GPU_SLICES:
        return f"{num_slices} slices, at most {_MAX_GPU_SLICES} on GPUs"
    apart = _devices.why_apart_on_gpus(ctx)
    if apart is not None or (host := _devices.why_through_host(ctx)) is None:
        return apart
    # There a rank's rows are packed piece by piece: slices, cut where others meet them.
    num_pieces = 2 * num_slices * num_ranks * num_batches
    if num_pieces > _MAX_GPU_SLICES:
        return (
            f"{host}, and {num_slices} slices on {num_ranks} ranks in {num_batches} "
            f"batches can be {num_pieces} pieces, at most {_MAX_GPU_SLICES}"
        )
    if num_rows * (num_ranks + 1) >= 2**31:
        return f"{host}, and {num_rows} rows on {num_ranks} ranks are too many to pack"
    return None


def _lower_gpu(
    primitive: Primitive, ours: Any, anywhere: Any, *, may_be_onto_zeros: bool = False
) -> None:
    def lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
        _ffi.register()
        axes, sizes, groups = params["axes"], params["sizes"], params["groups"]
        rows, *_, table = ctx.avals_in
        batches = rows.shape[0]
        most_rows = max(rows.shape[1], ctx.avals_out[0].shape[1])
        num_ranks = len(groups[0]) if groups else math.prod(sizes)
        reason = _why_not_on_gpus(
            ctx, table.shape[-1], batches, batches * most_rows, num_ranks
        )
        if reason is None:
            options: dict[str, Any] = {"ranks": _gpu_ranks(ctx, axes, groups)}
            if may_be_onto_zeros:
                options["is_onto_zeros"] = _is_zeros(operands[1])
            function = functools.partial(ours, **options)
        else:
            _log.info(
                "%s over %s: plain JAX collectives: %s",
                primitive.name,
                _label(axes),
                reason,
            )
            function = anywhere
        rule = mlir.lower_fun(function, multiple_results=False)
        with _compat.bound_axes(axes, sizes):
            return rule(ctx, *operands, **params)

    # A cached lowering would not see where its operands come from.
    mlir.register_lowering(primitive, lowering, platform="cuda", cacheable=False)


def _lower(primitive: Primitive, function: Any, platform: str | None) -> None:
    rule = mlir.lower_fun(function, multiple_results=False)

    def lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
        _ffi.register()
        with _compat.bound_axes(params["axes"], params["sizes"]):
            return rule(ctx, *operands, **params)

    mlir.register_lowering(primitive, lowering, platform=platform)


def register(exchange_p: Primitive, collect_p: Primitive) -> None:
    """Registers the lowerings.

    Args:
      exchange_p: the primitive; see `_ragged_primitive`.
      collect_p: its transpose in the operand.
    """
    _lower(exchange_p, _exchange_cpu, "cpu")
    _lower(collect_p, _collect_cpu, "cpu")
    _lower_gpu(exchange_p, _exchange_gpu, _exchange_anywhere, may_be_onto_zeros=True)
    _lower_gpu(collect_p, _collect_gpu, _collect_anywhere)
    _lower(exchange_p, _exchange_anywhere, None)
    _lower(collect_p, _collect_anywhere, None)
