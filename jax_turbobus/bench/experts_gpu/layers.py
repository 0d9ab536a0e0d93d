"""Dispatch, scaling and combine against everything that JAX users write today."""

from collections.abc import Iterator

from jax_turbobus.bench import peers
from jax_turbobus.bench._comparison import Comparison
from jax_turbobus.bench._experts_comparison import compare
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._setup import Setup

__all__ = ["SIZES", "comparisons", "layers"]

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
_SLACK = 1.25
# Without a capacity, reported beside it, of single layers: only those that were ever
# the best. The others take seconds to compile and to run.
_DROPLESS_PEERS = ("allgather_filter", "one_copy_padded")


def _exact(setup: Setup) -> list[str]:
    """Returns the peers that ours must beat.

    XLA's ragged exchange on GPUs writes into peers' memory whatever NCCL may do: it is
    none of the ways that are left without.
    """
    names = list(peers.EXACT)
    if not setup.has_peers:
        names.remove("ragged_all_to_all")
    return names


def comparisons(setup: Setup) -> Iterator[Comparison]:
    """Yields what is compared at each of the table's sizes."""
    for size in SIZES:
        for num_layers in _NUM_LAYERS:
            rooms: dict[float | None, list[str]] = {_SLACK: _exact(setup)}
            if num_layers == 1:
                rooms[None] = [
                    name for name in rooms[_SLACK] if name in _DROPLESS_PEERS
                ]
            yield Comparison(
                devices=setup.devices,
                shape=setup.shape(*size),
                peers=rooms,
                rounds=setup.rounds,
                num_layers=num_layers,
                prefix=f"{setup.access}: ",
                has_peers=setup.has_peers,
                pair_limit_s=_PAIR_LIMIT_S,
            )


def layers(setup: Setup) -> Iterator[Row]:
    """Yields the comparison of `bench experts` at each of the table's sizes."""
    for comparison in comparisons(setup):
        yield from compare(comparison)
        others = set(_exact(setup)) - set(comparison.peers.get(None, _exact(setup)))
        if others:
            yield Row.make(
                comparison.name(None),
                f"not measured: {', '.join(sorted(others))}",
                0.0,
                note="they were never the best, and take long to compile and run",
            )
