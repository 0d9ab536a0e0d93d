"""The static half of an exchange, and the checks at trace time that lead to it."""

import dataclasses
import logging
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus import _compat
from jax_turbobus.moe import _matching, _measured
from jax_turbobus.moe._arguments import MOST, check_array, check_integer
from jax_turbobus.moe._choice import GPU_COSTS, Choice, choose_schedule
from jax_turbobus.moe._matching import AxisName, Group

__all__ = ["SCHEDULES", "Routing", "check_arrays", "routing_of"]

_log = logging.getLogger("jax_turbobus")

# In the order of `Schedule` in cc/moe/traffic.h.
SCHEDULES = ("packed", "broadcast", "direct", "relay")

# What "auto" chooses from where all ranks are connected alike.
_AUTOMATIC = ("packed", "broadcast")

_BYTE_BITS = 8


@dataclasses.dataclass(frozen=True)
class Routing:
    """What every rank of an exchange knows before it runs.

    Attributes:
      group: the ranks.
      num_experts: experts in all; rank r owns the r-th share of them.
      num_rows: rows of a rank's result, padding included.
      expert_capacity: rows of each local expert's part; None if parts lie packed.
      schedule: one of `SCHEDULES`.
    """

    group: Group
    num_experts: int
    num_rows: int
    expert_capacity: int | None
    schedule: str

    @property
    def num_local_experts(self) -> int:
        """Experts that live on one rank."""
        return self.num_experts // self.group.num_ranks

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The leading axes of the rows that users see."""
        if self.expert_capacity is None:
            return (self.num_rows,)
        return (self.num_local_experts, self.expert_capacity)

    @property
    def attributes(self) -> dict[str, Any]:
        """What every FFI target of an exchange takes as attributes."""
        return {
            "axis": self.group.label,
            "num_experts": np.int64(self.num_experts),
            "expert_capacity": np.int64(self.expert_capacity or 0),
            "schedule": np.int64(SCHEDULES.index(self.schedule)),
        }


def check_arrays(
    op: str,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array | None,
    *,
    name_of_tokens: str = "tokens",
) -> None:
    """Checks the arrays that users hand to `dispatch`, without looking at values.

    Raises:
      TypeError: something is no array, or its dtype is not what it must be.
      ValueError: shapes that do not fit each other.
    """
    name = name_of_tokens
    arrays = {name: tokens, "expert_ids": expert_ids, "weights": weights}
    if valid is not None:
        arrays["valid"] = valid
    for key, x in arrays.items():
        check_array(f"{op}: {key}", x)
    if tokens.ndim != 2:
        raise ValueError(
            f"{op}: {name}: expected shape [num_tokens, hidden], got"
            f" {_shape(tokens)}; map leading axes with jax.vmap, or merge them with"
            " reshape"
        )
    num_tokens = tokens.shape[0]
    if jnp.issubdtype(tokens.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{op}: {name}: dtype {tokens.dtype} has no bytes to move; for random keys,"
            " dispatch jax.random.key_data(keys)"
        )
    if not _is_movable(tokens.dtype):
        raise TypeError(
            f"{op}: {name}: dtype {tokens.dtype} has elements of less than a byte;"
            " send them as int8, or packed into uint8"
        )
    if expert_ids.ndim != 2 or expert_ids.shape[0] != num_tokens:
        raise ValueError(
            f"{op}: expert_ids: expected shape [{num_tokens}, top_k] for tokens of"
            f" shape {_shape(tokens)}, got {_shape(expert_ids)}"
        )
    if expert_ids.dtype != jnp.int32:
        raise TypeError(
            f"{op}: expert_ids: expected dtype int32, got {expert_ids.dtype};"
            " convert with .astype(jnp.int32)"
        )
    if weights.shape != expert_ids.shape:
        raise ValueError(
            f"{op}: weights: expected shape {_shape(expert_ids)}, that of expert_ids,"
            f" got {_shape(weights)}"
        )
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(
            f"{op}: weights: expected a floating dtype, got {weights.dtype}"
        )
    if valid is not None and valid.shape != (num_tokens,):
        raise ValueError(
            f"{op}: valid: expected shape [{num_tokens}], one flag for each token, got"
            f" {_shape(valid)}"
        )
    if valid is not None and valid.dtype != jnp.bool_:
        raise TypeError(f"{op}: valid: expected dtype bool, got {valid.dtype}")


def routing_of(
    op: str,
    *,
    num_tokens: int,
    hidden: int,
    top_k: int,
    dtype: Any,
    num_experts: int,
    axis_name: AxisName,
    recv_capacity: int | None,
    expert_capacity: int | None,
    schedule: str,
    explain: bool = False,
) -> Routing:
    """Returns the checked static half of a `dispatch`.

    With `explain` it prints why the schedule is the one it is.

    Raises:
      TypeError: a size is not an integer, or `explain` no flag.
      ValueError: sizes, axis or schedule that cannot be.
    """
    if not isinstance(explain, bool | np.bool_):
        raise TypeError(f"{op}: explain: expected True or False, got {explain!r}")
    group = _matching.Group.of(axis_name, op=op)
    num_ranks = group.num_ranks
    num_experts = check_integer(f"{op}: num_experts", num_experts, least=1)
    if num_experts % num_ranks:
        wanted = -(-num_experts // num_ranks) * num_ranks
        raise ValueError(
            f"{op}: num_experts: expected a multiple of the {num_ranks} ranks along"
            f" axis {group.label}, got {num_experts}; pad to {wanted} experts that no"
            " id names, or exchange along fewer ranks"
        )
    if top_k > num_experts:
        raise ValueError(
            f"{op}: expert_ids: top_k={top_k} choices a token, but num_experts="
            f"{num_experts}; a token cannot choose more experts than there are"
        )
    if recv_capacity is not None and expert_capacity is not None:
        raise ValueError(
            f"{op}: recv_capacity, expert_capacity: expected at most one of them;"
            " expert_capacity gives padded rows"
            " [num_local_experts, expert_capacity, hidden], whose size it fixes"
        )
    num_local = num_experts // num_ranks
    if expert_capacity is not None:
        expert_capacity = check_integer(
            f"{op}: expert_capacity", expert_capacity, least=1
        )
        num_rows = num_local * expert_capacity
    elif recv_capacity is not None:
        num_rows = check_integer(f"{op}: recv_capacity", recv_capacity, least=0)
    else:
        num_rows = num_ranks * num_tokens * min(top_k, num_local)
    if max(num_rows, num_tokens * top_k) > MOST:
        raise ValueError(
            f"{op}: {num_rows} rows and {num_tokens} x {top_k} choices a rank: more"
            f" than {MOST}; exchange in chunks (expert_parallel), or give a"
            " smaller recv_capacity"
        )
    if schedule != "auto" and schedule not in SCHEDULES:
        raise ValueError(
            f"{op}: schedule: expected 'auto' or one of"
            f" {', '.join(map(repr, SCHEDULES))}, got {schedule!r}"
        )
    if schedule == "auto":
        choice = _choice(
            tokens_per_rank=num_tokens,
            hidden=max(1, hidden),
            num_experts=num_experts,
            top_k=max(1, top_k),
            num_ranks=num_ranks,
            dtype=dtype,
        )
        schedule = choice.schedule
        reasons = choice.explain()
        _log.info("%s over axis %s: %s", op, group.label, reasons)
    else:
        reasons = f"schedule: {schedule}, as the call says"
    if explain:
        sys.stdout.write(f"{op} over axis {group.label}: {reasons}\n")
    return Routing(
        group=group,
        num_experts=num_experts,
        num_rows=num_rows,
        expert_capacity=expert_capacity,
        schedule=schedule,
    )


def _choice(**sizes: Any) -> Choice:
    """Returns the choice of "auto", by what was measured of GPUs if anything was."""
    if not _compat.has_cuda_devices():
        return choose_schedule(**sizes, schedules=_AUTOMATIC)
    links, why = _measured.of_this_process()
    if links is not None:
        return choose_schedule(**sizes, schedules=_AUTOMATIC, topology=links)
    choice = choose_schedule(**sizes, schedules=_AUTOMATIC, costs=GPU_COSTS)
    return dataclasses.replace(choice, source=f"all links alike, assumed: {why}")


def _is_movable(dtype: Any) -> bool:
    return dtype == jnp.bool_ or _compat.element_bits(dtype) >= _BYTE_BITS


def _shape(x: jax.Array) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"
