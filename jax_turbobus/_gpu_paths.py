"""Over which paths the engine for GPUs may move bytes, and how fast they are."""

import os
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from jax_turbobus import _profile_file

if TYPE_CHECKING:
    from jax_turbobus import topology

__all__ = ["estimated", "paths"]

# Where neither a profile nor NVML says: PCIe 4.0 x16, measured. What counts is
# that all links are taken to be equal.
_DEFAULT_BYTES_PER_S = 25e9


def estimated(
    uuids: list[str], remarks: list[str]
) -> tuple[dict[tuple[int, int | None, str], float], str]:
    """Returns rates by path from NVML and sysfs, and the driver's version.

    Args:
      uuids: of this process's GPUs, by ordinal.
      remarks: gets sentences for a reader.

    Raises:
      ValueError: JAX_TURBOBUS_TOPOLOGY names a GPU that is not there.
    """
    # Imported here: it imports `_ffi`, which is loading this.
    from jax_turbobus import topology

    found = topology.discover()
    machine = found.topology
    named = os.environ.get("JAX_TURBOBUS_TOPOLOGY", "").strip()
    if named:
        given = topology.Topology.load(named)
        if any(gpu.uuid for gpu in given.gpus):
            return _rates_of(given, uuids, named), found.driver
        remarks.append(
            f"JAX_TURBOBUS_TOPOLOGY: {named} has no UUIDs of GPUs: it is for CPU "
            "devices only"
        )
    known = [_bare(gpu.uuid) for gpu in machine.gpus]
    if known != uuids:
        remarks.append(
            f"NVML shows GPUs {known}, CUDA shows {uuids}: all links are taken to be "
            "equal and any GPU may lend its own"
        )
        return {}, found.driver
    return _rates_of(machine, uuids, "this machine"), found.driver


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")


def _rates_of(
    machine: "topology.Topology", uuids: list[str], name: str
) -> dict[tuple[int, int | None, str], float]:
    """Returns the rates of a topology's paths, by this process's numbers of GPUs.

    Raises:
      ValueError: the topology has a GPU that this process does not see.
    """
    numbers = []
    for one in machine.gpus:
        if _bare(one.uuid) not in uuids:
            raise ValueError(
                f"JAX_TURBOBUS_TOPOLOGY: {name} has GPU {one.id!r} with UUID "
                f"{one.uuid!r}, which this process does not see; it sees "
                f"{', '.join(uuids)}. Leave the variable out to use what is found"
            )
        numbers.append(uuids.index(_bare(one.uuid)))
    directions: tuple[topology.Direction, ...] = ("h2d", "d2h")
    return {
        (
            numbers[path.gpu],
            None if path.relay is None else numbers[path.relay],
            direction,
        ): path.bandwidth_bytes_per_s
        for gpu in range(len(numbers))
        for direction in directions
        for path in machine.paths(gpu, direction)
    }


def paths(
    library: ModuleType,
    uuids: list[str],
    rates: dict[tuple[int, int | None, str], float],
    profile: _profile_file.Profile | None,
) -> Iterator[tuple[int, int | None, str, float]]:
    """Yields (GPU, relay or None, direction, bytes per second) of each usable path.

    Args:
      library: the CUDA library, which says who reaches whom.
      uuids: as for `estimated`.
      rates: as `estimated` returned them.
      profile: what was measured here, if anything was.
    """
    for gpu, uuid in enumerate(uuids):
        for direction in ("h2d", "d2h"):
            for relay in (None, *range(len(uuids))):
                other = None if relay is None else uuids[relay]
                if relay == gpu or (
                    relay is not None and not library.can_access_peer(relay, gpu)
                ):
                    continue
                if profile is not None:
                    rate = profile.rate(uuid, other, direction)
                    if other is not None and profile.is_one_group(uuid, other):
                        continue
                    if rate is not None:
                        yield gpu, relay, direction, rate
                        continue
                if rates and relay is not None and (gpu, relay, direction) not in rates:
                    continue  # the links do not add up
                rate = rates.get((gpu, relay, direction), _DEFAULT_BYTES_PER_S)
                yield gpu, relay, direction, rate
