"""What ours must be beside its peers, on the machines and at the sizes it was set for.

Bounds are on a ratio of times, ours to a peer's.
"""

import dataclasses

import jax
import numpy as np

from jax_turbobus.bench import peers
from jax_turbobus.bench._comparison import Comparison

__all__ = ["best_bound", "peer_bound"]

_SLACK = 1.25
# Bounds on ours / best exact peer, by capacity: forward, forward and backward.
_CPU_BOUNDS = {_SLACK: ("<= 0.3", "<= 0.55"), None: ("<= 0.45", "<= 0.65")}
# (tokens a rank, hidden, experts, top-k) -> bounds with peer access, without.
_GPU_BOUNDS = {
    (4096, 4096, 64, 2): (1 / 2.2, 1 / 2.3),
    (16384, 2048, 128, 8): (1 / 1.7, 1 / 1.8),
    (128, 4096, 64, 2): (1 / 1.5, 1 / 1.3),
}
_GPU_BACKWARD_BOUND = 1 / 1.8
# Against XLA's own ragged exchange, from so many tokens a rank on.
_RAGGED_TOKENS = 4096
_RAGGED_BOUNDS = {"forward": 40, "forward + backward": 30}


def best_bound(comparison: Comparison, slack: float | None, metric: str) -> str | None:
    """Returns what is required of the ratio to the best exact peer, if anything is.

    The bounds are those of the machines and sizes that they were set for.
    """
    # XLA's ragged exchange is not the best one: it may be left out.
    others = set(peers.EXACT) - {"ragged_all_to_all"}
    if comparison.route != "uniform" or not others <= set(comparison.peers[slack]):
        return None
    shape = comparison.shape
    is_backward = metric != "forward"
    if jax.default_backend() == "cpu":
        default = (1024, 1024, 32, 2, 4)
        sizes = dataclasses.astuple(shape)[:5]
        is_default = sizes == default and shape.dtype == np.float32
        bounds = _CPU_BOUNDS.get(slack) if is_default else None
        return bounds[is_backward] if bounds else None
    by_access = _GPU_BOUNDS.get(dataclasses.astuple(shape)[:4])
    if by_access is None or slack != _SLACK:
        return None
    if is_backward:
        return f"<= {_GPU_BACKWARD_BOUND:.4g}"
    return f"<= {by_access[not comparison.has_peers]:.4g}"


def peer_bound(
    comparison: Comparison, slack: float | None, metric: str, peer_name: str
) -> str | None:
    """Returns what is required of the ratio to this peer, if anything is."""
    is_cpu = jax.default_backend() == "cpu"
    if peer_name == "capacity_scatter" and slack is not None:
        return "< 1" if is_cpu and comparison.route == "uniform" else None
    # On GPUs only: XLA has no ragged exchange elsewhere.
    is_large = comparison.shape.tokens_per_rank >= _RAGGED_TOKENS
    if peer_name == "ragged_all_to_all" and slack == _SLACK and is_large:
        return f"<= {1 / _RAGGED_BOUNDS[metric]:.4g}"
    return None
