"""A layer whose choices are masked after dispatch, held against plain NumPy."""

import dataclasses

import gpu_exchanges as g
import jax
import jax.numpy as jnp
import numpy as np
from gpu_exchanges import FEW, E, H, K
from gpu_programs import gpus
from moe_mesh import integers, on_mesh, routing

from jax_turbobus import moe


def function(mesh, field):
    def layer(tokens, ids, weights, mask):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        changed = jnp.where(mask, getattr(state, field), -1)
        state = dataclasses.replace(state, **{field: changed})
        return moe.combine(rows * rows, state)

    mapped = on_mesh(layer, mesh)

    def both(tokens, ids, weights, mask):
        grad = jax.grad(lambda x, w: mapped(x, ids, w, mask).sum(), (0, 1))
        return mapped(tokens, ids, weights, mask), grad(tokens, weights)

    return jax.jit(both)


def check(field):
    """Rows whose choices were masked after dispatch have zero gradients."""
    mesh = g.mesh_of(gpus()[: 1 << (min(len(gpus()), 4).bit_length() - 1)])
    ids = routing("distinct", mesh.size, FEW, K, E).reshape(-1, K)
    rng = np.random.default_rng(5)
    args = (
        integers((len(ids), H), seed=1, most=1),
        jnp.asarray(ids),
        integers((len(ids), K), seed=2, most=2),
        jnp.asarray(rng.random(ids.shape) < 0.5),
    )
    args = [np.asarray(x) for x in args]
    # What is left in freed memory must not be taken for gradients.
    for _ in range(4):
        filled = [jnp.full((len(ids) * K, H), jnp.nan) for _ in range(8)]
        jax.block_until_ready(filled)
        del filled
    got = function(mesh, field)(*args)
    tokens, _, weights, mask = args
    kept = np.where(mask, weights, 0).sum(1, keepdims=True)
    squares = (tokens * tokens).sum(1, keepdims=True)
    want = kept * tokens**2, (2 * kept * tokens, np.where(mask, squares, 0))
    g.assert_same(got, want)
    assert np.asarray(got[1][0]).any()
