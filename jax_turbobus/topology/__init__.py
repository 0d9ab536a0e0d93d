"""A machine's GPUs, memories and links, and the paths between them.

A `Topology` comes from a file (`Topology.load`), from this machine
(`discover`), or from JSON text. It is immutable, and can be copied and pickled.
docs/topology.md defines the file format.

GPUs, NUMA nodes and links are numbered by their place in the file; GPU i is
local CUDA device i. Rates are bytes per second, one direction of a link at a
time; a path's rate is that of its slowest link.
"""

from jax_turbobus.topology._discover import Discovery, discover
from jax_turbobus.topology._files import names
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
from jax_turbobus.topology._score import path_score
from jax_turbobus.topology._topology import Topology

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
