"""What was measured of this process's GPUs, for the choice of a schedule."""

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_turbobus import gpu
from jax_turbobus.moe import _wiring
from jax_turbobus.moe._wiring import Wiring

__all__ = ["MeasuredLinks", "links_of", "of_this_process"]


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredLinks:
    """Rates between GPUs, and what an exchange takes beside its bytes.

    Attributes:
      rates: ``float64[num_gpus, num_gpus]`` (from, to), bytes per second while every
        GPU sends and receives, on the way that an exchange takes. The diagonal does not
        count.
      has_peer_access: all GPUs reach each other's memory.
      starts: seconds of dispatch and combine beside their bytes, by the names in
        `_profile_exchange.STARTS`, as far as measured.
      most_mailed_bytes: of a rank's tokens, up to which kernels carry them through host
        memory themselves.
      source: where the figures come from, for people.
    """

    rates: npt.NDArray[np.float64] = dataclasses.field(repr=False)
    has_peer_access: bool
    starts: Mapping[str, float]
    most_mailed_bytes: int
    source: str

    @property
    def num_gpus(self) -> int:
        """GPUs of the process."""
        return len(self.rates)

    def wiring(self, num_ranks: int) -> Wiring:
        """Returns the links under ranks.

        As many ranks as GPUs have these GPUs in order. A traced program does not say
        which GPUs fewer ranks are; then, and in several groups, all links are taken to
        be as the slowest one, for which all wait.

        Args:
          num_ranks: ranks.
        """
        rates = self.rates
        if num_ranks != self.num_gpus:
            others = ~np.eye(self.num_gpus, dtype=bool)
            rates = np.full((num_ranks, num_ranks), rates[others].min())
        return _wiring.from_rates(rates, has_peer_access=self.has_peer_access)

    def start_seconds(self, token_bytes: int) -> dict[str, float]:
        """Returns seconds beside the bytes by schedule, as far as measured.

        Args:
          token_bytes: of the tokens that a rank brings.
        """
        if self.has_peer_access:
            # Under any schedule they write into each other's memory.
            names = dict.fromkeys(("direct", "packed", "broadcast", "relay"), "peer")
        elif token_bytes <= self.most_mailed_bytes:
            names = dict.fromkeys(("packed", "broadcast", "relay"), "mail")
        else:
            names = {"packed": "packed", "broadcast": "broadcast", "relay": "packed"}
        return {
            schedule: self.starts[name]
            for schedule, name in names.items()
            if name in self.starts
        }


def links_of(
    library: ModuleType, exchange: Any, source: str
) -> tuple[MeasuredLinks | None, str]:
    """Returns the links of this process's GPUs, or None and why there are none.

    Args:
      library: the CUDA library.
      exchange: the part of a profile.
      source: where it comes from, for people.
    """
    uuids = [one["uuid"] for one in library.gpus()]
    number = len(uuids)
    if number < 2:
        return None, "there is one GPU"
    reach = [
        [a == b or bool(library.can_access_peer(a, b)) for b in range(number)]
        for a in range(number)
    ]
    rates = np.full((number, number), np.inf)
    for a, b in np.argwhere(~np.eye(number, dtype=bool)):
        path = "peer" if reach[a][b] and reach[b][a] else "host"
        rate = exchange.rate(uuids[a], uuids[b], path)
        if rate is None:
            return None, f"{source} has no rate from GPU {a} to GPU {b} ({path})"
        rates[a, b] = rate
    return (
        MeasuredLinks(
            rates=rates,
            has_peer_access=all(map(all, reach)),
            starts=exchange.starts,
            most_mailed_bytes=library.most_mailed_bytes,
            source=source,
        ),
        "",
    )


def of_this_process() -> tuple[MeasuredLinks | None, str]:
    """Returns the links that this process's profile knows, or None and why not."""
    engine = gpu.engine()
    if engine is None:
        return None, "this process uses no GPUs of ours"
    if engine.profile is None or engine.profile.exchange is None:
        return None, engine.why_no_exchange
    source = f"the profile of {engine.profile.date}"
    return links_of(engine.library, engine.profile.exchange, source)
