"""Volumes and choices of sizes that most tests of them share."""

from jax_turbobus.moe import _volume
from jax_turbobus.moe._choice import choose_schedule
from jax_turbobus.topology import Topology


def make(**changes):
    sizes = {
        "tokens_per_rank": 1024,
        "hidden": 256,
        "num_experts": 32,
        "top_k": 2,
        "num_ranks": 4,
        "dtype": "float32",
    }
    return _volume.volume(**(sizes | changes))


def on(name, **changes):
    return make(**({"dtype": "bfloat16", "topology": Topology.load(name)} | changes))


def choose(name=None, **changes):
    sizes = {
        "tokens_per_rank": 4096,
        "hidden": 4096,
        "num_experts": 64,
        "top_k": 2,
        "num_ranks": 4,
        "topology": Topology.load(name) if name else None,
    }
    return choose_schedule(**(sizes | changes))
