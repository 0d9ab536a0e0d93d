"""Another machine's links, emulated by CPU devices.

A laptop copies more slowly than eight PCIe links do, so all rates of the topology
are scaled down until it can keep up; ratios between links stay, and so do ratios of
times.
"""

import dataclasses
import os
from typing import Any

from jax_turbobus.topology import Topology

__all__ = ["Emulation"]

# What all emulated host links together may ask of this machine. Two cores copied
# 5 GB/s and more; a relayed byte is copied twice, and the training runs beside it.
_BUDGET_BYTES_PER_S = 0.6e9
_BLOCK_BYTES = 256 << 10


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
