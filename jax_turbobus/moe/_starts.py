"""Measures what a small exchange takes beside its bytes: plan, meetings, launches."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus.moe import _choice, _combine, _dispatch
from jax_turbobus.moe._measured import MeasuredLinks

__all__ = ["measure", "seconds_of_exchange"]

_AXIS = "rank"
_HIDDEN = 4096
_ROW_BYTES = 2 * _HIDDEN
_SMALL_TOKENS = 16
_TOP_K = 2
_EXPERTS_A_RANK = 4
# A program of so many exchanges, less one of a single one, is what they take.
_REPEATS = 8
_ROUNDS = 10


def measure(links: MeasuredLinks, devices: Sequence[jax.Device]) -> dict[str, float]:
    """Returns seconds beside the bytes, by the names in `_profile_exchange.STARTS`.

    What the model of `choose_schedule` makes of the bytes is subtracted, so that with
    these starts it gives what was measured.

    Args:
      links: rates between the devices.
      devices: all of `links`, in order.
    """
    if links.has_peer_access:
        wanted = {"peer": ("packed", _SMALL_TOKENS)}
    else:
        # Twice what goes by mail, so that it goes by rings.
        many = 2 * links.most_mailed_bytes // _ROW_BYTES
        wanted = {
            "mail": ("packed", _SMALL_TOKENS),
            "packed": ("packed", many),
            "broadcast": ("broadcast", many),
        }
    starts = {}
    for name, (schedule, num_tokens) in wanted.items():
        ids = _ids(num_tokens, len(devices))
        modelled = _choice.choose_schedule(
            tokens_per_rank=num_tokens,
            hidden=_HIDDEN,
            num_experts=_EXPERTS_A_RANK * len(devices),
            top_k=_TOP_K,
            num_ranks=len(devices),
            expert_ids=ids,
            topology=links,
            schedules=(schedule,),
            costs=dataclasses.replace(_choice.GPU_COSTS, launch_s=0.0),
        ).seconds[schedule]
        spent = seconds_of_exchange(devices, schedule, ids)
        starts[name] = max(spent - modelled, 0.0)
    return starts


def _ids(num_tokens: int, num_ranks: int) -> np.ndarray:
    """Returns choices of two different ranks' experts, all equally often."""
    first = np.arange(num_ranks * num_tokens, dtype=np.int32)
    num_experts = _EXPERTS_A_RANK * num_ranks
    ids = np.stack([first, first + _EXPERTS_A_RANK], axis=1) % num_experts
    return ids.reshape(num_ranks, num_tokens, _TOP_K)


def seconds_of_exchange(
    devices: Sequence[jax.Device], schedule: str, expert_ids: np.ndarray
) -> float:
    """Returns what dispatch and combine take within a program that has many.

    Args:
      devices: the ranks.
      schedule: of the exchange.
      expert_ids: ``int32[num_ranks, num_tokens, top_k]``.
    """
    num_ranks, num_tokens, top_k = expert_ids.shape
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(_AXIS))
    tokens, ids, weights = (
        jax.device_put(x, sharding)
        for x in (
            np.ones((num_ranks * num_tokens, _HIDDEN), jnp.bfloat16),
            expert_ids.reshape(-1, top_k),
            np.full((num_ranks * num_tokens, top_k), 1 / top_k, np.float32),
        )
    )

    def exchanges(number: int) -> Callable[..., Any]:
        def run(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            for _ in range(number):
                rows, _, state = _dispatch.dispatch(
                    x,
                    ids,
                    weights,
                    num_experts=_EXPERTS_A_RANK * num_ranks,
                    axis_name=_AXIS,
                    schedule=schedule,
                )
                x = _combine.combine(rows, state)
            return x

        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=(P(_AXIS),) * 3, out_specs=P(_AXIS))
        )

    def best(function: Callable[..., Any]) -> float:
        times = []
        for _ in range(1 + _ROUNDS):
            start = time.perf_counter()
            jax.block_until_ready(function(tokens, ids, weights))
            times.append(time.perf_counter() - start)
        return min(times[1:])

    many, one = (best(exchanges(number)) for number in (1 + _REPEATS, 1))
    return max(many - one, 0.0) / _REPEATS
