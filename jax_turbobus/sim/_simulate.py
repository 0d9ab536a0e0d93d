"""Runs transfers over a topology in virtual time."""

import os
from collections.abc import Sequence
from typing import Any

from jax_turbobus.sim import _checks, _node, _policies
from jax_turbobus.sim._policies import Lanes, Policy
from jax_turbobus.sim._types import Background, Result, Transfer
from jax_turbobus.topology import Topology

__all__ = ["simulate"]


def simulate(
    topology: Topology | str | os.PathLike[str],
    transfers: Sequence[Transfer],
    policy: str | Policy = "pooled",
    *,
    max_links: int | None = None,
    background: Sequence[Background] = (),
) -> Result:
    """Returns when each transfer would finish; no bytes move, no time passes.

    The C++ scheduler that the engine uses is stepped over the topology's links,
    which are shared as fairly as hardware shares them: every link direction, link
    group, memory and full-duplex limit of the topology is a resource, and each
    lane that moves a block gets its max-min share. A block arrives its path's
    latency after its last byte has left.

    Args:
      topology: the machine: a `Topology`, the name of a shipped one or a file.
      transfers: in any order; each arrives at its time. At most 2**46 bytes each,
        and 2**20 blocks in all.
      policy: a name out of `POLICIES`, or a `Policy`.
      max_links: links that a transfer may use, its own included; None: all.
      background: traffic that the scheduler does not know of.

    Raises:
      TypeError: an argument, or a field of one, has the wrong type.
      ValueError: a transfer, policy or background load does not fit the machine, or
        transfers would take centuries.
    """
    chosen = _checks.check_policy(policy)
    if not isinstance(topology, Topology):
        topology = Topology.load(topology)
    if not topology.gpus:
        raise ValueError(f"topology: {topology.name!r} has no GPUs to transfer to")
    transfers = _checks.check_transfers(transfers, topology, chosen.block_bytes)
    if max_links is not None:
        max_links = _checks.whole("max_links", max_links, 1, 1 << 20)

    # The scheduler is told of the caps that can bind; in reality all are there.
    def lanes(only_binding_caps: bool) -> Lanes:
        return Lanes.of(
            topology,
            max_links=max_links,
            has_relays=chosen.has_relays,
            only_binding_caps=only_binding_caps,
        )

    real = lanes(only_binding_caps=False)
    index = {cap.name: i for i, cap in enumerate(real.caps)}
    background = _checks.check_background(background, index)
    finish_ns, blocks = _node.run(
        _policies.make_scheduler(chosen, lanes(only_binding_caps=True)),
        [
            _node.LaneModel(tuple(caps), path.latency_ns)
            for path, caps in zip(real.paths, real.lane_caps, strict=True)
        ],
        [cap.bandwidth_bytes_per_s for cap in real.caps],
        transfers,
        [(index[load.resource], load) for load in background],
    )
    return Result(
        transfers,
        tuple(finish_ns),
        tuple(blocks),
        tuple(_name(path) for path in real.paths),
    )


def _name(path: Any) -> str:
    direction = "h2d" if path.direction.name == "H2D" else "d2h"
    via = f" via gpu{path.relay}" if path.is_relay else ""
    return f"gpu{path.gpu}{via} {direction}"
