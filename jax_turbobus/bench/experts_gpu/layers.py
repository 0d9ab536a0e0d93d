"""Dispatch, scaling and combine against everything that JAX users write today."""

import argparse
from collections.abc import Iterator

from jax_turbobus.bench import experts
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._setup import Setup

__all__ = ["SIZES", "layers"]

# Tokens a rank, hidden, experts, top-k.
SIZES = (
    (4096, 4096, 64, 2),
    (16384, 2048, 128, 8),
    (128, 4096, 64, 2),
)


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
            slack="1.25" if setup.has_peers is False else "1.25,dropless",
            schedule="auto",
            only="",
            forward_only=False,
            rounds=setup.rounds,
            seed=0,
            devices=setup.devices,
            prefix=f"{setup.access}: ",
        )
        yield from experts.compare(args)
