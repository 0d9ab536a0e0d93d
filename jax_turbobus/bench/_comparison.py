"""What is compared: one size of exchange, our scheme's and its peers' rooms."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from jax_turbobus.moe._counts import ExchangeShape

__all__ = ["Comparison", "label_of"]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Our exchange beside its peers at one size.

    Attributes:
      devices: the ranks.
      shape: of one layer's exchange.
      peers: names of those that ours is compared with, by receive capacity: so many
        times the balanced share; None: one in which no row is ever lost.
      rounds: measurements of each.
      num_layers: in one program, each of what the one before returned.
      route: of the tokens, as for `routing.expert_ids`.
      schedule: of ours, as for `moe.dispatch`.
      has_backward: gradients are compared, too.
      in_a_row: more than 1: the best exact peer also by so many calls in a row.
      seed: of routing and values.
      prefix: of the rows' names.
      has_peers: GPUs reach each other's memory.
      pair_limit_s: of one pair's rounds.
    """

    devices: Sequence[jax.Device]
    shape: ExchangeShape
    peers: Mapping[float | None, Sequence[str]]
    rounds: int
    num_layers: int = 1
    route: str = "uniform"
    schedule: str = "auto"
    has_backward: bool = True
    in_a_row: int = 1
    seed: int = 0
    prefix: str = ""
    has_peers: bool = True
    pair_limit_s: float = math.inf

    def name(self, slack: float | None) -> str:
        """Returns what rows under this capacity are called."""
        s = self.shape
        routed = "" if self.route == "uniform" else f", {self.route}"
        layers = (
            "" if self.num_layers == 1 else f", {self.num_layers} layers in one program"
        )
        return (
            f"{self.prefix}{s.num_ranks} x {s.tokens_per_rank} tokens, hidden"
            f" {s.hidden} {s.dtype}, {s.num_experts} experts, top-{s.top_k}{routed},"
            f" capacity {label_of(slack)}{layers}"
        )


def label_of(slack: float | None) -> str:
    """Returns a capacity as rows name it."""
    return "dropless" if slack is None else f"{slack:g}x"
