"""Memory that a program makes and our calls fill."""

from typing import Any

import jax

from jax_turbobus.offload import _marks, _shapes
from jax_turbobus.offload._define import HOST, define, emit_ffi, register_lowering

__all__ = ["buffer_p", "host_buffer_like", "host_stack_of"]

# A buffer like `x`, split like it, with the axes `sizes` before those of `x`. Neither
# is read: it holds anything. `vmap` over `others` alone makes one for each of them.
buffer_p = define(
    "turbobus_buffer",
    _shapes.buffer_aval,
    lambda context, x, *_, sizes: emit_ffi(
        context.replace(avals_in=context.avals_in[:1]), "turbobus_buffer", [x]
    ),
    _shapes.buffer_dims,
    platform="cpu",
    leads=True,
)
register_lowering(
    buffer_p,
    lambda context, *_, sizes: jax.ffi.ffi_lowering("AllocateBuffer", api_version=2)(
        context.replace(avals_in=[])
    ),
    _shapes.buffer_dims,
    leads=True,
    platform="cuda",
)


def host_buffer_like(x: Any, *others: Any) -> Any:
    """Returns host memory of the shape, dtype and sharding of `x`, unwritten.

    Args:
      x: an array.
      others: where `vmap` maps one of these and not `x`, there is one buffer for
        each member of the batch.
    """
    return jax.device_put(buffer_p.bind(x, *others, sizes=()), HOST)


def host_stack_of(x: Any, num_rows: int, *others: Any) -> Any:
    """Returns host memory for `num_rows` rows like `x`, split like it, unwritten.

    Args:
      x: an array.
      num_rows: how many rows.
      others: what rows are computed from. Where `vmap` maps one of these, there is
        one stack for each member of the batch; where one has a tangent, so has it.
    """
    joint = _marks.joint_p.bind(x, *others)
    return jax.device_put(buffer_p.bind(x, joint, sizes=(num_rows,)), HOST)
