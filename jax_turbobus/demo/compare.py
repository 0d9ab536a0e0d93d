"""The same transfers over each device's own link only, then over all idle links."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus import offload
from jax_turbobus.demo import timeline
from jax_turbobus.demo.emulate import Emulation
from jax_turbobus.demo.observe import Recorder
from jax_turbobus.demo.timeline import Span

__all__ = ["Comparison", "Timing", "over_emulated_links", "over_own_links"]

_REPEATS = 5


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
      links: whose, in a few words.
      timings: the same transfers both ways.
      panels: when each link was busy while one device alone fetched, by mode.
      size_bytes: of each transfer, a device.
      repeats: how often each was timed.
    """

    links: str
    timings: list[Timing]
    panels: dict[str, list[Span]]
    size_bytes: int
    repeats: int


def over_emulated_links(
    emulation: Emulation, devices: Sequence[jax.Device], folder: Path
) -> Comparison:
    """Returns the times of 8 MiB a device over emulated links.

    Args:
      emulation: the links.
      devices: device i plays GPU i.
      folder: where the traces of both modes go.
    """

    def recorder(path: Path, *, pooled: bool) -> Recorder:
        return Recorder(path, **emulation.arguments(pooled=pooled))

    return _compare("emulated links", recorder, devices, folder, 8 << 20)


def over_own_links(devices: Sequence[jax.Device], folder: Path) -> Comparison:
    """Returns the times of 256 MiB a GPU over this machine's links.

    Args:
      devices: GPUs.
      folder: where the traces of both modes go.
    """

    def recorder(path: Path, *, pooled: bool) -> Recorder:
        split = "finish-time" if pooled else "direct"
        return Recorder(path, on_gpus=True, split=split)

    return _compare("this machine's links", recorder, devices, folder, 256 << 20)


class _MakeRecorder(Protocol):
    def __call__(self, path: Path, *, pooled: bool) -> Recorder: ...


def _compare(
    links: str,
    make_recorder: _MakeRecorder,
    devices: Sequence[jax.Device],
    folder: Path,
    size_bytes: int,
) -> Comparison:
    seconds: dict[str, list[float]] = {}
    panels = {}
    for mode in ("direct", "pooled"):
        recorder = make_recorder(folder / f"trace-{mode}.json", pooled=mode == "pooled")
        with recorder:
            for name, took in _time_all(devices, size_bytes).items():
                seconds.setdefault(name, []).append(took)
        # Recorded apart, after the timing: one fetch of one device.
        host = _host_array(devices[:1], size_bytes)
        with recorder:
            jax.block_until_ready(offload.to_device(host))
        panels[f"{mode}: device 0 fetches {size_bytes >> 20} MiB"] = timeline.newest(
            recorder.spans
        )
    timings = [Timing(name, *took) for name, took in seconds.items()]
    return Comparison(links, timings, panels, size_bytes, _REPEATS)


def _host_array(devices: Sequence[jax.Device], size_bytes: int) -> jax.Array:
    sharding = NamedSharding(
        Mesh(np.array(devices), ("devices",)), P("devices"), memory_kind="pinned_host"
    )
    num_elements = len(devices) * size_bytes // 4
    values = np.arange(num_elements, dtype=np.float32)
    return jax.block_until_ready(jax.device_put(values, sharding))


def _time_all(devices: Sequence[jax.Device], size_bytes: int) -> dict[str, float]:
    """Returns the best seconds of fetching and storing, one device and all."""
    result = {}
    groups = {"device 0 alone": devices[:1]}
    if len(devices) > 1:
        groups[f"all {len(devices)} devices at once"] = devices
    for who, group in groups.items():
        host = _host_array(group, size_bytes)
        on_device = offload.to_device(host)
        spare = [host]

        def fetch(host: jax.Array = host) -> jax.Array:
            return offload.to_device(host)

        def store(
            on_device: jax.Array = on_device, spare: list[jax.Array] = spare
        ) -> jax.Array:
            spare.append(offload.to_host(on_device, out=spare.pop()))
            return spare[0]

        result[f"{who}, to the device"] = _best_seconds(fetch)
        result[f"{who}, to the host"] = _best_seconds(store)
    return result


def _best_seconds(run: Callable[[], jax.Array]) -> float:
    # The links set a floor; what else the machine does only comes on top.
    jax.block_until_ready(run())  # compiles
    took = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        took.append(time.perf_counter() - started)
    return min(took)
