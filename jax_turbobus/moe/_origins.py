"""Where the operands of an exchange come from, in the program that is being lowered.

A large exchange between GPUs that do not reach each other has to know on the host how
many rows there are. Its dispatch has asked the GPU already, if it is certain that the
slots are that dispatch's: then the host need not wait for the GPU again
(cc/moe/cuda/known_totals.h). So for a dispatch that was counted early. Certain is what
stands in the program; slots that come as an argument, or around a loop, may be
anyone's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir

__all__ = ["counted_before", "is_counted"]

# Of an exchange's data: the expert ids, and what their slots or early count are.
_OPERANDS = {
    "combine": (1, 2),
    "combine_grad": (2, 3),
    "dispatch_grad": (1, 2),
    "dispatch": (1, 2),
}
_DISPATCHES = ("turbobus_moe_dispatch", "turbobus_moe_dispatch_start")
_EARLY = "turbobus_moe_count"


def is_counted(name: str, data: Sequence[Any]) -> bool:
    """Returns whether an exchange's slots are those of a dispatch by its own ids.

    Or whether a dispatch has been counted early, by its own ids.

    Args:
      name: of the exchange.
      data: its operands, IR values.
    """
    name = name.removesuffix("_start")
    at = _OPERANDS.get(name)
    if at is None or len(data) <= max(at):
        return False
    ids, made = (_origin(data[i]) for i in at)
    target = _target_of(made)
    if name == "dispatch":
        made_of = made.result_number if target == _EARLY else None
    else:
        made_of = 1 if target in _DISPATCHES and made.result_number == 3 else None
    return made_of is not None and bool(ids == _origin(made.owner.operands[made_of]))


def counted_before(name: str, data: Sequence[Any]) -> tuple[Any, Any] | None:
    """Returns another call's slots that are an exchange's own, and a result of it.

    A gradient of dispatch asks the GPU for what the gradient of its combine has asked
    before, if that stands in the same body and reads the same. It knows it, too, if it
    takes the very slots, and cannot come first.

    Args:
      name: of the exchange.
      data: its operands, IR values.
    """
    if name != "dispatch_grad":
        return None
    ids, slots = (_origin(data[i]) for i in _OPERANDS[name])
    ids_operand, slots_operand = _OPERANDS["combine_grad"]
    here = ir.InsertionPoint.current.block
    for op, operand in _readers(slots):
        if (
            op.name == "stablehlo.custom_call"
            and _target_of(op.results[0]) == "turbobus_moe_combine_grad"
            and operand == slots_operand
            and op.operation.block == here
            and _origin(op.operands[ids_operand]) == ids
        ):
            return op.operands[slots_operand], op.results[-1]
    return None


def _readers(value: Any) -> Iterator[tuple[Any, int]]:
    """Yields the operations that read a value, and as which of their operands."""
    for use in value.uses:
        op, operand = use.owner, use.operand_number
        if op.name == "stablehlo.optimization_barrier":
            yield from _readers(op.results[operand])
        else:
            yield op, operand


def _origin(value: Any) -> Any:
    """Returns the value that this one is, before all that hands it on as it is."""
    while (before := _before(value)) is not None:
        value = before
    return value.maybe_downcast()


def _before(value: Any) -> Any:
    """Returns the value whose bits a value has; None if it has its own."""
    value = value.maybe_downcast()
    if isinstance(value, ir.BlockArgument):
        return None
    op, index = value.owner, value.result_number
    if op.name == "stablehlo.optimization_barrier":
        return op.operands[index]
    if op.name == "stablehlo.bitcast_convert":
        # Integers as the bits of floats, or back.
        source = op.operands[0]
        is_alike = ir.ShapedType(source.type).shape == ir.ShapedType(value.type).shape
        return source if is_alike else None
    if _target_of(value) == "turbobus_moe_finish":
        return op.operands[index]
    return None


def _target_of(value: Any) -> str | None:
    """Returns the target of the custom call that a value is a result of."""
    if isinstance(value, ir.BlockArgument):
        return None
    op = value.owner
    if op.name != "stablehlo.custom_call":
        return None
    return str(ir.StringAttr(op.attributes["call_target_name"]).value)
