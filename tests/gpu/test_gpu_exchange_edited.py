"""Choices that are masked after dispatch: their rows have zero gradients."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import gpus, run_python
from jax.sharding import AxisType, Mesh

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "moe"))

from moe_mesh import integers, on_mesh, routing

from jax_turbobus import moe

pytestmark = pytest.mark.gpu

T, K, E, H = 300, 3, 8, 520


def mesh_of(devices):
    return Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))


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
    mesh = mesh_of(gpus()[: 1 << (min(len(gpus()), 4).bit_length() - 1)])
    ids = routing("distinct", mesh.size, T, K, E).reshape(-1, K)
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
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))
    assert np.asarray(got[1][0]).any()


@pytest.mark.parametrize("field", ["expert_ids", "slots"])
def test_gradients_of_rows_that_no_choice_names_are_zero(field):
    check(field)


@pytest.mark.parametrize("field", ["expert_ids", "slots"])
def test_the_same_without_peer_access(field):
    code = f"import test_gpu_exchange_edited as t; t.check({field!r})"
    run_python(code, JAX_TURBOBUS_PEER_ACCESS="0")
