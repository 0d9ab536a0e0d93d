"""How a primitive that is one FFI call of docs/ffi.md is made, and what types it gives.

Each lowers to one call a shard, whatever mesh its operands lie on (see `_partition`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jax_turbobus import _compat
from jax_turbobus.offload._partition import Dims, lower_in_shard_map, lower_per_shard

__all__ = [
    "DEVICE",
    "HOST",
    "alike",
    "define",
    "dims_of",
    "emit_ffi",
    "laid_like",
    "register_lowering",
    "row_aval",
    "run_compiled",
    "scalar_aval",
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


def scalar_aval(x: Any) -> Any:
    """Returns the type of an int32 on the devices of `x`."""
    return x.update(
        shape=(),
        dtype=np.dtype(np.int32),
        sharding=x.sharding.update(spec=jax.sharding.PartitionSpec()),
        memory_space=DEVICE,
        weak_type=False,
    )


def dims_of(aval: Any, skip: int | None = None) -> Dims:
    """Returns names for the dimensions of a stack, or of its row along `skip`."""
    ndim = aval.ndim + (skip is not None)
    return tuple(f"d{d}" for d in range(ndim) if d != skip)


def emit_ffi(
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


def define(
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
    run_compiled(primitive)
    register_lowering(
        primitive,
        emit,
        dims,
        follows=follows,
        leads=leads,
        has_side_effect=has_side_effect,
        platform=platform,
    )
    return primitive


def register_lowering(
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


def run_compiled(primitive: Any) -> None:
    """Makes `primitive` one program wherever JAX runs it by itself."""
    _compat.lowers_with_devices(primitive)

    def impl(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return _compiled(primitive, tuple(params.items()))(*args)

    primitive.def_impl(impl)


@functools.cache
def _compiled(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def alike(*avals: Any, **_: Any) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    dims = dims_of(avals[0])
    return [dims] * len(avals), dims, ()
