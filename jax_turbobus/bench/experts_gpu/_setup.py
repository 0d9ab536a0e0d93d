"""What the cases on GPUs share: devices, sizes, times."""

import dataclasses
import glob
import os
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus.bench._report import alternate

__all__ = ["AXIS", "Setup", "kernel_seconds"]

AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class Setup:
    """Where and how often cases run.

    Attributes:
      devices: the ranks.
      rounds: measurements of each.
      shrink: divides every size.
      has_peers: whether GPUs reach each other's memory.
    """

    devices: list[jax.Device]
    rounds: int
    shrink: int
    has_peers: bool

    @property
    def num_ranks(self) -> int:
        """GPUs."""
        return len(self.devices)

    @property
    def mesh(self) -> Mesh:
        """All devices along one axis."""
        return Mesh(np.array(self.devices), (AXIS,), axis_types=(AxisType.Auto,))

    @property
    def access(self) -> str:
        """As rows say it."""
        return "NVLink" if self.has_peers else "no peer access"

    def small(self, size: int) -> int:
        """Returns a size divided by `shrink`, at least 8 times the ranks."""
        return max(size // self.shrink, 8 * self.num_ranks)

    def on_mesh(self, function: Callable[..., Any], num_arguments: int) -> Any:
        """Returns a jitted function of arrays that are split over the ranks."""
        specs = (P(AXIS),) * num_arguments
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=P(AXIS))
        )

    def put(self, *arrays: Any) -> list[jax.Array]:
        """Returns arrays split over the ranks."""
        sharding = NamedSharding(self.mesh, P(AXIS))
        return [jax.device_put(x, sharding) for x in arrays]

    def normal(self, shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
        """Returns random values, split over the ranks by the first axis."""
        sharding = NamedSharding(self.mesh, P(AXIS))
        make = jax.jit(
            lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype),
            out_shardings=sharding,
        )
        return make(jax.random.key(seed))  # type: ignore[no-any-return]

    def times(self, functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Returns the median seconds of calls, in turn, each until it is ready."""

        def waiting(function: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: jax.block_until_ready(function())

        waits = {name: waiting(function) for name, function in functions.items()}
        timings = alternate(waits, rounds=self.rounds)
        return {name: timing.median for name, timing in timings.items()}


def kernel_seconds(function: Callable[[], Any], *, calls: int = 10) -> dict[str, float]:
    """Returns the time of each kernel on one GPU in a call, by name; {} without one.

    Args:
      function: what to call; it has been compiled.
      calls: how many to take the mean of.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        for _ in range(calls):
            jax.block_until_ready(function())
        jax.profiler.stop_trace()
        (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        planes = list(jax.profiler.ProfileData.from_file(path).planes)
    seconds: dict[str, float] = {}
    for plane in planes:
        if "GPU:0" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                duration = event.duration_ns / 1e9 / calls
                seconds[event.name] = seconds.get(event.name, 0.0) + duration
    return seconds
