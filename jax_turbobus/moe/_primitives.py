"""JAX primitives for calls in which all ranks of a mesh axis meet.

They are primitives of our own, not `jax.ffi.ffi_call`, for two rules that it cannot
state: `new_key` has a side effect for XLA but none for JAX (so that remat may
recompute it and grad may see it), and under `vmap` the operands that say who meets
stay as they are while the others get a leading axis.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from jax_turbobus import _ffi

__all__ = ["KEY_SIZE", "NUM_MEETING_OPERANDS", "exchange_primitive", "new_key"]

# s32 words of a key: `kKeySize` in cc/ffi/moe_call.h.
KEY_SIZE = 4

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
      not_attributes: parameters that the FFI target does not take.
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
        out = primitive.bind(*meeting, *data, **params)
        return out, [0] * len(out)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        _ffi.register()
        attributes = {k: v for k, v in params.items() if k not in not_attributes}
        rule = jax.ffi.ffi_lowering(f"turbobus_moe_{name}")
        return rule(ctx, *operands, **attributes)

    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lower, platform="cpu")
    return primitive


_new_key_p = Primitive("turbobus_moe_key")
_new_key_p.def_impl(functools.partial(xla.apply_primitive, _new_key_p))


def _new_key_abstract_eval(*deps: Any) -> Any:
    return deps[0].update(shape=(KEY_SIZE,), dtype=jax.numpy.dtype("int32"))


_new_key_p.def_abstract_eval(_new_key_abstract_eval)


def _new_key_batch(args: Sequence[Any], dims: Sequence[Any]) -> Any:
    del dims  # One key serves the whole batch: it meets as one call.
    return _new_key_p.bind(*args), _NOT_MAPPED


batching.primitive_batchers[_new_key_p] = _new_key_batch


def _new_key_lowering(ctx: Any, *deps: Any) -> Any:
    del deps
    _ffi.register()
    rule = jax.ffi.ffi_lowering("turbobus_moe_key", has_side_effect=True)
    return rule(ctx.replace(avals_in=[]))


mlir.register_lowering(_new_key_p, _new_key_lowering, platform="cpu")


def new_key(*deps: jax.Array) -> jax.Array:
    """Returns ``int32[4]``, new at each execution, varying over the mesh like `deps`.

    XLA neither merges, hoists nor drops the call. `deps` do not reach it: they are
    what the keyed exchange depends on, so that JAX moves the key out of a loop only
    with the whole exchange, while XLA may make the key before they are computed.
    """
    return _new_key_p.bind(*deps)  # type: ignore[no-any-return]
