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


# In one program: a single layer is less than its way from Python to the GPUs and back.
_NUM_LAYERS = (1, 8)
# Of one pair: some peers take seconds.
_PAIR_LIMIT_S = 2.0
_DROPLESS_TOKENS = 4096


def _exact(setup: Setup) -> list[str]:
    """Returns the peers that ours must beat.

    XLA's ragged exchange on GPUs writes into peers' memory whatever NCCL may do: it is
    none of the ways that are left without.
    """
    names = list(peers.EXACT)
    if not setup.has_peers:
        names.remove("ragged_all_to_all")
    return names


def layers(setup: Setup) -> Iterator[Row]:
    """Yields the comparison of `bench experts` at each of the table's sizes."""
    for tokens, hidden, num_experts, top_k in SIZES:
        for num_layers in _NUM_LAYERS:
            is_dropless = num_layers == 1 and tokens <= _DROPLESS_TOKENS
            args = argparse.Namespace(
                tokens=setup.small(tokens),
                per_rank=True,
                hidden=max(hidden // setup.shrink, 64),
                experts=num_experts,
                topk=top_k,
                dtype="bfloat16",
                route="uniform",
                slack="1.25,dropless" if is_dropless and setup.has_peers else "1.25",
                schedule="auto",
                only=",".join(_exact(setup)),
                forward_only=False,
                rounds=setup.rounds,
                in_a_row=1,
                layers=num_layers,
                seed=0,
                devices=setup.devices,
                prefix=f"{setup.access}: ",
                has_peers=setup.has_peers,
                pair_limit_s=_PAIR_LIMIT_S,
            )
            yield from experts.compare(args)
