"""How a transfer of a sharded array becomes a transfer of each shard.

XLA gathers the operands of a custom call that it does not know. Outside
`jax.shard_map`, on several devices, our calls are therefore lowered with a rule
that says which dimensions of operands and result belong together; XLA then
compiles the call for one shard.

How a value is split spreads through a program both ways. From a host array it must
only spread outwards: splitting one anew would move it through the devices, or fail
to compile. And a value in flight must be split alike from its start to its done.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_turbobus import _compat

__all__ = ["Dims", "lower_in_shard_map", "lower_per_shard"]

# Names for the dimensions of one operand or result: equal names are split alike.
Dims = tuple[str, ...]


def lower_in_shard_map(
    context: Any, call: Callable[..., Any], operands: Sequence[Any], mesh: Any
) -> Any:
    """Lowers `call(*operands)` to one call a shard where types say how to split.

    Args:
      context: the lowering rule's context.
      call: binds the primitive.
      operands: IR values.
      mesh: with explicit axes only.

    Returns:
      The IR values of the result.
    """
    per_shard = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=tuple(aval.sharding.spec for aval in context.avals_in),
        out_specs=context.avals_out[0].sharding.spec,
        check_vma=False,
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return mlir.lower_fun(per_shard, multiple_results=False)(context, *operands)


def lower_per_shard(
    context: Any,
    call: Callable[..., Any],
    operands: Sequence[Any],
    *,
    operand_dims: Sequence[Dims],
    result_dims: Dims,
    whole: Sequence[str] = (),
    follows: Sequence[int] = (),
    leads: bool = False,
    has_side_effect: bool = False,
) -> Any:
    """Lowers `call(*operands)`, which has one result, to one call a shard.

    Args:
      context: the lowering rule's context.
      call: binds the primitive; traced again with one shard of each operand.
      operands: IR values.
      operand_dims: names for the dimensions of each operand. Operand 0 decides
        how the named dimensions are split.
      result_dims: names for the dimensions of the result, all found in operand 0.
      whole: names of dimensions that cannot be split.
      follows: positions of operands that take their splitting from this call, and
        have no say in it.
      leads: whether users of the result have no say in how it is split.
      has_side_effect: whether two equal calls must stay two.

    Returns:
      The IR values of the result.
    """
    partitioned = custom_partitioning(call)
    partitioned.def_partition(
        partition=functools.partial(
            _partition, call, tuple(operand_dims), result_dims, frozenset(whole)
        ),
        sharding_rule=SdyShardingRule(
            tuple(ArrayMapping(*dims) for dims in operand_dims),
            (ArrayMapping(*result_dims),),
            need_replication_factors=tuple(whole),
        ),
    )
    operands = [
        sdy.propagation_barrier(operand, sdy.PropagationDirection.BACKWARD)
        if n in follows
        else operand
        for n, operand in enumerate(operands)
    ]
    lowered = mlir.lower_fun(partitioned, multiple_results=False)(context, *operands)
    if has_side_effect:
        _compat.mark_side_effect(lowered)
    if not leads:
        return lowered
    return [
        sdy.propagation_barrier(value, sdy.PropagationDirection.FORWARD)
        for value in lowered
    ]


def _partition(
    call: Callable[..., Any],
    operand_dims: tuple[Dims, ...],
    result_dims: Dims,
    whole: frozenset[str],
    mesh: Any,
    operands: Sequence[Any],
    result: Any,
) -> tuple[Any, Callable[..., Any], Any, tuple[Any, ...]]:
    """Returns how to split operands and result: equal dimension names alike."""
    shardings = [operand.sharding for operand in operands]
    if not all(isinstance(s, NamedSharding) for s in shardings):
        # Shardings without a mesh fit arrays of the same shape as they are.
        shardings = [
            shardings[0] if dims == operand_dims[0] else sharding
            for sharding, dims in zip(shardings, operand_dims, strict=True)
        ]
        result_sharding = (
            shardings[0] if result_dims == operand_dims[0] else result.sharding
        )
        return mesh, call, result_sharding, tuple(shardings)
    axes: dict[str, Any] = dict.fromkeys(whole)
    for sharding, dims in zip(shardings, operand_dims, strict=True):
        spec = list(sharding.spec) + [None] * (len(dims) - len(sharding.spec))
        for name, axis in zip(dims, spec, strict=True):
            axes.setdefault(name, axis)

    def split(dims: Dims) -> NamedSharding:
        return NamedSharding(shardings[0].mesh, PartitionSpec(*map(axes.get, dims)))

    return mesh, call, split(result_dims), tuple(map(split, operand_dims))
