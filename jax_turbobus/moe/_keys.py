"""Keys by which the ranks of a call on CPU devices find each other.

A key is a number that no other call of the process has (docs/moe.md, "How the ranks of
a call find each other"). Making one has a side effect for XLA but none for JAX, so that
remat may recompute it and grad may see it.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from jax_turbobus import _compat, _ffi
from jax_turbobus.moe import _devices, _in_flight

__all__ = ["KEY_SIZE", "gather_keys", "new_key"]

# s32 words of a key: `kKeySize` in cc/ffi/moe_call.h.
KEY_SIZE = 4

_NOT_MAPPED = None  # `batching.not_mapped`.

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


_gather_keys_p = Primitive("turbobus_moe_gather_keys")
_gather_keys_p.def_impl(functools.partial(xla.apply_primitive, _gather_keys_p))


def _gather_keys_abstract_eval(
    *deps: Any, axes: tuple[Any, ...], sizes: tuple[int, ...]
) -> Any:
    del axes
    shape = (math.prod(sizes), KEY_SIZE)
    return deps[0].update(shape=shape, dtype=jnp.dtype("int32"))


def _gather_keys_batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    del dims
    return _gather_keys_p.bind(*args, **params), _NOT_MAPPED


def _gather_keys_cpu(ctx: Any, *deps: Any, axes: Any, sizes: Any) -> Any:
    if _devices.why_apart(ctx, axes) is not None:
        return _in_flight.lower_zeros(ctx)
    _ffi.register()
    gather = mlir.lower_fun(
        lambda *deps: lax.all_gather(new_key(*deps), axes), multiple_results=False
    )
    with _compat.bound_axes(axes, sizes):
        return gather(ctx, *deps)


_gather_keys_p.def_abstract_eval(_gather_keys_abstract_eval)
batching.primitive_batchers[_gather_keys_p] = _gather_keys_batch
mlir.register_lowering(_gather_keys_p, _gather_keys_cpu, platform="cpu")
# GPUs know a call by its run and its place in it, collectives by themselves.
mlir.register_lowering(_gather_keys_p, _in_flight.lower_zeros)


def gather_keys(axes: tuple[Any, ...], deps: Sequence[jax.Array]) -> jax.Array:
    """Returns ``int32[num_ranks, 4]``: a new key of each rank along `axes`.

    Through XLA's own all-gather on CPU devices. Zeros elsewhere, where exchanges find
    each other without.
    """
    sizes = tuple(int(lax.axis_size(axis)) for axis in axes)
    return _gather_keys_p.bind(*deps, axes=axes, sizes=sizes)  # type: ignore[no-any-return]
