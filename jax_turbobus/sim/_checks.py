"""What a simulation refuses, and how it says so."""

import numbers
from collections.abc import Iterable
from typing import Any, get_args

from jax_turbobus.sim._policies import POLICIES, Allocation, Policy
from jax_turbobus.sim._types import Background, Direction, Transfer
from jax_turbobus.topology import Topology
from jax_turbobus.topology._checks import whole

__all__ = ["MOST_NS", "check_background", "check_policy", "check_transfers", "whole"]

# Sums of such sizes and times stay exact in the core.
_MOST_BYTES = 1 << 46
_MOST_BYTES_PER_S = 1e15
MOST_NS = 1 << 61
# About a minute's work.
_MOST_BLOCKS = 1 << 20


def check_policy(policy: Any) -> Policy:
    """Returns the policy of that name, or that policy.

    Raises:
      TypeError: a field of the policy has the wrong type.
      ValueError: there is none, or a field is out of range.
    """
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]
    if not isinstance(policy, Policy):
        raise ValueError(
            f"policy: expected a Policy or one of {', '.join(POLICIES)}, got {policy!r}"
        )
    if policy.allocation not in get_args(Allocation):
        raise ValueError(
            f"policy.allocation: expected one of {', '.join(get_args(Allocation))}, "
            f"got {policy.allocation!r}"
        )
    block_bytes = whole("policy.block_bytes", policy.block_bytes, 1, _MOST_BYTES)
    if policy.chunk_bytes is not None:
        whole("policy.chunk_bytes", policy.chunk_bytes, block_bytes, _MOST_BYTES)
    return policy


def check_transfers(
    transfers: Any, topology: Topology, block_bytes: int
) -> tuple[Transfer, ...]:
    """Returns the transfers, which the node can do in a time worth waiting for.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a GPU, NUMA node, size, time or direction that does not exist, or
        more blocks than a simulation takes.
    """
    listed = _listed("transfers", transfers, Transfer)
    num_blocks = 0
    for i, transfer in enumerate(listed):
        field = f"transfers[{i}]."
        whole(f"{field}gpu", transfer.gpu, 0, len(topology.gpus) - 1)
        whole(f"{field}numa_node", transfer.numa_node, 0, len(topology.numa_nodes) - 1)
        size_bytes = whole(f"{field}size_bytes", transfer.size_bytes, 0, _MOST_BYTES)
        whole(f"{field}arrival_ns", transfer.arrival_ns, 0, MOST_NS)
        if transfer.direction not in get_args(Direction):
            raise ValueError(
                f"{field}direction: expected 'h2d' or 'd2h', got {transfer.direction!r}"
            )
        num_blocks += max(1, -(-size_bytes // block_bytes))
    if num_blocks > _MOST_BLOCKS:
        raise ValueError(
            f"transfers: expected at most {_MOST_BLOCKS} blocks of {block_bytes} bytes "
            f"in all, got {num_blocks}; simulate less, or give a Policy with larger "
            "block_bytes"
        )
    return listed


def check_background(
    background: Any, resources: Iterable[str]
) -> tuple[Background, ...]:
    """Returns the loads, each on one of the resources.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a resource that does not exist, a rate that is none, or a time
        that ends before it starts.
    """
    known = set(resources)
    listed = _listed("background", background, Background)
    for i, load in enumerate(listed):
        field = f"background[{i}]."
        if load.resource not in known:
            raise ValueError(
                f"{field}resource: expected one of {', '.join(sorted(known))}, "
                f"got {load.resource!r}"
            )
        rate: Any = load.bytes_per_s
        is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
        if not is_number:
            raise TypeError(f"{field}bytes_per_s: expected a number, got {rate!r}")
        if not 0 <= rate <= _MOST_BYTES_PER_S:
            raise ValueError(
                f"{field}bytes_per_s: expected 0 to {_MOST_BYTES_PER_S:g}, got {rate!r}"
            )
        start_ns = whole(f"{field}start_ns", load.start_ns, 0, MOST_NS)
        whole(f"{field}end_ns", load.end_ns, start_ns, MOST_NS)
    return listed


def _listed(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    try:
        listed = tuple(values)
    except TypeError:
        raise TypeError(
            f"{name}: expected a sequence of {kind.__name__}, got {values!r}"
        ) from None
    for i, value in enumerate(listed):
        if not isinstance(value, kind):
            raise TypeError(f"{name}[{i}]: expected a {kind.__name__}, got {value!r}")
    return listed
