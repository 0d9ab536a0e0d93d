"""Adds up the bytes a run's expert exchanges moved, and what others would have."""

import numpy as np

from jax_turbobus.demo.model import ModelConfig
from jax_turbobus.demo.train import Step
from jax_turbobus.moe._traffic import Traffic
from jax_turbobus.moe._volume import Volume, volume
from jax_turbobus.topology import Topology

__all__ = ["ExchangeBytes"]

# What links share (`Wiring` counts it, too) is no link: it would count bytes twice.
_SHARED = (" both ways", " memory")


def _both_passes(traffic: Traffic) -> float:
    """Returns the bytes of a step: the way out and back again, forward and backward.

    Gradients take the rows' way in reverse; the routing is known by then.
    """
    rows = float(traffic.dispatch.sum() + traffic.combine.sum())
    return 2 * rows + float(traffic.metadata.sum())


class ExchangeBytes:
    """Counts, from the routing of every step, what each scheme puts on the wire.

    Attributes:
      scheme: what the run used, a schedule of ours or a peer.
      by_scheme: bytes between devices under every schedule of ours and every peer.
      by_link: bytes that the scheme in use put on each device's way out and in.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_ranks: int,
        scheme: str,
        topology: Topology | None = None,
    ) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self.scheme = scheme
        self._topology = topology
        self._peers: tuple[str, ...] = ()
        self.by_scheme: dict[str, float] = {}
        self.by_link: dict[str, float] = {}

    @property
    def used(self) -> float:
        """Bytes moved by the scheme in use."""
        return self.by_scheme.get(self.scheme, 0.0)

    @property
    def peer_name(self) -> str:
        """The key of the scheme in use in `by_peer`."""
        return self.scheme if self.scheme in self._peers else "turbobus"

    @property
    def by_peer(self) -> dict[str, float]:
        """Bytes for the same routing by ours (``"turbobus"``) and by each peer."""
        ours = self.scheme if self.scheme not in self._peers else "packed"
        peers = {name: self.by_scheme[name] for name in self._peers}
        return {"turbobus": self.by_scheme[ours], **peers} if peers else {}

    def _volume(self, ids: np.ndarray) -> Volume:
        return volume(
            tokens_per_rank=ids.shape[0] // self._num_ranks,
            hidden=self._config.hidden,
            num_experts=self._config.num_experts,
            top_k=self._config.top_k,
            num_ranks=self._num_ranks,
            dtype="float32",
            expert_ids=ids,
            topology=self._topology,
        )

    def add(self, step: Step) -> None:
        """Adds the exchanges of one step, all layers."""
        for layer in step.expert_ids:
            counted = self._volume(layer)
            self._peers = tuple(counted.peers)
            for name, traffic in (counted.schedules | counted.peers).items():
                self.by_scheme[name] = self.by_scheme.get(name, 0.0) + _both_passes(
                    traffic
                )
            used = counted[self.scheme]
            loads = 2 * (
                counted.wiring.loads(used, used.dispatch)
                + counted.wiring.loads(used, used.combine)
            ) + counted.wiring.loads(used, used.metadata)
            for name, size_bytes in counted.wiring.describe(loads).items():
                if not size_bytes or name.endswith(_SHARED):
                    continue
                self.by_link[name] = self.by_link.get(name, 0.0) + size_bytes
