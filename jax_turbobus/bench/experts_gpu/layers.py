"""Dispatch, scaling and combine against everything that JAX users write today."""

import argparse
from collections.abc import Iterator

from jax_turbobus.bench import experts, peers
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._setup import Setup

__all__ = ["SIZES", "layers"]

# Tokens a rank, hidden, experts, top-k.
SIZES = (
    (4096, 4096, 64, 2),
    (16384, 2048, 128, 8),
    (128, 4096, 64, 2),
)


def _exact(setup: Setup) -> list[str]:
    """Returns the peers that ours must beat; XLA's ragged exchange is the slowest."""
    names = list(peers.EXACT)
    if not setup.has_peers:
        names.remove("ragged_all_to_all")
    return names


def layers(setup: Setup) -> Iterator[Row]:
    """Yields the comparison of `bench experts` at each of the table's sizes."""
    for tokens, hidden, num_experts, top_k in SIZES:
        args = argparse.Namespace(
            tokens=setup.small(tokens),
            per_rank=True,
            hidden=hidden // min(setup.shrink, 64),
            experts=num_experts,
            topk=top_k,
            dtype="bfloat16",
            route="uniform",
            slack="1.25,dropless" if (setup.has_peers and tokens < 16384) else "1.25",
            schedule="auto",
            only=",".join(_exact(setup)),
            forward_only=False,
            rounds=setup.rounds,
            in_a_row=8,
            seed=0,
            devices=setup.devices,
            prefix=f"{setup.access}: ",
        )
        yield from experts.compare(args)
