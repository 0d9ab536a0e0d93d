"""Primitives that move nothing: what they say to JAX and to XLA."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jax_turbobus import _compat
from jax_turbobus.offload._define import emit_ffi, scalar_aval

__all__ = [
    "after_p",
    "anchor_p",
    "batch_p",
    "joint_p",
    "mark_p",
    "tie_p",
    "total_p",
]

# The gradient of a row of a stack. Under `vmap` it is one gradient for each member of
# the batch, and it depends on where the batch came in what to do with them if the
# stack is not mapped:
#   grad(vmap(f)): `f` was differentiated as a function of a batch that shares a stack.
#     The gradient is the sum over the batch, to be taken before it goes to the host.
#   vmap(grad(f)), jacrev(f): each member of the batch asks for a gradient of its own.
# `batch_p` tells them apart. It is an integer, of no interest, that is mapped over the
# batches which met it before it was differentiated: those of the first kind.

batch_p: Any = Primitive("turbobus_batch")
batch_p.def_abstract_eval(lambda x, *_, differentiated: scalar_aval(x))
batch_p.def_impl(lambda *_, differentiated: np.int32(0))
_lower_zero = mlir.lower_fun(
    lambda *_, **__: jax.numpy.int32(0), multiple_results=False
)
mlir.register_lowering(batch_p, _lower_zero)

total_p: Any = Primitive("turbobus_total")
total_p.def_abstract_eval(lambda grad, stack, batch: grad)
total_p.def_impl(lambda grad, stack, batch: grad)
mlir.register_lowering(total_p, lambda context, grad, stack, batch: [grad])

# A number, of no interest, that is mapped where any of the operands is, and has a
# tangent where any of them has: what makes a buffer like that which will go into it.

joint_p: Any = Primitive("turbobus_joint")
joint_p.def_abstract_eval(
    lambda x, *_: scalar_aval(x).update(dtype=np.dtype(np.float32))
)
joint_p.def_impl(lambda *_: np.float32(0))
mlir.register_lowering(
    joint_p,
    mlir.lower_fun(lambda *_: jax.numpy.float32(0), multiple_results=False),
)

# `x`, for JAX not before `others`; nothing of it is in the program. JAX moves what is
# alike in every step of a differentiated loop out of it: a start, but not its done.

anchor_p: Any = Primitive("turbobus_anchor")
anchor_p.def_abstract_eval(lambda x, *others: x)
anchor_p.def_impl(lambda x, *others: x)
mlir.register_lowering(anchor_p, lambda context, x, *others: [x])

# What the ties below say, for XLA:CPU. It drops those before it orders a program and
# gives out memory: a start might come last, or a done first, and so share memory with
# the computation, and one would wait for the other. `mark_p` gives a mark that what it
# takes is there; `after_p` gives `x`, not before the mark. Dones take the marks of all
# starts, too, or XLA could copy what is in flight for the mark to read. Elsewhere, and
# where XLA splits the program over devices (it would gather `x`), there are none.

mark_p: Any = Primitive("turbobus_mark")
mark_p.def_abstract_eval(lambda *values: scalar_aval(values[0]))
mark_p.def_impl(lambda *values: np.int32(0))


def _lower_mark_cpu(context: Any, *values: Any) -> Any:
    if _compat.partitions_automatically(context):
        return _lower_zero(context, *values)
    return emit_ffi(context, "turbobus_mark", values)


mlir.register_lowering(mark_p, _lower_zero)
mlir.register_lowering(mark_p, _lower_mark_cpu, platform="cpu")

after_p: Any = Primitive("turbobus_after")
after_p.def_abstract_eval(lambda x, mark: x)
after_p.def_impl(lambda x, mark: x)


def _lower_after_cpu(context: Any, x: Any, mark: Any) -> Any:
    if _compat.partitions_automatically(context):
        return [x]
    return emit_ffi(context, "turbobus_after", [x, mark], aliases={0: 0})


mlir.register_lowering(after_p, lambda context, x, mark: [x])
mlir.register_lowering(after_p, _lower_after_cpu, platform="cpu")

# All of its operands are there before any of its results is: what keeps start,
# compute and done in this order, and a done in a program that uses only one of
# the results that came with it.

tie_p: Any = Primitive("turbobus_tie")
tie_p.multiple_results = True
tie_p.def_abstract_eval(lambda *avals: list(avals))
tie_p.def_impl(lambda *args: list(args))


def _lower_tie(context: Any, *operands: Any) -> Any:
    del context
    barrier: Any = stablehlo.OptimizationBarrierOp(list(operands)) if operands else None
    return barrier.results if operands else []


def _lower_tie_cpu(context: Any, *operands: Any) -> Any:
    # XLA:CPU drops the barrier in the end. It then starts what it can and waits for
    # nothing that a transfer in flight holds up, except in programs and loop bodies
    # of eight operations or fewer, which it runs one by one. These make it nine.
    if not _compat.partitions_automatically(context):
        nop = jax.ffi.ffi_lowering("turbobus_nop", has_side_effect=True)
        aval = jax.typeof(np.int32(0))
        for _ in range(3):  # in each of three ties
            nop(context.replace(avals_in=[], avals_out=[aval]))
    return _lower_tie(context, *operands)


mlir.register_lowering(tie_p, _lower_tie)
mlir.register_lowering(tie_p, _lower_tie_cpu, platform="cpu")
