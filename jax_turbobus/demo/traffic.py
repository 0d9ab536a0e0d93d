"""Adds up the bytes a run's expert exchanges moved, and what others would have."""

from typing import Any

import numpy as np

from jax_turbobus import moe
from jax_turbobus.demo.model import ModelConfig
from jax_turbobus.demo.train import Step
from jax_turbobus.moe._traffic import Traffic
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
    """Counts, from the routing of every step, what each way of exchange moves.

    Attributes:
      by_peer: bytes between devices for the same routing: by our calls
        (``"turbobus"``), and by each peer that `moe.volume` knows.
      by_link: bytes that the exchange in use put on each link and direction.
      in_use: the key in `by_peer` of the exchange in use.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_ranks: int,
        peer: str | None,
        topology: Topology | None = None,
    ) -> None:
        """Starts at zero.

        Args:
          config: the model whose experts exchange.
          num_ranks: the devices they are spread over.
          peer: whose exchange is in use; None: ours.
          topology: the machine whose links to count on; None: a way out and a way in
            for each device.
        """
        self._config = config
        self._num_ranks = num_ranks
        self._topology = topology
        self._schedule = ""
        self.in_use = peer or "turbobus"
        self.by_peer: dict[str, float] = {}
        self.by_link: dict[str, float] = {}

    def _sizes(self, ids: np.ndarray) -> dict[str, Any]:
        return {
            "tokens_per_rank": ids.shape[0] // self._num_ranks,
            "hidden": self._config.hidden,
            "num_experts": self._config.num_experts,
            "top_k": self._config.top_k,
            "num_ranks": self._num_ranks,
            "dtype": "float32",
        }

    def _our_schedule(self, ids: np.ndarray) -> str:
        """Returns the schedule that ran; or that would have, where none was counted."""
        kinds = moe.exchange_stats()
        ran = [kind.schedule for kind in kinds if kind.op == "dispatch"]
        if self.in_use == "turbobus" and ran:
            return ran[0]
        schedules = ("packed", "broadcast")
        return moe.choose_schedule(**self._sizes(ids), schedules=schedules).schedule

    def add(self, step: Step) -> None:
        """Adds the exchanges of one step, all layers."""
        for ids in step.expert_ids:
            self._schedule = self._schedule or self._our_schedule(ids)
            counted = moe.volume(
                **self._sizes(ids), expert_ids=ids, topology=self._topology
            )
            schemes = {"turbobus": counted[self._schedule], **counted.peers}
            for name, traffic in schemes.items():
                moved = self.by_peer.get(name, 0.0) + _both_passes(traffic)
                self.by_peer[name] = moved
            used = schemes[self.in_use]
            loads = 2 * (
                counted.wiring.loads(used, used.dispatch)
                + counted.wiring.loads(used, used.combine)
            ) + counted.wiring.loads(used, used.metadata)
            for name, size_bytes in counted.wiring.describe(loads).items():
                if size_bytes and not name.endswith(_SHARED):
                    self.by_link[name] = self.by_link.get(name, 0.0) + size_bytes
