"""JAX primitives for calls in which all ranks of a mesh axis meet.

They are primitives of our own, not `jax.ffi.ffi_call`, for two rules that it cannot
state: `new_key` has a side effect for XLA but none for JAX (so that remat may
recompute it and grad may see it), and under `vmap` the operands that say who meets
stay as they are while the others get a leading axis.
"""

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


def _lower(primitive: Primitive, target: str, *, has_side_effect: bool = False) -> None:
    rule = jax.ffi.ffi_lowering(target, has_side_effect=has_side_effect)

    def lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
        _ffi.register()
        return rule(ctx, *operands, **params)

    mlir.register_lowering(primitive, lowering, platform="cpu")


def exchange_primitive(
    name: str,
    *,
    out_avals: Callable[..., Sequence[jax.ShapeDtypeStruct]],
) -> Primitive:
    """Returns a primitive that lowers to the FFI target ``turbobus_moe_<name>``.

    Its operands are ``keys, rank, *data``. Every datum has the same leading batch
    axes (`vmap` adds one in front of all of them), and so has every result. All
    operands must vary over the same mesh axes; results do too.

    Args:
      name: of the target, and of the primitive in a jaxpr.
      out_avals: called with the data's avals and the parameters; returns the shapes
        and dtypes of the results.
    """
    primitive = Primitive(f"turbobus_moe_{name}")
    primitive.multiple_results = True

    def abstract_eval(keys: Any, rank: Any, *data: Any, **params: Any) -> list[Any]:
        del rank
        results = out_avals(*data, **params)
        return [keys.update(shape=r.shape, dtype=r.dtype) for r in results]

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        meeting, data = args[:NUM_MEETING_OPERANDS], args[NUM_MEETING_OPERANDS:]
        if any(d is not batching.not_mapped for d in dims[:NUM_MEETING_OPERANDS]):
            raise NotImplementedError(
                f"{name}: keys cannot be mapped by vmap; make them inside it"
            )
        data_dims = dims[NUM_MEETING_OPERANDS:]
        size = next(
            x.shape[d]
            for x, d in zip(data, data_dims, strict=True)
            if d is not batching.not_mapped
        )
        data = [
            batching.bdim_at_front(x, d, size)
            for x, d in zip(data, data_dims, strict=True)
        ]
        out = primitive.bind(*meeting, *data, **params)
        return out, [0] * len(out)

    primitive.def_impl(lambda *args, **kw: xla.apply_primitive(primitive, *args, **kw))
    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = batch
    _lower(primitive, f"turbobus_moe_{name}")
    return primitive


_new_key_p = Primitive("turbobus_moe_key")
_new_key_p.def_impl(lambda *deps: xla.apply_primitive(_new_key_p, *deps))


@_new_key_p.def_abstract_eval
def _new_key_abstract_eval(*deps: Any) -> Any:
    return deps[0].update(shape=(KEY_SIZE,), dtype=jax.numpy.dtype("int32"))


def _new_key_batch(args: Sequence[Any], dims: Sequence[Any]) -> Any:
    del dims  # One key serves the whole batch: it meets as one call.
    return _new_key_p.bind(*args), batching.not_mapped


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
