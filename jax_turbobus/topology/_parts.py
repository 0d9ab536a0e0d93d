"""What a machine is made of, and the paths between its memories: plain values."""

from dataclasses import dataclass
from typing import Literal

Direction = Literal["h2d", "d2h"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; `link_group` indexes `Topology.link_groups`."""

    index: int
    id: str
    name: str
    uuid: str
    pci_address: str
    numa_node: int
    link_group: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Host memory of one socket.

    Attributes:
      index: its place in `Topology.numa_nodes`.
      id: its name in the file.
      memory_bytes_per_s: what all transfers from and to it reach together, reads
        and writes added up; None: unknown, taken as no limit.
    """

    index: int
    id: str
    memory_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Switch:
    """A PCIe switch, or the NVSwitch fabric."""

    id: str
    type: Literal["pcie", "nvswitch"]


@dataclass(frozen=True, slots=True)
class Link:
    """One physical edge between the nodes `a` and `b` (their ids).

    Attributes:
      index: its place in `Topology.links`.
      id: its name in the file.
      type: what kind of link.
      a: one end.
      b: the other end.
      a_to_b_bytes_per_s: rate in that direction while the other is idle.
      b_to_a_bytes_per_s: rate in that direction while the other is idle.
      duplex_bytes_per_s: both directions at once, added up; None: their sum.
      latency_ns: of a small transfer.
      generation: protocol generation now; 0: unknown.
      max_generation: what its ends could do; 0: unknown.
      width: lanes (PCIe) or bricks (NVLink) now; 0: unknown.
      max_width: what its ends could do; 0: unknown.
      is_degraded: it runs below what its ends can do.
      rate_source: how the rates became known.
    """

    index: int
    id: str
    type: Literal["pcie", "nvlink", "upi", "c2c"]
    a: str
    b: str
    a_to_b_bytes_per_s: float
    b_to_a_bytes_per_s: float
    duplex_bytes_per_s: float | None
    latency_ns: int
    generation: int
    max_generation: int
    width: int
    max_width: int
    is_degraded: bool
    rate_source: Literal["specified", "estimated", "measured"]


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """GPUs whose own links end in one slow resource, such as a switch uplink.

    A GPU with a link of its own is a group of one. The rates are the group's
    together: relaying within a group gains nothing.
    """

    index: int
    id: str
    gpus: tuple[int, ...]
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Path:
    """Ordered links between a GPU's memory and a NUMA node's.

    Attributes:
      gpu: whose memory.
      relay: the GPU that lends its link; None: direct.
      numa_node: where the host memory is.
      direction: ``"h2d"`` or ``"d2h"``.
      bandwidth_bytes_per_s: of the slowest link on the way.
      latency_ns: of all links together.
      links: indices into `Topology.links`, from the source to the destination.
      link_group: of the GPU whose PCIe link is used.
    """

    gpu: int
    relay: int | None
    numa_node: int
    direction: Direction
    bandwidth_bytes_per_s: float
    latency_ns: int
    links: tuple[int, ...]
    link_group: int


@dataclass(frozen=True, slots=True)
class PeerPath:
    """One way from GPU `src`'s memory to GPU `dst`'s.

    Attributes:
      src: the source GPU.
      dst: the destination GPU.
      kind: ``"peer"`` (they reach each other's memory), ``"relay"`` (through a
        third GPU) or ``"host"`` (written to host memory and read from there).
      via: the third GPU, or the NUMA node; None for ``"peer"``.
      bandwidth_bytes_per_s: of the slowest link; host memory that is written and
        read counts twice.
      latency_ns: of all links together.
      links: indices into `Topology.links`, from the source to the destination.
    """

    src: int
    dst: int
    kind: Literal["peer", "relay", "host"]
    via: int | None
    bandwidth_bytes_per_s: float
    latency_ns: int
    links: tuple[int, ...]
