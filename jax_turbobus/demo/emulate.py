"""The same transfers over emulated links: direct only, then pooled.

A laptop copies more slowly than eight PCIe links do, so all rates of the topology
are scaled down until it can keep up; ratios between links stay, and so do ratios of
times.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus import offload
from jax_turbobus.demo import timeline
from jax_turbobus.demo.observe import Recorder
from jax_turbobus.demo.timeline import Span
from jax_turbobus.topology import Topology

__all__ = ["Comparison", "Emulation", "Timing", "compare"]

# What all emulated host links together may ask of this machine. Two cores copied
# 5 GB/s and more; a relayed byte is copied twice, and the training runs beside it.
_BUDGET_BYTES_PER_S = 0.6e9
_BLOCK_BYTES = 256 << 10
_TRANSFER_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Emulation:
    """Whose links to emulate, and how fast.

    Attributes:
      topology: the machine.
      rate_scale: what all its rates are multiplied by.
    """

    topology: Topology
    rate_scale: float

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> "Emulation":
        """Returns the emulation of a machine, its rates scaled to this one.

        Args:
          name_or_path: see `Topology.load`.

        Raises:
          ValueError: it cannot be loaded, or has no GPU.
        """
        topology = Topology.load(name_or_path)
        if not topology.gpus:
            raise ValueError(
                f"--emulate: {topology.name} has no GPUs, expected a machine with some"
            )
        rates = [
            topology.paths(gpu.index, "h2d")[0].bandwidth_bytes_per_s
            for gpu in topology.gpus
        ]
        return cls(topology, min(1.0, _BUDGET_BYTES_PER_S / sum(rates)))

    def arguments(self, *, pooled: bool = True) -> dict[str, Any]:
        """Returns arguments for `jax_turbobus.configure`."""
        return {
            "topology": self.topology,
            "emulate": True,
            "pooled": pooled,
            "rate_scale": self.rate_scale,
            "block_bytes": _BLOCK_BYTES,
        }


@dataclasses.dataclass(frozen=True)
class Timing:
    """One kind of transfer, both ways of doing it.

    Attributes:
      name: what moves where.
      direct_s: best seconds over each device's own link.
      pooled_s: best seconds over all links.
    """

    name: str
    direct_s: float
    pooled_s: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Direct and pooled, side by side.

    Attributes:
      timings: the same transfers both ways.
      panels: when each link was busy while one device alone fetched, by mode.
      size_bytes: of each transfer, a device.
      repeats: how often each was timed.
    """

    timings: list[Timing]
    panels: dict[str, list[Span]]
    size_bytes: int
    repeats: int


def compare(
    emulation: Emulation, devices: Sequence[jax.Device], folder: Path, repeats: int = 5
) -> Comparison:
    """Returns the times of the same transfers, over own links only and over all.

    Args:
      emulation: the links.
      devices: device i plays GPU i.
      folder: where the traces of both modes go.
      repeats: how often each is timed.
    """
    seconds: dict[str, list[float]] = {}
    panels = {}
    for mode in ("direct", "pooled"):
        pooled = mode == "pooled"
        recorder = Recorder(
            folder / f"trace-{mode}.json", **emulation.arguments(pooled=pooled)
        )
        with recorder:
            for name, took in _time_all(devices, repeats).items():
                seconds.setdefault(name, []).append(took)
        # Recorded apart, after the timing: one fetch of one device.
        with recorder:
            host = _host_array(devices[:1])
            jax.block_until_ready(offload.to_device(host))
        panels[f"{mode}: device 0 fetches {_TRANSFER_BYTES >> 20} MiB"] = (
            timeline.newest(recorder.spans)
        )
    timings = [Timing(name, *took) for name, took in seconds.items()]
    return Comparison(timings, panels, _TRANSFER_BYTES, repeats)


def _host_array(devices: Sequence[jax.Device]) -> jax.Array:
    sharding = NamedSharding(
        Mesh(np.array(devices), ("devices",)), P("devices"), memory_kind="pinned_host"
    )
    num_elements = len(devices) * _TRANSFER_BYTES // 4
    values = np.arange(num_elements, dtype=np.float32)
    return jax.block_until_ready(jax.device_put(values, sharding))


def _time_all(devices: Sequence[jax.Device], repeats: int) -> dict[str, float]:
    """Returns the best seconds of fetching and storing, one device and all."""
    result = {}
    groups = {"device 0 alone": devices[:1]}
    if len(devices) > 1:
        groups[f"all {len(devices)} devices at once"] = devices
    for who, group in groups.items():
        host = _host_array(group)
        on_device = offload.to_device(host)
        spare = [host]

        def fetch(host: jax.Array = host) -> jax.Array:
            return offload.to_device(host)

        def store(
            on_device: jax.Array = on_device, spare: list[jax.Array] = spare
        ) -> jax.Array:
            spare.append(offload.to_host(on_device, out=spare.pop()))
            return spare[0]

        result[f"{who}, to the device"] = _best_seconds(fetch, repeats)
        result[f"{who}, to the host"] = _best_seconds(store, repeats)
    return result


def _best_seconds(run: Callable[[], jax.Array], repeats: int) -> float:
    # The links set a floor; what else the machine does only comes on top.
    jax.block_until_ready(run())  # compiles
    took = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        took.append(time.perf_counter() - started)
    return min(took)
