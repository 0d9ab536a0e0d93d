"""What most tests of whole exchange layers give them."""

import jax
import jax.numpy as jnp
import numpy as np
from moe_mesh import integers, routing

T, K, E, H = 10, 2, 8, 160


def inputs(num_ranks, *, kind="masked", batch=(), seed=0):
    count = int(np.prod(batch, dtype=int))
    ids = [routing(kind, num_ranks, T, K, E, seed + i) for i in range(count)]
    n = num_ranks * T
    return (
        integers((*batch, n, H), seed=seed + 1),
        jnp.asarray(np.reshape(ids, (*batch, n, K))),
        integers((*batch, n, K), seed=seed + 2, most=2),
        integers((E, H), seed=seed + 3, most=2),
    )


def assert_same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(g, w)
