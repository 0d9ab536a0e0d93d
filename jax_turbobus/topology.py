"""A machine's GPUs, memories and links, and the paths between them.

A `Topology` comes from a file (`Topology.load`), from this machine
(`discover`), or from JSON text. It is immutable, and can be copied and pickled.
docs/topology.md defines the file format.

GPUs, NUMA nodes and links are numbered by their place in the file; GPU i is
local CUDA device i. Rates are bytes per second, one direction of a link at a
time; a path's rate is that of its slowest link.
"""

import importlib.resources
import json
import numbers
import os
import platform
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any, Literal

from jax_turbobus import _ffi
from jax_turbobus._discovery import build, nvml, sysfs

__all__ = [
    "Direction",
    "Discovery",
    "Gpu",
    "Link",
    "LinkGroup",
    "NumaNode",
    "Path",
    "PeerPath",
    "Switch",
    "Topology",
    "discover",
    "names",
    "path_score",
]

Direction = Literal["h2d", "d2h"]

# The core reads no more of a file.
_MOST_FILE_BYTES = 4 << 20
_MOST_WHOLE = (1 << 62) - 1
_MOST_BYTES_PER_S = 1e15


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


def _direction(core: Any, direction: str) -> Any:
    if direction not in ("h2d", "d2h"):
        raise ValueError(f"direction: expected 'h2d' or 'd2h', got {direction!r}")
    return core.Direction.H2D if direction == "h2d" else core.Direction.D2H


def _whole(name: str, value: Any, least: int, most: int, why: str = "") -> int:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole:
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {value}{why}")
    return int(value)


def _index(name: str, value: Any, size: int) -> int:
    return _whole(name, value, 0, size - 1, f"; the topology has {size}")


def _read(path: str) -> bytes:
    # A pipe or a device may have no end, or keep its reader waiting.
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # open refuses those
        raise ValueError("it is not a regular file")
    with open(path, "rb") as file:
        return file.read(_MOST_FILE_BYTES + 1)  # the core refuses the one too many


