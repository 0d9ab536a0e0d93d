"""JAX primitives for calls in which all ranks of a mesh axis meet.

They are primitives of our own, not `jax.ffi.ffi_call`, for a rule that it cannot state:
under `vmap` the operands that say who meets stay as they are while the others get a
leading axis. How ranks find each other: `_keys`.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from jax_turbobus import _compat, _ffi
from jax_turbobus.moe import _collectives, _devices, _in_flight, _origins

__all__ = [
    "NUM_MEETING_OPERANDS",
    "exchange_primitive",
    "lower_to_collectives",
    "lower_to_target",
    "start_primitive",
]

_log = logging.getLogger("jax_turbobus")

# `keys` and `rank`, the first operands of every exchange.
NUM_MEETING_OPERANDS = 2

_NOT_MAPPED = None  # `batching.not_mapped`.


def exchange_primitive(
    name: str,
    *,
    out_avals: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    not_attributes: Sequence[str] = (),
) -> Primitive:
    """Returns a primitive that lowers to the FFI target ``turbobus_moe_<name>``.

    Its operands are ``keys, rank, *data``. Every datum has the same leading batch
    axes (`vmap` adds one in front of all of them), and so has every result. All
    operands must vary over the same mesh axes; results do too.

    Args:
      name: of the target, and of the primitive in a jaxpr.
      out_avals: called with the data's avals and the parameters; returns the shapes
        and dtypes of the results.
      not_attributes: parameters that the FFI target does not take. One parameter
        is ``axes``, the mesh axes of the ranks: on GPUs the target takes where they
        are instead (`_devices.ranks_of`). ``num_experts`` and ``top_k`` are two more.
    """

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        reason = _devices.why_apart(ctx, params["axes"])
        if reason is not None:
            return lower_to_collectives(name, ctx, operands, params, reason)
        return lower_to_target(name, ctx, operands, params, not_attributes)

    def lower_gpu(ctx: Any, *operands: Any, **params: Any) -> Any:
        sizes = _devices.sizes_of(ctx, params["axes"])
        reason = _devices.why_apart_on_gpus(ctx) or _devices.why_too_large_for_gpus(
            num_ranks=math.prod(sizes),
            num_experts=int(params["num_experts"]),
            top_k=params["top_k"],
        )
        if reason is not None:
            return lower_to_collectives(name, ctx, operands, params, reason)
        reason = _devices.why_through_host(ctx)
        if reason is not None:
            _log.info(
                "%s over %s: packed, through host memory: %s",
                name,
                params["axis"],
                reason,
            )
        return _lower_data_to_target(name, ctx, operands, params, not_attributes)

    def lower_anywhere(ctx: Any, *operands: Any, **params: Any) -> Any:
        return lower_to_collectives(
            name, ctx, operands, params, "no exchange of our own on this platform"
        )

    primitive = _new_primitive(name, out_avals)
    mlir.register_lowering(primitive, lower_anywhere)
    mlir.register_lowering(primitive, lower, platform="cpu")
    # Not cacheable: JAX lowers what is alike once, where operands have no origin.
    mlir.register_lowering(primitive, lower_gpu, platform="cuda", cacheable=False)
    return primitive


def start_primitive(
    name: str,
    whole: Primitive,
    *,
    out_avals: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    not_attributes: Sequence[str] = (),
    int_bits: Sequence[int] = (),
    num_extra: int = 0,
) -> Primitive:
    """Returns a primitive that starts, on GPUs, what `_in_flight.finish` ends.

    Elsewhere it is the whole exchange.

    Args:
      name: of the exchange; the target is ``turbobus_moe_<name>_start``.
      whole: its primitive.
      out_avals: as for `exchange_primitive`.
      not_attributes: as for `exchange_primitive`.
      int_bits: which of the data are the bits of int32 in a float32.
      num_extra: how many of the data, the last ones, are for the start only.
    """
    name = f"{name}_start"

    def bind_whole(*operands: jax.Array, **params: Any) -> Any:
        data = list(operands[: len(operands) - num_extra])
        for i in int_bits:
            at = NUM_MEETING_OPERANDS + i
            data[at] = lax.bitcast_convert_type(data[at], jnp.int32)
        return whole.bind(*data, **params)

    lower_whole = mlir.lower_fun(bind_whole)

    def lower_gpu(ctx: Any, *operands: Any, **params: Any) -> Any:
        if _devices.why_apart_on_gpus(ctx) is not None:
            return lower_whole(ctx, *operands, **params)
        # Of two starts alike XLA would make one, for two finishes.
        return _lower_data_to_target(
            name, ctx, operands, params, not_attributes, has_side_effect=True
        )

    # Under `vmap` the exchange is whole: it reads copies of what is mapped otherwise,
    # which nobody could keep for the finish.
    primitive = _new_primitive(name, out_avals, batched=bind_whole)
    mlir.register_lowering(primitive, lower_whole)
    # Not cacheable: JAX lowers what is alike once, where operands have no origin.
    mlir.register_lowering(primitive, lower_gpu, platform="cuda", cacheable=False)
    return primitive


def _new_primitive(
    name: str,
    out_avals: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    batched: Callable[..., Any] | None = None,
) -> Primitive:
    """Returns a primitive of ``keys, rank, *data``, without lowerings.

    Args:
      name: in a jaxpr.
      out_avals: as for `exchange_primitive`.
      batched: what `vmap` makes of it; None: the primitive itself.
    """
    primitive = Primitive(f"turbobus_moe_{name}")
    primitive.multiple_results = True

    def abstract_eval(keys: Any, rank: Any, *data: Any, **params: Any) -> list[Any]:
        del rank
        results = out_avals(*data, **params)
        return [keys.update(shape=r.shape, dtype=r.dtype) for r in results]

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        meeting, data = args[:NUM_MEETING_OPERANDS], args[NUM_MEETING_OPERANDS:]
        if any(d is not _NOT_MAPPED for d in dims[:NUM_MEETING_OPERANDS]):
            raise NotImplementedError(
                f"{name}: keys cannot be mapped by vmap; make them inside it"
            )
        data_dims = dims[NUM_MEETING_OPERANDS:]
        size = next(
            x.shape[d]
            for x, d in zip(data, data_dims, strict=True)
            if d is not _NOT_MAPPED
        )
        data = [
            batching.bdim_at_front(x, d, size)
            for x, d in zip(data, data_dims, strict=True)
        ]
        out = (batched or primitive.bind)(*meeting, *data, **params)
        return out, [0] * len(out)

    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = batch
    return primitive


def lower_to_collectives(
    name: str,
    ctx: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
    reason: str,
) -> Any:
    """Returns the IR values of the exchange in XLA's own collectives, and logs why.

    Args:
      name: of the exchange.
      ctx: the `LoweringRuleContext`.
      operands: IR values.
      params: of the primitive.
      reason: why the exchange cannot be one of ours.
    """
    _log.info("%s over %s: plain JAX collectives: %s", name, params["axis"], reason)
    axes = params["axes"]
    with _compat.bound_axes(axes, _devices.sizes_of(ctx, axes)):
        return mlir.lower_fun(_collectives.EXCHANGES[name])(ctx, *operands, **params)


def lower_to_target(
    name: str,
    ctx: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
    not_attributes: Sequence[str] = (),
) -> Any:
    """Returns the IR values of a call to the FFI target ``turbobus_moe_<name>``.

    Args:
      name: of the target.
      ctx: the `LoweringRuleContext`.
      operands: IR values.
      params: of the primitive; all but ``axes`` and `not_attributes` are attributes.
      not_attributes: parameters that the target does not take.
    """
    _ffi.register()
    unused = {"axes", *not_attributes}
    attributes = {k: v for k, v in params.items() if k not in unused}
    rule = jax.ffi.ffi_lowering(f"turbobus_moe_{name}")
    return rule(ctx, *operands, **attributes)


def _lower_data_to_target(
    name: str,
    ctx: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
    not_attributes: Sequence[str],
    *,
    has_side_effect: bool = False,
) -> Any:
    """Returns the IR values of a GPU's call, which knows ranks without operands.

    XLA would take slices that are operands or results into one fusion with the call. A
    fused call runs once more where its result is used elsewhere, too, and a fused
    start reads arrays that nobody keeps until the exchange is finished.
    """
    params = params | _devices.ranks_of(ctx, params["axes"])
    data = list(operands[NUM_MEETING_OPERANDS:])
    is_counted = _origins.is_counted(name, data)
    before = None if is_counted else _origins.counted_before(name, data)
    if before is None:
        data = _in_flight.barrier(data)
    else:
        slots, result = before
        *data, _ = _in_flight.barrier([*data[:-1], slots, result])
    params["is_counted"] = is_counted or before is not None
    ctx = ctx.replace(avals_in=ctx.avals_in[NUM_MEETING_OPERANDS:])
    results = lower_to_target(name, ctx, data, params, not_attributes)
    if has_side_effect:
        _compat.mark_side_effect(results)
    return _in_flight.barrier(results)
