"""Random nodes for property tests, as configs and as what they are in reality."""

import dataclasses

from hypothesis import strategies as st

from jax_turbobus import _ffi
from jax_turbobus.sim import _node
from jax_turbobus.sim._policies import CoreScheduler
from jax_turbobus.sim._types import Transfer

MIB = 1 << 20
BLOCK = MIB
CHUNK = 8 * MIB
# One MiB a millisecond: a block takes a millisecond, and times read as blocks.
RATE = MIB * 1000.0
MS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Lane:
    gpu: int
    link: int
    direction: str
    fabric: float | None


@dataclasses.dataclass(frozen=True)
class Node:
    """`links[i]`: what GPU i's link carries, in MiB/ms; relays may be slower."""

    links: tuple[float, ...]
    lanes: tuple[Lane, ...]
    is_lock_step: bool = False
    latency_ns: int = 0

    def rate(self, lane):
        rate = self.links[lane.link]
        return rate if lane.fabric is None else min(rate, lane.fabric)

    def without_relays(self):
        direct = tuple(lane for lane in self.lanes if lane.gpu == lane.link)
        return dataclasses.replace(self, lanes=direct)

    def config(self):
        core = _ffi.core()
        config = core.SchedConfig()
        config.block_bytes, config.chunk_bytes = BLOCK, CHUNK
        if self.is_lock_step:
            config.mode = core.SchedMode.LOCK_STEP
        config.lanes = [
            core.LaneSpec(
                path=core.Path(
                    gpu=lane.gpu,
                    relay=-1 if lane.link == lane.gpu else lane.link,
                    direction=getattr(core.Direction, lane.direction.upper()),
                    bandwidth_bytes_per_s=self.rate(lane) * RATE,
                    latency_ns=self.latency_ns,
                ),
                window_bytes=2 * BLOCK,
            )
            for lane in self.lanes
        ]
        return config

    def run(self, transfers, scheduler=None, background=()):
        """Steps the scheduler over this node; (finish times, block records)."""
        capacities, index, models = [], {}, []

        def resource(key, rate):
            if key not in index:
                index[key] = len(capacities)
                capacities.append(rate * RATE)
            return index[key]

        for i, lane in enumerate(self.lanes):
            uses = [resource((lane.link, lane.direction), self.links[lane.link])]
            if lane.fabric is not None:
                uses.append(resource(i, lane.fabric))
            models.append(_node.LaneModel(tuple(uses), self.latency_ns))
        return _node.run(
            scheduler or CoreScheduler(self.config()),
            models,
            capacities,
            transfers,
            [(index[key], load) for key, load in background],
        )


RATES = st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.75, 1.0, 1.0, 1.5, 2.0, 4.0])


@st.composite
def nodes(draw, max_gpus=4, directions=("h2d", "d2h")):
    num_gpus = draw(st.integers(1, max_gpus))
    links = tuple(draw(RATES) for _ in range(num_gpus))
    lanes = []
    for direction in directions:
        for gpu in range(num_gpus):
            for link in range(num_gpus):
                if gpu != link and not draw(st.sampled_from([True, True, False])):
                    continue
                fabric = None if gpu == link else draw(st.none() | RATES)
                lanes.append(Lane(gpu, link, direction, fabric))
    return Node(
        links,
        tuple(lanes),
        is_lock_step=draw(st.booleans()),
        latency_ns=draw(st.sampled_from([0, 0, 5_000, 300_000])),
    )


SIZES = st.one_of(
    st.integers(1, BLOCK - 1),  # small ones, and some that are just a block
    st.integers(BLOCK // 2, CHUNK),
    st.integers(1, 12).map(lambda n: n * BLOCK),
    st.integers(CHUNK + 1, 8 * CHUNK),
)


def transfers_for(num_gpus, directions=("h2d", "d2h"), max_size=8):
    one = st.builds(
        Transfer,
        gpu=st.integers(0, num_gpus - 1),
        size_bytes=SIZES,
        arrival_ns=st.integers(0, 30 * MS),
        direction=st.sampled_from(directions),
    )
    return st.lists(one, min_size=1, max_size=max_size)
