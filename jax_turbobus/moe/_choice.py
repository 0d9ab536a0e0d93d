"""Which schedule an exchange should take: a static choice, by modelled time."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from jax_turbobus.moe._measured import MeasuredLinks
from jax_turbobus.moe._traffic import Traffic
from jax_turbobus.moe._volume import TopologyLike, Volume, volume
from jax_turbobus.moe._wiring import Wiring
from jax_turbobus.topology import Topology

__all__ = ["Choice", "Costs", "choose_schedule", "seconds_of"]


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the links do not say.

    Attributes:
      link_bytes_per_s: of a link whose rate is unknown.
      memory_bytes_per_s: a rank's own memory, read and written.
      launch_s: a step that does nothing: a kernel, or a handler that meets its peers.
      starts: by schedule, what dispatch and combine were measured to take beside their
        bytes; used instead of steps.
    """

    link_bytes_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    starts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def start_seconds(self, traffic: Traffic) -> float:
        """Returns what an exchange takes that moves nothing."""
        return self.starts.get(traffic.name, traffic.num_launches * self.launch_s)


# CPU devices exchange by copying in one memory, and a meeting wakes threads. For GPUs:
# 1.9 TB/s of packing and 3-25 us a meeting on 2 x H200 (NVLink, driver 580.159.04,
# jax 0.11.2, 2026-11-30).
CPU_COSTS = Costs(link_bytes_per_s=5e9, memory_bytes_per_s=5e9, launch_s=50e-6)
GPU_COSTS = Costs(link_bytes_per_s=50e9, memory_bytes_per_s=1.9e12, launch_s=10e-6)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A schedule and why it was taken.

    Attributes:
      schedule: the name to pass on.
      seconds: modelled time of dispatch and combine, for each schedule that can run.
      refused: why the others cannot.
      volume: the bytes behind it.
      bottleneck: the link that is busy longest under `schedule`.
      source: where rates and starts come from.
    """

    schedule: str
    seconds: dict[str, float]
    refused: dict[str, str]
    volume: Volume = dataclasses.field(repr=False)
    bottleneck: str
    source: str = "without a topology: all links alike, rates assumed"

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """Returns a few lines for people."""
        lines = [f"schedule: {self.schedule}"]
        for name, seconds in sorted(self.seconds.items(), key=lambda item: item[1]):
            mib = self.volume[name].total_bytes / 2**20
            lines.append(f"  {name:10} {seconds * 1e3:9.3f} ms  {mib:10.4g} MiB")
        lines.extend(f"  {name:10} no: {why}" for name, why in self.refused.items())
        lines.append(f"  busiest under {self.schedule}: {self.bottleneck}")
        lines.append(f"  figures: {self.source}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the volume as plain values."""
        return {
            "schedule": self.schedule,
            "seconds": self.seconds,
            "refused": self.refused,
            "bottleneck": self.bottleneck,
            "source": self.source,
        }


def seconds_of(traffic: Traffic, wiring: Wiring, costs: Costs) -> float:
    """Returns the modelled time of one exchange, dispatch and combine.

    Each phase lasts as long as its busiest link; packing, expanding and launching come
    on top. A floor that ignores overlap and protocol, good for comparing schedules.
    """

    def phase(matrix: Any) -> float:
        loads = wiring.loads(traffic, matrix)
        busy = wiring.link_seconds(loads, costs.link_bytes_per_s)
        return float(busy.max(initial=0.0))

    phases = (traffic.dispatch, traffic.metadata, traffic.combine)
    return (
        sum(map(phase, phases))
        + traffic.local_bytes / costs.memory_bytes_per_s
        + costs.start_seconds(traffic)
    )


def choose_schedule(
    *,
    tokens_per_rank: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    num_ranks: int,
    dtype: Any = "bfloat16",
    expert_ids: npt.ArrayLike | None = None,
    topology: TopologyLike | None = None,
    gpus: Sequence[int] | None = None,
    schedules: Sequence[str] = ("direct", "packed", "broadcast", "relay"),
    costs: Costs | None = None,
) -> Choice:
    """Returns the schedule that should be fastest, with its reasons.

    Everything it looks at is static, so the choice is one of a compiled program.

    Args:
      tokens_per_rank: tokens that each rank brings.
      hidden: elements of one row.
      num_experts: experts in all, a multiple of `num_ranks`.
      top_k: experts chosen by a token.
      num_ranks: ranks along the expert axis.
      dtype: dtype of a row.
      expert_ids: as for `volume`: a typical routing instead of a uniform one.
      topology: the machine, or its name or file as for `Topology.load`; without one,
        all ranks are taken as connected alike.
      gpus: the topology's GPU under each rank; by default the first ones.
      schedules: those that may be taken.
      costs: what launches and own memory cost; by default those of a GPU if
        `topology` is given, with what was measured if it has that, else those of
        CPU devices.

    Returns:
      A `Choice`; of schedules modelled equal, the one named first.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: sizes that do not fit each other, an unknown schedule, or none that
        can run here.
    """
    known = ("packed", "broadcast", "direct", "relay")
    if isinstance(schedules, str) or not isinstance(schedules, Sequence):
        raise TypeError(
            "schedules: expected a sequence of names, such as ('packed', 'broadcast'),"
            f" got {schedules!r}"
        )
    if costs is not None and not isinstance(costs, Costs):
        raise TypeError(f"costs: expected a Costs, got {costs!r}")
    for name in schedules:
        if name not in known:
            raise ValueError(
                f"schedules: expected some of {', '.join(known)}, got {name!r}"
            )
    result = volume(
        tokens_per_rank=tokens_per_rank,
        hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        dtype=dtype,
        expert_ids=expert_ids,
        topology=topology,
        gpus=gpus,
    )
    wiring = result.wiring
    if costs is None:
        costs = _costs_of(topology, result)
    refused = {
        name: why for name in schedules if (why := _why_not(name, wiring)) is not None
    }
    seconds = {
        name: seconds_of(result[name], wiring, costs)
        for name in schedules
        if name not in refused
    }
    if not seconds:
        raise ValueError(f"schedules: none of {list(schedules)} can run: {refused}")
    best = min(seconds, key=lambda name: seconds[name])
    busy = wiring.link_seconds(wiring.loads(result[best]), costs.link_bytes_per_s)
    bottleneck = wiring.links[int(busy.argmax())].name
    source = _source_of(topology, costs, seconds)
    return Choice(best, seconds, refused, result, bottleneck, source)


def _costs_of(topology: TopologyLike | None, result: Volume) -> Costs:
    if topology is None:
        return CPU_COSTS
    if not isinstance(topology, MeasuredLinks):
        return GPU_COSTS
    token_bytes = result.shape.tokens_per_rank * result.shape.row_bytes
    return dataclasses.replace(GPU_COSTS, starts=topology.start_seconds(token_bytes))


def _source_of(
    topology: TopologyLike | None, costs: Costs, schedules: Iterable[str]
) -> str:
    if topology is None:
        return "without a topology: all links alike, rates assumed"
    if not isinstance(topology, MeasuredLinks):
        if not isinstance(topology, Topology):
            topology = Topology.load(topology)
        return f"links of {topology.name!r}, steps assumed"
    if all(name in costs.starts for name in schedules):
        return f"links and starts by {topology.source}"
    return f"links by {topology.source}, steps assumed"


def _why_not(name: str, wiring: Wiring) -> str | None:
    if name == "direct" and not wiring.has_peer_access:
        return "not all ranks reach each other's memory"
    if name == "relay" and wiring.relay_paths == wiring.paths:
        return "no pair is better connected through a third GPU"
    return None
