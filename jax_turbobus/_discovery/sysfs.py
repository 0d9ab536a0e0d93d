"""What sysfs says about NUMA nodes and the PCIe tree above each GPU."""

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NumaFacts", "PciFacts", "PciePort", "Sysfs"]

_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_GENERATION_OF_GT_PER_S = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}


@dataclass(frozen=True)
class NumaFacts:
    """One NUMA node that has processors.

    Attributes:
      number: the kernel's number of the node.
      distances: to each node by its number, 10 being its own memory; empty: not
        known.
      cpus: the kernel's numbers of its processors; empty: not known.
    """

    number: int
    distances: dict[int, int]
    cpus: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PciePort:
    """A device and its link towards the host; zeros stand for unknown."""

    address: str
    generation: int = 0
    max_generation: int = 0
    width: int = 0
    max_width: int = 0


@dataclass(frozen=True)
class PciFacts:
    """A GPU's place in the PCIe tree.

    Attributes:
      endpoint: the GPU itself.
      switches: upstream ports of the switches above it, from the host down.
      numa_node: the kernel's number, or None where it does not know.
      is_tree_visible: a root port was seen. Virtual machines often show none:
        then shared switches cannot be seen either.
    """

    endpoint: PciePort
    switches: tuple[PciePort, ...] = ()
    numa_node: int | None = None
    is_tree_visible: bool = False


def parse_list(text: str) -> list[int]:
    """Returns the numbers of a kernel list such as ``0-2,5``."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            continue
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


class Sysfs:
    """Reads one sysfs tree. Anything missing or odd reads as unknown.

    Args:
      root: where sysfs is mounted; tests give a tree of their own.
    """

    def __init__(self, root: str | Path = "/sys") -> None:
        self._root = Path(root)

    def _read(self, path: Path) -> str:
        try:
            return path.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return ""

    def numa_nodes(self) -> list[NumaFacts]:
        """Returns the NUMA nodes that have processors; at least one.

        Nodes of memory only (a GPU's, a CXL card's) are no place for host
        buffers. Where the kernel shows no nodes, the machine counts as one.
        """
        folder = self._root / "devices/system/node"
        numbers = parse_list(self._read(folder / "has_cpu"))
        if not numbers:
            numbers = parse_list(self._read(folder / "online"))
        online = parse_list(self._read(folder / "online")) or numbers
        nodes = []
        for number in numbers or [0]:
            text = self._read(folder / f"node{number}/distance").split()
            distances = [int(word) for word in text if word.isdigit()]
            known = len(distances) == len(online)
            nodes.append(
                NumaFacts(
                    number=number,
                    distances=dict(zip(online, distances, strict=True))
                    if known
                    else {},
                    cpus=frozenset(
                        parse_list(self._read(folder / f"node{number}/cpulist"))
                    ),
                )
            )
        return nodes

    def transparent_hugepages(self) -> str:
        """Returns ``"always"``, ``"madvise"``, ``"never"``, or "" if unknown."""
        text = self._read(self._root / "kernel/mm/transparent_hugepage/enabled")
        match = re.search(r"\[(\w+)\]", text)
        return match[1] if match else ""

    def pci(self, address: str) -> PciFacts:
        """Returns where the device at a PCI address sits.

        Args:
          address: as sysfs writes it, such as ``0000:06:00.0``.
        """
        link = self._root / "bus/pci/devices" / address
        try:
            device = link.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: a loop of links
            return PciFacts(endpoint=PciePort(address))
        above: list[Path] = []
        folder = device.parent
        while _ADDRESS.match(folder.name):
            above.append(folder)
            folder = folder.parent
        above.reverse()
        # Below a root port each switch shows two ports, the upper one first:
        # [root port, upstream, downstream, upstream, downstream, ..., device].
        switches = tuple(self._port(port) for port in above[1::2])
        numa = self._read(device / "numa_node")
        return PciFacts(
            endpoint=self._port(device),
            switches=switches,
            numa_node=int(numa) if numa.isdigit() else None,
            is_tree_visible=bool(above),
        )

    def _port(self, device: Path) -> PciePort:
        return PciePort(
            address=device.name,
            generation=self._generation(device / "current_link_speed"),
            max_generation=self._generation(device / "max_link_speed"),
            width=self._width(device / "current_link_width"),
            max_width=self._width(device / "max_link_width"),
        )

    def _generation(self, path: Path) -> int:
        match = re.match(r"(\d+(?:\.\d+)?) ?GT/s", self._read(path))
        if match is None:
            return 0
        return _GENERATION_OF_GT_PER_S.get(match[1].removesuffix(".0"), 0)

    def _width(self, path: Path) -> int:
        text = self._read(path)
        width = int(text) if text.isdigit() else 0
        # The kernel writes 255 for a link whose width it cannot tell.
        return width if width <= 32 else 0
