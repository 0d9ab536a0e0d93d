"""Transfers as the sources describe them: sizes are bimodal, arrivals random."""

import random

from jax_turbobus.sim._checks import MOST_NS
from jax_turbobus.sim._types import Transfer
from jax_turbobus.topology import Topology

__all__ = ["bimodal"]

_MIB = 1 << 20
_LARGE = (512 * _MIB, 2048 * _MIB)
_SMALL = (1 * _MIB, 8 * _MIB)
_PART_LARGE = 0.25


def bimodal(
    topology: Topology, *, load: float = 0.3, count: int = 120, seed: int = 1
) -> list[Transfer]:
    """Returns host-to-device transfers, a quarter large and the rest small.

    Args:
      topology: the machine; GPUs are chosen uniformly.
      load: bytes offered per second over what all GPUs' own links carry.
      count: how many transfers.
      seed: same seed, same transfers.

    Raises:
      ValueError: the machine is so slow that they would be centuries apart.

    Source: TurboBus, "Scheduler" (sizes are bimodal); the sizes are ours.
    """
    rng = random.Random(seed)
    gpus = range(len(topology.gpus))
    rate = sum(topology.paths(gpu, "h2d")[0].bandwidth_bytes_per_s for gpu in gpus)
    mean = _PART_LARGE * sum(_LARGE) / 2 + (1 - _PART_LARGE) * sum(_SMALL) / 2
    transfers = []
    now_ns = 0.0
    for _ in range(count if gpus else 0):
        now_ns += rng.expovariate(load * rate / mean) * 1e9
        if now_ns > MOST_NS:
            raise ValueError(
                f"topology: {topology.name!r} is too slow for this workload: its next "
                f"transfer would come after {now_ns:.3g} ns; give higher rates"
            )
        is_large = rng.random() < _PART_LARGE
        size = round(rng.uniform(*(_LARGE if is_large else _SMALL)))
        name = "large" if is_large else "small"
        transfers.append(Transfer(rng.choice(gpus), size, round(now_ns), name=name))
    return transfers
