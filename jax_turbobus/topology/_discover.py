"""This machine's topology, from what its driver and its kernel say."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_turbobus._discovery import build, nvml, sysfs
from jax_turbobus.topology._topology import Topology


@dataclass(frozen=True)
class Discovery:
    """What was found on this machine.

    Attributes:
      topology: the machine; without GPUs if there are none.
      remarks: sentences for a reader: degraded links, hidden trees, entries of
        ``CUDA_VISIBLE_DEVICES`` that name nothing, what could not be read.
      driver: version of the NVIDIA driver; empty if there is none.
    """

    topology: Topology
    remarks: tuple[str, ...]
    driver: str


def discover(
    *,
    environ: Mapping[str, str] | None = None,
    nvml_module: Any = None,
    sysfs_root: str | os.PathLike[str] = "/sys",
) -> Discovery:
    """Returns this machine's topology, from NVML and sysfs.

    Starts no CUDA context. GPUs appear in the order in which CUDA numbers them
    for this process (``CUDA_VISIBLE_DEVICES``). Rates are estimates from
    generation and width.

    Args:
      environ: environment variables; None: the process's own.
      nvml_module: stands in for pynvml; None: pynvml, if it is installed.
      sysfs_root: where sysfs is mounted.
    """
    facts = nvml.read(nvml.load() if nvml_module is None else nvml_module)
    content, remarks = build.build(
        facts,
        sysfs.Sysfs(os.fspath(sysfs_root)),
        os.environ if environ is None else environ,
        platform.node() or "this machine",
    )
    topology = Topology.from_json(json.dumps(content), "found on this machine")
    return Discovery(topology, (*facts.problems, *remarks), facts.driver)
