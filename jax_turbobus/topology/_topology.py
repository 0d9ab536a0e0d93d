"""A checked machine: what it has, and the paths that the core finds in it."""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

from jax_turbobus import _ffi
from jax_turbobus.topology import _checks, _files
from jax_turbobus.topology._parts import (
    Direction,
    Gpu,
    Link,
    LinkGroup,
    NumaNode,
    Path,
    PeerPath,
    Switch,
)


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
        return cls.from_json(*_files.content(name_or_path))

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
        return _checks.index(name, value, len(self.gpus))

    def _node(self, value: Any) -> int:
        return _checks.index("numa_node", value, len(self.numa_nodes))

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
        core_direction = _checks.core_direction(_ffi.core(), direction)
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
        core_direction = _checks.core_direction(_ffi.core(), direction)
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
