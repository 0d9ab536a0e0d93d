"""Public bug reports: what programs around an exchange may rely on.

Names carry the ids under which the project keeps the reports; each test says where
its own is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
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


def test_c23_weights_are_applied_once():
    """https://github.com/deepseek-ai/DeepEP/issues/112."""
    ids = jnp.asarray(routing("distinct", R, 16, 2, 8).reshape(-1, 2))
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(R * 16, H)), jnp.float32)
    weights = jnp.tile(jnp.array([0.25, 0.75]), (R * 16, 1))
    mapped = on_mesh(scaling_layer(8), make_mesh())
    got = jax.jit(mapped)(tokens, ids, weights, jnp.ones((8, H)))
    np.testing.assert_array_equal(got, tokens)


def test_c24_one_rank_gives_what_any_number_gives():
    """https://github.com/deepspeedai/DeepSpeed/pull/8213."""
    ids = jnp.asarray(routing("distinct", 1, 24, 2, 4).reshape(-1, 2))
    tokens, weights = integers((24, H), seed=1), integers((24, 2), seed=2)
    scale = integers((4, H), seed=3)
    got = jax.jit(on_mesh(scaling_layer(4), make_mesh((1,))))(
        tokens, ids, weights, scale
    )
    assert got.shape == (24, H)
    np.testing.assert_array_equal(got, dense(tokens, ids, weights, scale))
    got = jax.jit(on_mesh(scaling_layer(4), make_mesh()))(tokens, ids, weights, scale)
    np.testing.assert_array_equal(got, dense(tokens, ids, weights, scale))


def test_c30_two_layers_of_one_function_share_no_routing():
    """https://github.com/NVIDIA/TransformerEngine/pull/3036."""
    scale = integers((8, H), seed=3, most=2)
    tokens = integers((R * 8, H), seed=1)
    weights = integers((R * 8, 2), seed=2, most=2)
    ids = [
        jnp.asarray(routing("distinct", R, 8, 2, 8, s).reshape(-1, 2)) for s in (1, 2)
    ]

    def two(layer):
        def run(tokens, ids_a, ids_b, weights, scale):
            # Both dispatched before either is combined.
            return layer(layer(tokens, ids_a, weights, scale), ids_b, weights, scale)

        return run

    mapped = on_mesh(two(scaling_layer(8)), make_mesh())
    args = (tokens, *ids, weights, scale)
    np.testing.assert_array_equal(jax.jit(mapped)(*args), two(dense)(*args))

    def interleaved(tokens, ids_a, ids_b, weights):
        options = {"num_experts": 8, "axis_name": "x"}
        rows_a, _, state_a = moe.dispatch(tokens, ids_a, weights, **options)
        rows_b, _, state_b = moe.dispatch(tokens * 2, ids_b, weights, **options)
        return moe.combine(rows_b, state_b), moe.combine(rows_a, state_a)

    b, a = jax.jit(on_mesh(interleaved, make_mesh()))(tokens, *ids, weights)
    ones = jnp.ones((8, H))
    np.testing.assert_array_equal(a, dense(tokens, ids[0], weights, ones))
    np.testing.assert_array_equal(b, dense(tokens * 2, ids[1], weights, ones))


def test_c32_outside_shard_map_is_an_error_not_a_hidden_all_gather():
    """https://github.com/jax-ml/jax/issues/32098."""
    args = (
        jnp.ones((R * 4, H)),
        jnp.zeros((R * 4, 2), jnp.int32),
        jnp.ones((R * 4, 2)),
    )
    with pytest.raises(ValueError, match=r"outside jax\.shard_map"):
        jax.jit(lambda *a: moe.dispatch(*a, num_experts=8, axis_name="x")[0])(*args)


def test_c33_results_are_typed_varying_for_scan_grad_and_remat():
    """https://github.com/NVIDIA/warp/issues/1851."""
    ids = jnp.asarray(routing("distinct", R, 6, 2, 8).reshape(-1, 2))
    tokens, weights = integers((R * 6, H), seed=1), jnp.ones((R * 6, 2))
    scale = integers((8, H), seed=3, most=1)

    @jax.checkpoint
    def body(x, scale):
        rows, sizes, state = moe.dispatch(
            x, ids_, weights_, num_experts=8, axis_name="x"
        )
        assert "x" in jax.typeof(rows).manual_axis_type.varying
        assert "x" in jax.typeof(sizes).manual_axis_type.varying
        out = rows * scale[expert_of_rows(sizes, rows.shape[0])]
        return moe.combine(out, state), None

    def step(tokens, ids, weights, scales):
        nonlocal ids_, weights_
        ids_, weights_ = ids, weights
        return lax.scan(body, tokens, scales)[0]

    ids_ = weights_ = None
    mapped = jax.shard_map(
        step,
        mesh=make_mesh(),
        in_specs=(P("x"), P("x"), P("x"), P(None, "x")),
        out_specs=P("x"),
        check_vma=True,
    )
    scales = jnp.stack([scale, scale])
    grad = jax.jit(jax.grad(lambda x: mapped(x, ids, weights, scales).sum()))(tokens)
    want = jax.grad(
        lambda x: dense(dense(x, ids, weights, scale), ids, weights, scale).sum()
    )(tokens)
    np.testing.assert_array_equal(grad, want)


def test_c41_gradient_of_weights_includes_remote_experts():
    """https://github.com/huggingface/transformers/issues/48687."""
    ids = jnp.asarray(routing("distinct", R, 16, 3, 12).reshape(-1, 3))
    rng = np.random.default_rng(0)
    tokens, weights, dy = (
        jnp.asarray(rng.normal(size=s), jnp.float32)
        for s in ((R * 16, H), (R * 16, 3), (R * 16, H))
    )
    scale = jnp.asarray(rng.normal(size=(12, H)), jnp.float32)
    mapped = on_mesh(scaling_layer(12), make_mesh())
    got = jax.jit(jax.grad(lambda w: (mapped(tokens, ids, w, scale) * dy).sum()))(
        weights
    )
    out = tokens[:, None] * scale[ids]  # [token, choice, hidden]
    np.testing.assert_allclose(got, (out * dy[:, None]).sum(-1), rtol=2e-4, atol=1e-4)
