"""Turns what NVML and sysfs say into the graph of a topology file."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_turbobus._discovery import rates
from jax_turbobus._discovery.nvml import NVSWITCH, Brick, NvmlFacts, NvmlGpu
from jax_turbobus._discovery.sysfs import NumaFacts, PciePort, PciFacts, Sysfs
from jax_turbobus._discovery.visible import visible_gpus

__all__ = ["build"]

Json = dict[str, Any]


def build(
    nvml: NvmlFacts, sysfs: Sysfs, environ: Mapping[str, str], name: str
) -> tuple[Json, list[str]]:
    """Returns a topology file's content, and remarks for a reader.

    Args:
      nvml: all GPUs of the machine.
      sysfs: its device tree.
      environ: environment variables; says which GPUs this process sees.
      name: of the machine.
    """
    order, remarks = visible_gpus(
        [gpu.uuid for gpu in nvml.gpus], [gpu.name for gpu in nvml.gpus], environ
    )
    builder = _Builder(nvml, order, sysfs.numa_nodes(), remarks)
    for index, gpu in enumerate(builder.gpus):
        builder.add_gpu(index, gpu, sysfs.pci(gpu.pci_address))
    builder.add_nvlinks()
    builder.add_sockets()
    return builder.finish(name), remarks


@dataclass
class _Builder:
    """Collects nodes and links; `order` gives the GPUs that this process sees."""

    nvml: NvmlFacts
    order: Sequence[int]
    numa: Sequence[NumaFacts]
    remarks: list[str]
    switches: dict[str, str] = field(default_factory=dict)
    entries: list[Json] = field(default_factory=list)
    links: list[Json] = field(default_factory=list)

    @property
    def gpus(self) -> list[NvmlGpu]:
        return [self.nvml.gpus[i] for i in self.order]

    def _pairs(self, pairs: frozenset[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns those of NVML's pairs whose GPUs are visible, renumbered."""
        position = {number: index for index, number in enumerate(self.order)}
        seen = [(position[a], position[b]) for a, b in pairs if {a, b} <= set(position)]
        return sorted((min(pair), max(pair)) for pair in seen)

    def add_gpu(self, index: int, gpu: NvmlGpu, pci: PciFacts) -> None:
        numbers = [node.number for node in self.numa]
        node = pci.numa_node if pci.numa_node in numbers else None
        self.entries.append(
            {
                "id": f"gpu{index}",
                "name": gpu.name,
                "uuid": gpu.uuid,
                "pci_address": gpu.pci_address,
                "numa_node": f"numa{numbers[0] if node is None else node}",
            }
        )
        above = str(self.entries[-1]["numa_node"])
        if node is None and len(numbers) > 1:
            self.remarks.append(
                f"gpu{index} ({gpu.pci_address}): the system does not say which NUMA "
                f"node it is near; taken as {above}"
            )
        if not pci.is_tree_visible:
            self.remarks.append(
                f"gpu{index} ({gpu.pci_address}): the PCIe tree above it is hidden (a "
                f"virtual machine?); GPUs that share a switch cannot be told apart "
                f"from those that do not until their links are measured together"
            )
        if gpu.is_mig:
            self.remarks.append(
                f"gpu{index} ({gpu.pci_address}): MIG is on; slices have no peer "
                f"access, so it neither lends nor borrows links"
            )
        for port in pci.switches:
            above = self._add_switch(above, port)
        self._add_pcie(f"pcie{index}", above, f"gpu{index}", _gpu_port(gpu, pci))

    def _add_switch(self, above: str, port: PciePort) -> str:
        known = self.switches.get(port.address)
        if known is not None:
            return known
        switch = f"switch-{port.address}"
        self.switches[port.address] = switch
        self._add_pcie(f"uplink-{port.address}", above, switch, port)
        return switch

    def _add_pcie(self, link: str, above: str, below: str, port: PciePort) -> None:
        rate = rates.pcie_bytes_per_s(port.generation, port.width)
        entry: Json = {
            "id": link,
            "type": "pcie",
            "a": above,
            "b": below,
            "a_to_b_bytes_per_s": rate,
            "b_to_a_bytes_per_s": rate,
            "latency_ns": rates.PCIE_LATENCY_NS,
            "rate_source": "estimated",
        }
        if port.generation:
            entry["generation"] = port.generation
            entry["max_generation"] = max(port.generation, port.max_generation)
        if port.width:
            entry["width"] = port.width
            entry["max_width"] = max(port.width, port.max_width)
        if not (port.generation and port.width):
            self.remarks.append(
                f"{link}: generation or width unknown; counted as PCIe "
                f"{port.generation or 3}.0 x{port.width or 16}"
            )
        self.links.append(entry)
        if 0 < port.width < port.max_width or 0 < port.generation < port.max_generation:
            self.remarks.append(
                f"{link} ({port.address}) runs at PCIe {port.generation}.0 "
                f"x{port.width}, though the device can do {port.max_generation}.0 "
                f"x{port.max_width}: check the slot, the riser or the BIOS"
            )

    def add_nvlinks(self) -> None:
        """Bundles of bricks to other GPUs and to the NVSwitch fabric."""
        address_to_gpu = {gpu.pci_address: i for i, gpu in enumerate(self.gpus)}
        all_addresses = {gpu.pci_address for gpu in self.nvml.gpus}
        over_nvlink = self._pairs(self.nvml.nvlink_pairs)
        has_fabric: set[int] = set()
        for index, gpu in enumerate(self.gpus):
            active = [brick for brick in gpu.bricks if brick.is_active]
            num_down = len(gpu.bricks) - len(active)
            if active and num_down:
                self.remarks.append(
                    f"gpu{index} ({gpu.pci_address}): {num_down} of its "
                    f"{len(gpu.bricks)} NVLinks are down"
                )
            by_end: dict[str, list[Brick]] = {}
            for brick in active:
                is_gpu = brick.remote in all_addresses
                end = brick.remote if brick.remote and is_gpu else NVSWITCH
                by_end.setdefault(end, []).append(brick)
            # With all bricks going one way, those that are down went there too.
            max_width = len(gpu.bricks) if len(by_end) == 1 else 0
            for end, bricks in sorted(by_end.items()):
                if end == NVSWITCH:
                    # Where the other end is hidden, peer access over NVLink with
                    # some GPU shows that the bricks lead somewhere.
                    is_known = any(b.remote == NVSWITCH for b in bricks)
                    if is_known or any(index in pair for pair in over_nvlink):
                        has_fabric.add(index)
                        self._add_nvlink(index, NVSWITCH, bricks, max_width)
                elif address_to_gpu.get(end, -1) > index:
                    other = address_to_gpu[end]
                    self._add_nvlink(index, f"gpu{other}", bricks, max_width)
        if has_fabric:
            self.switches[NVSWITCH] = NVSWITCH

    def _add_nvlink(self, gpu: int, end: str, bricks: list[Brick], most: int) -> None:
        rate = sum(
            rates.nvlink_bytes_per_s(brick.generation, brick.bytes_per_s)
            for brick in bricks
        )
        generation = Counter(brick.generation for brick in bricks).most_common(1)[0][0]
        entry: Json = {
            "id": f"nvlink{gpu}-{end.removeprefix('gpu')}",
            "type": "nvlink",
            "a": f"gpu{gpu}",
            "b": end,
            "a_to_b_bytes_per_s": rate,
            "b_to_a_bytes_per_s": rate,
            "latency_ns": rates.NVLINK_LATENCY_NS,
            "width": len(bricks),
            "max_width": max(len(bricks), most),
            "rate_source": "estimated",
        }
        if generation:
            entry["generation"] = entry["max_generation"] = generation
        self.links.append(entry)

    def add_sockets(self) -> None:
        for a, b in itertools.combinations(self.numa, 2):
            distance = a.distances.get(b.number)
            rate = rates.upi_bytes_per_s(distance)
            self.links.append(
                {
                    "id": f"upi{a.number}-{b.number}",
                    "type": "upi",
                    "a": f"numa{a.number}",
                    "b": f"numa{b.number}",
                    "a_to_b_bytes_per_s": rate,
                    "b_to_a_bytes_per_s": rate,
                    "latency_ns": rates.UPI_LATENCY_NS,
                    "rate_source": "estimated",
                }
            )

    def finish(self, name: str) -> Json:
        has_gpus = bool(self.entries)
        peers = self._pairs(self.nvml.peer_access)
        slices = {i for i, gpu in enumerate(self.gpus) if gpu.is_mig}
        driver = f", driver {self.nvml.driver}" if self.nvml.driver else ""
        return {
            "format": "jax_turbobus/topology",
            "version": 1,
            "name": name,
            "description": f"Found on this machine{driver}; rates are estimates."
            if has_gpus
            else "No GPU found: transfers are plain copies in host memory.",
            "numa_nodes": [{"id": f"numa{node.number}"} for node in self.numa],
            "switches": [
                {"id": node, "type": "nvswitch" if node == NVSWITCH else "pcie"}
                for node in self.switches.values()
            ],
            "gpus": self.entries,
            "links": self.links,
            "peer_access": [
                [f"gpu{a}", f"gpu{b}"] for a, b in peers if not {a, b} & slices
            ],
        }


def _gpu_port(gpu: NvmlGpu, pci: PciFacts) -> PciePort:
    """Returns the GPU's own PCIe link, as it runs under load.

    An idle GPU lets its link drop to generation 1, so the generation of now
    counts only in a fast performance state; otherwise it is taken that the link
    will reach what GPU and slot can do together. The width does not drop.
    """
    seen = pci.endpoint
    generation = gpu.generation or seen.generation
    if not gpu.is_at_full_speed:
        reachable = gpu.system_max_generation or seen.max_generation
        generation = max(generation, reachable)
    return PciePort(
        address=gpu.pci_address,
        generation=generation,
        max_generation=max(gpu.max_generation, seen.max_generation),
        width=gpu.width or seen.width or gpu.system_max_width,
        max_width=max(gpu.system_max_width, seen.max_width),
    )