class Topology:
    """A machine's GPUs, memories and links, checked, with its paths.

    Make one with `load`, `from_json` or `discover`.

    Attributes:
      native: the same topology for the C++ parts.
    """

    def __init__(self, native: Any) -> None:
        self.native = native

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> "Topology":
        """Returns a shipped topology by name, or the one in a file.

        Args:
          name_or_path: one of `names()`, or a path to a JSON file (anything with
            a slash or a ``.json`` at its end is a path).

        Raises:
          TypeError: it is neither a name nor a path.
          ValueError: there is no such topology, or the file cannot be read or
            contradicts itself; the message names file, line and field, what was
            expected and what came.
        """
        given: object = name_or_path  # whatever the annotation says
        if not isinstance(given, str | os.PathLike):
            raise TypeError(
                "topology: expected the name of a shipped topology or the path of a "
                f"file, got {given!r}"
            )
        text = os.fsdecode(name_or_path)
        is_path = not isinstance(name_or_path, str) or os.sep in text
        if not is_path and not text.endswith(".json"):
            if text not in names():
                raise ValueError(
                    f"topology: expected one of {', '.join(names())} or the path of a "
                    f"JSON file, got {text!r}"
                )
            return cls.from_json(_shipped().joinpath(f"{text}.json").read_bytes(), text)
        try:
            data = _read(text)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(
                f"topology {text}: cannot be read: {reason}; give the path of a JSON "
                f"file or one of {', '.join(names())}"
            ) from error
        return cls.from_json(data, text)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "<text>") -> "Topology":
        """Returns the topology that a JSON text describes.

        Args:
          text: the content of a topology file.
          source: what error messages call it.

        Raises:
          TypeError: `text` or `source` is no text.
          ValueError: as for `load`.
        """
        given: tuple[object, object] = (text, source)  # whatever the annotation says
        if not isinstance(given[0], str | bytes):
            raise TypeError(
                f"text: expected the content of a topology file, got {given[0]!r}"
            )
        if not isinstance(given[1], str):
            raise TypeError(f"source: expected a str, got {given[1]!r}")
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        name = source.encode("utf-8", "backslashreplace").decode()
        return cls(_ffi.core().Topology.from_json(data, name))

    def to_json(self) -> str:
        """Returns the content of a file that loads as this topology."""
        return str(self.native.to_json())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the topology to a file for `load`."""
        FilePath(path).write_text(self.to_json(), encoding="utf-8")

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return type(self).from_json, (self.to_json(), self.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return (
            f"<Topology {self.name!r}: {len(self.gpus)} GPUs, "
            f"{len(self.numa_nodes)} NUMA nodes, {len(self.links)} links>"
        )

    @property
    def name(self) -> str:
        """The machine's name."""
        return str(self.native.name)

    @property
    def description(self) -> str:
        """One line about the machine; may be empty."""
        return str(self.native.description)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs; GPU i is local CUDA device i."""
        return tuple(Gpu(**fields) for fields in self.native.gpus())

    @cached_property
    def numa_nodes(self) -> tuple[NumaNode, ...]:
        """Host memories."""
        return tuple(NumaNode(**fields) for fields in self.native.numa_nodes())

    @cached_property
    def switches(self) -> tuple[Switch, ...]:
        """PCIe switches and NVSwitch fabrics."""
        return tuple(Switch(**fields) for fields in self.native.switches())

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """All links."""
        return tuple(Link(**fields) for fields in self.native.links())

    @cached_property
    def link_groups(self) -> tuple[LinkGroup, ...]:
        """Groups of GPUs that share a slow resource; each GPU is in one."""
        return tuple(LinkGroup(**fields) for fields in self.native.link_groups())

    def has_peer_access(self, a: int, b: int) -> bool:
        """Returns whether two GPUs can read and write each other's memory."""
        return bool(self.native.has_peer_access(self._gpu("a", a), self._gpu("b", b)))

    def can_relay(self, gpu: int, relay: int) -> bool:
        """Returns whether `relay` may lend its host link to `gpu`.

        It needs peer access over a fabric of about twice the relay's PCIe rate.

        Source: TurboBus, "When it works".
        """
        return bool(
            self.native.can_relay(self._gpu("gpu", gpu), self._gpu("relay", relay))
        )

    def _gpu(self, name: str, value: Any) -> int:
        return _index(name, value, len(self.gpus))

    def _node(self, value: Any) -> int:
        return _index("numa_node", value, len(self.numa_nodes))

    def paths(
        self, gpu: int, direction: Direction, numa_node: int | None = None
    ) -> list[Path]:
        """Returns the direct path, then those through relays that add to it.

        Args:
          gpu: whose memory.
          direction: ``"h2d"`` or ``"d2h"``.
          numa_node: where the host memory is; None: the GPU's own node.

        Raises:
          TypeError: an index is no whole number.
          ValueError: an index or the direction does not exist.
        """
        native = self.native_paths(gpu, direction, numa_node)
        return [
            Path(
                gpu=path.gpu,
                relay=path.relay if path.is_relay else None,
                numa_node=path.numa_node,
                direction=direction,
                bandwidth_bytes_per_s=path.bandwidth_bytes_per_s,
                latency_ns=path.latency_ns,
                links=tuple(path.links),
                link_group=path.link_group,
            )
            for path in native
        ]

    def native_paths(
        self, gpu: int, direction: Direction, numa_node: int | None = None
    ) -> list[Any]:
        """Returns what `paths` does, as the C++ parts take them."""
        core_direction = _direction(_ffi.core(), direction)
        node = None if numa_node is None else self._node(numa_node)
        return list(self.native.paths(self._gpu("gpu", gpu), core_direction, node))

    def peer_paths(self, src: int, dst: int) -> list[PeerPath]:
        """Returns every way from `src`'s memory to `dst`'s, best first.

        Raises:
          TypeError: an index is no whole number.
          ValueError: a GPU does not exist, or both are the same.
        """
        ends = self._gpu("src", src), self._gpu("dst", dst)
        return [PeerPath(**fields) for fields in self.native.peer_paths(*ends)]

    def pooled_bandwidth(self, gpu: int, direction: Direction) -> float:
        """Returns what all paths of a GPU carry together, other GPUs idle.

        In bytes per second.
        """
        core_direction = _direction(_ffi.core(), direction)
        return float(
            self.native.pooled_bandwidth(self._gpu("gpu", gpu), core_direction)
        )

    def lanes(
        self,
        numa_nodes: Sequence[int] = (),
        *,
        relays: bool = True,
        only_binding_caps: bool = True,
    ) -> Any:
        """Returns what a scheduler and an emulating transport are built from.

        Args:
          numa_nodes: lanes for host memory on these nodes; empty: on all.
          relays: whether lanes through relay GPUs are wanted.
          only_binding_caps: leaves out caps that the lanes drawing on them cannot
            exceed even together.

        Returns:
          The C++ `LanePlan`: `paths` (lane i runs on ``paths[i]``), `caps` (with
          `name` and `bandwidth_bytes_per_s`) and `lane_caps` (indices into
          `caps` for each lane).
        """
        nodes = [self._node(node) for node in numa_nodes]
        return self.native.lanes(nodes, relays, only_binding_caps)


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


def _shipped() -> Any:
    return importlib.resources.files("jax_turbobus") / "topologies"


def names() -> list[str]:
    """Returns the names of the topologies that come with the package."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in _shipped().iterdir()
        if entry.name.endswith(".json")
    )


def path_score(
    bandwidth_bytes_per_s: float, latency_ns: int, size_bytes: int = 1 << 20
) -> float:
    """Returns the bytes a second that one message achieves alone on a path.

    Args:
      bandwidth_bytes_per_s: of the path; above 0, up to 1e15.
      latency_ns: of the path.
      size_bytes: of the message.

    Raises:
      TypeError: one of them is no number.
      ValueError: one of them is negative, or no rate.
    """
    rate: Any = bandwidth_bytes_per_s
    is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
    if not is_number:
        raise TypeError(f"bandwidth_bytes_per_s: expected a number, got {rate!r}")
    if not 0 < rate <= _MOST_BYTES_PER_S:
        raise ValueError(
            f"bandwidth_bytes_per_s: expected a number above 0 and up to "
            f"{_MOST_BYTES_PER_S:g}, got {rate!r}"
        )
    score = _ffi.core().path_score(
        float(rate),
        _whole("latency_ns", latency_ns, 0, _MOST_WHOLE),
        _whole("size_bytes", size_bytes, 0, _MOST_WHOLE),
    )
    return float(score)
