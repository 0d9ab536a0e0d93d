"""Primitives around an exchange that is under way: what JAX and XLA must keep in order.

On GPUs an exchange can be started, on a stream of its own, and finished later, while
the program computes (cc/moe/cuda/side_streams.h). What it reads and writes is not to be
touched in between. Elsewhere a start is the whole exchange, and these do nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from jax_turbobus import _compat, _ffi
from jax_turbobus.moe import _devices

__all__ = [
    "anchor",
    "barrier",
    "blank",
    "count",
    "finish",
    "in_order",
    "lower_zeros",
]


def barrier(values: Sequence[Any]) -> list[Any]:
    """Returns IR values that XLA takes into no fusion with what made or uses them."""
    if not values:
        return []
    op: Any = stablehlo.OptimizationBarrierOp(list(values))
    return list(op.results)


def _define(name: str, abstract_eval: Callable[..., Any]) -> Any:
    primitive = Primitive(f"turbobus_moe_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(functools.partial(_same, abstract_eval))
    mlir.register_lowering(
        primitive,
        lambda ctx, *operands, **params: list(operands[: len(ctx.avals_out)]),
    )
    return primitive


def _same(abstract_eval: Callable[..., Any], *args: Any, **params: Any) -> Any:
    return list(args[: len(abstract_eval(*args, **params))])


# `finish`: the results of a start, then what it read. Returns the former.

_finish_p = _define(
    "finish", lambda *avals, num_results, axes: list(avals[:num_results])
)


def _finish_batch(args: Any, dims: Any, *, num_results: int, axes: Any) -> Any:
    del axes  # Starts are whole exchanges under `vmap` (`_primitives`).
    return args[:num_results], dims[:num_results]


batching.primitive_batchers[_finish_p] = _finish_batch


def _lower_finish_gpu(ctx: Any, *operands: Any, num_results: int, axes: Any) -> Any:
    if _devices.why_apart_on_gpus(ctx) is not None:
        return list(operands[:num_results])
    _ffi.register()
    # With a side effect, or XLA would leave it out where the results are not used,
    # and give away what its start still writes.
    rule = jax.ffi.ffi_lowering(
        "turbobus_moe_finish",
        operand_output_aliases={i: i for i in range(num_results)},
        has_side_effect=True,
    )
    op = "exchange over axis " + ", ".join(map(str, axes))
    return barrier(rule(ctx, *barrier(operands), op=op))


mlir.register_lowering(_finish_p, _lower_finish_gpu, platform="cuda")


def finish(
    results: Sequence[jax.Array], read: Sequence[jax.Array], axes: tuple[Any, ...]
) -> list[jax.Array]:
    """Returns the results of a start, complete.

    Args:
      results: all that the start returned.
      read: all that it reads, kept until here.
      axes: of its ranks, for messages.
    """
    return _finish_p.bind(  # type: ignore[no-any-return]
        *results, *read, num_results=len(results), axes=axes
    )


# `count`: for each dispatch to come, what names its count: the ids themselves, where no
# host has to know.

_count_p = _define("count", lambda *avals, **params: list(avals))


def _lower_count_gpu(ctx: Any, *ids: Any, axes: Any, **attributes: Any) -> Any:
    is_needed = (
        _devices.why_apart_on_gpus(ctx) is None
        and _devices.why_through_host(ctx) is not None
    )
    if not is_needed:
        return list(ids)
    _ffi.register()
    rule = jax.ffi.ffi_lowering("turbobus_moe_count")
    ranks = _devices.ranks_of(ctx, axes)
    return barrier(rule(ctx, *barrier(ids), **ranks, **attributes))


mlir.register_lowering(_count_p, _lower_count_gpu, platform="cuda")
# Starts are whole exchanges under `vmap`, which are not counted.
batching.primitive_batchers[_count_p] = lambda args, dims, **params: (args, dims)


def count(
    ids: Sequence[jax.Array], axes: tuple[Any, ...], **attributes: Any
) -> list[jax.Array]:
    """Returns ``int32[num_tokens, top_k]`` for each array of ids, not to be read.

    Their starts take them: where GPUs do not reach each other's memory, the host then
    knows how many rows there are before it comes to a start.

    Args:
      ids: expert ids of dispatches to come, of one shape.
      axes: of the ranks.
      attributes: of the call.
    """
    return _count_p.bind(*ids, axes=axes, **attributes)  # type: ignore[no-any-return]


# `in_order`: all of its operands are there before any of its results is.

_in_order_p = _define("in_order", lambda *avals, on_gpus: list(avals))


def _in_order_batch(args: Any, dims: Any, *, on_gpus: bool) -> Any:
    return _in_order_p.bind(*args, on_gpus=on_gpus), dims


def _in_order_jvp(primals: Any, tangents: Any, *, on_gpus: bool) -> Any:
    out = _in_order_p.bind(*primals, on_gpus=on_gpus)
    return out, _of_nonzero(tangents, on_gpus)


def _in_order_transpose(cotangents: Any, *args: Any, on_gpus: bool) -> Any:
    del args
    return _of_nonzero(cotangents, on_gpus)


def _of_nonzero(values: Any, on_gpus: bool) -> list[Any]:
    """Returns tangents or cotangents, those that are not zero in order too."""
    there = [v for v in values if type(v) is not ad.Zero]
    done = iter(_in_order_p.bind(*there, on_gpus=on_gpus) if there else [])
    return [v if type(v) is ad.Zero else next(done) for v in values]


def _in_order_dce(used: Any, *others: Any) -> Any:
    # Without it, a start could stay whose finish nobody uses.
    eqn = others[-1]  # JAX 0.12 says before it which operands live.
    if not any(used):
        return [False] * len(used), None
    keep = [i for i, is_used in enumerate(used) if is_used]
    return used, eqn.replace(
        invars=[eqn.invars[i] for i in keep], outvars=[eqn.outvars[i] for i in keep]
    )


batching.primitive_batchers[_in_order_p] = _in_order_batch
ad.primitive_jvps[_in_order_p] = _in_order_jvp
ad.primitive_transposes[_in_order_p] = _in_order_transpose
pe.dce_rules[_in_order_p] = _in_order_dce


def _lower_in_order(*, is_gpu: bool) -> Any:
    def lower(ctx: Any, *operands: Any, on_gpus: bool) -> Any:
        del ctx
        return barrier(operands) if on_gpus == is_gpu else list(operands)

    return lower


mlir.register_lowering(_in_order_p, _lower_in_order(is_gpu=False))
mlir.register_lowering(_in_order_p, _lower_in_order(is_gpu=True), platform="cuda")


def in_order(*values: jax.Array, on_gpus: bool) -> list[jax.Array]:
    """Returns the values, none of which is there before all are.

    Backwards the same holds for their cotangents.

    Args:
      values: arrays.
      on_gpus: where it holds: on GPUs, or everywhere else.
    """
    return _in_order_p.bind(*values, on_gpus=on_gpus)  # type: ignore[no-any-return]


# `anchor`: JAX moves out of a differentiated loop what is alike in all of its steps. It
# might move a start and leave its finish.

_anchor_p = _define("anchor", lambda x, *others: [x])


def _anchor_batch(args: Any, dims: Any) -> Any:
    return _anchor_p.bind(*args), [dims[0]]


def _anchor_jvp(primals: Any, tangents: Any) -> Any:
    out = _anchor_p.bind(*primals)
    if type(tangents[0]) is ad.Zero:
        return out, [ad.Zero(_compat.tangent_aval(out[0]))]
    return out, _anchor_p.bind(tangents[0], *primals[1:])


def _anchor_transpose(cotangents: Any, x: Any, *others: Any) -> Any:
    del x
    (cotangent,) = cotangents
    if type(cotangent) is not ad.Zero:
        (cotangent,) = _anchor_p.bind(cotangent, *others)
    return [cotangent, *(None for _ in others)]


batching.primitive_batchers[_anchor_p] = _anchor_batch
ad.primitive_jvps[_anchor_p] = _anchor_jvp
ad.primitive_transposes[_anchor_p] = _anchor_transpose


def anchor(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Returns `x`, which for JAX depends on `others`; the program has nothing of it."""
    (x,) = _anchor_p.bind(x, *others)
    return x


# `blank`: float zeros of the shape of `x`, which are not read; `vmap` maps it as `x`.

_blank_p = _define("blank", lambda x: [x.update(dtype=jnp.dtype("float32"))])


def lower_zeros(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Returns the IR of zeros of the one result's type; nothing is read."""
    del operands, params
    (aval,) = ctx.avals_out
    zeros = mlir.lower_fun(
        lambda: jnp.zeros(aval.shape, aval.dtype), multiple_results=False
    )
    return zeros(ctx.replace(avals_in=[]))


mlir.register_lowering(_blank_p, lower_zeros)
batching.primitive_batchers[_blank_p] = lambda args, dims: (_blank_p.bind(*args), dims)


def blank(x: jax.Array) -> jax.Array:
    """Returns ``float32`` zeros of the shape of `x`, mapped by `vmap` as `x` is."""
    (x,) = _blank_p.bind(x)
    return x
