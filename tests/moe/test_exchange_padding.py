"""Public bug reports: what stands in padding, and that it never gets out.

Names carry the ids under which the project keeps the reports; each test says where
its own is.
"""

import jax
import jax.numpy as jnp
import moe_reference as ref
import numpy as np
import pytest
from moe_mesh import (
    NUM_RANKS,
    expert_of_rows,
    integers,
    make_mesh,
    on_mesh,
    routing,
    scaling_layer,
)
from moe_reference import dense

from jax_turbobus import moe

R, H = NUM_RANKS, 160


@pytest.mark.parametrize("options", [{}, {"expert_capacity": 40}])
def test_c45_nan_in_padding_never_gets_out(options):
    """A comment in https://github.com/NVIDIA/TransformerEngine (jax/moe.py)."""
    ids = jnp.asarray(routing("last_expert_or_none", R, 8, 2, 8).reshape(-1, 2))
    tokens, weights = integers((R * 8, H), seed=1), integers((R * 8, 2), seed=2)
    scale = integers((8, H), seed=3)
    # `scaling_layer` writes NaN into every padding row.
    mapped = on_mesh(scaling_layer(8, **options), make_mesh())
    value, grads = jax.jit(
        jax.value_and_grad(lambda x, w, s: (mapped(x, ids, w, s) ** 2).sum(), (0, 1, 2))
    )(tokens, weights, scale)
    want, grads_want = jax.value_and_grad(
        lambda x, w, s: (dense(x, ids, w, s) ** 2).sum(), (0, 1, 2)
    )(tokens, weights, scale)
    assert value == want
    for g, w in zip(grads, grads_want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("options", [{}, {"expert_capacity": 40}])
def test_c45_an_expert_that_is_not_finite_on_padding(options):
    """No mask in the expert: NaN on padding in its results and in its cotangents."""
    ids = jnp.asarray(routing("last_expert_or_none", R, 8, 2, 8).reshape(-1, 2))
    tokens, weights = integers((R * 8, H), seed=1) + 0.5, integers((R * 8, 2), seed=2)

    def normed(x):
        return x / jnp.abs(x).sum(-1, keepdims=True)  # 0 / 0 on padding

    def layer(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=8, axis_name="x", **options
        )
        rows = normed(rows)
        return moe.combine(rows, state), jnp.isnan(rows).any()[None]

    mapped = on_mesh(layer, make_mesh())

    def loss(x, w):
        y, has_nan = mapped(x, ids, w)
        return (y**2).sum(), has_nan

    def want(x, w):
        y = ref.moe_layer(x, ids, w, lambda _, x: normed(x), 8)
        return (y**2).sum()

    got = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(tokens, weights)
    (value, has_nan), grads = got
    assert has_nan.all()
    value_want, grads_want = jax.value_and_grad(want, (0, 1))(tokens, weights)
    np.testing.assert_allclose(value, value_want, rtol=1e-5)
    for g, w in zip(grads, grads_want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"expert_capacity": 40}, {"recv_capacity": 30}]
)
def test_c45_padding_is_zero_in_memory_that_held_something_else(options):
    """Out of dispatch, and out of combine's gradient; docs/moe.md, "Padding"."""
    ids = jnp.asarray(routing("last_expert_or_none", R, 8, 2, 8).reshape(-1, 2))

    def step(tokens, ids, weights, junk):
        # Freed before the exchange: its memory is what the rows may get.
        spent = jnp.sin(junk * jnp.nan).sum() * 0
        tokens = jnp.where(jnp.isnan(spent), tokens, tokens + 1)
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=8, axis_name="x", **options
        )
        _, pull = jax.vjp(lambda rows: moe.combine(rows, state), rows * jnp.nan)
        grads = pull(tokens * 3)[0].reshape(-1, H)
        rows = rows.reshape(-1, H)
        expert = expert_of_rows(sizes, rows.shape[0], options.get("expert_capacity"))
        padding = (expert < 0)[:, None]

        def num_dirty(x):
            return (jnp.where(padding, x, 0) != 0).sum()[None]

        return (
            padding.sum()[None],
            num_dirty(rows) + num_dirty(grads),
            (grads[:, 0] > 0).sum()[None],
            sizes.sum()[None],
        )

    run = jax.jit(on_mesh(step, make_mesh()))
    args = (jnp.ones((R * 8, H)), ids, jnp.ones((R * 8, 2)))
    for _ in range(20):
        junk = jnp.full((R * 64, H), jnp.nan)
        padding, dirty, has_grad, sizes = map(np.asarray, run(*args, junk))
        assert padding.sum() > 0
        assert not dirty.any()
        np.testing.assert_array_equal(has_grad, sizes)
