"""Derivatives of `ragged_all_to_all` against a slow NumPy reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ragged_mesh import RANKS, call, mapped
from ragged_reference import plan, slow, slow_gradients, values

from jax_turbobus.moe import ragged_all_to_all


def gradients(fields, cotangent, function=call):
    def per_rank(operand, output, cotangent, *fields):
        _, pullback = jax.vjp(lambda a, b: function(a, b, *fields), operand, output)
        return pullback(cotangent)

    operand = values(0, RANKS, 96, *cotangent.shape[2:], dtype=cotangent.dtype)
    output = np.zeros_like(cotangent)
    return mapped(per_rank)(operand, output, cotangent, *fields)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("each", [1, 2])
def test_gradients_equal_the_slow_reference(each, overlap):
    # A third of the slices are empty: there JAX's own transpose goes wrong.
    for seed in range(6):
        fields = plan(seed, each=each, overlap=overlap)
        assert (fields[1] == 0).any()
        cotangent = values(seed + 7, RANKS, 160, 24)
        got = gradients(fields, cotangent)
        for bar, expected in zip(
            got, slow_gradients(cotangent, 96, fields), strict=True
        ):
            np.testing.assert_array_equal(bar, expected)


def test_gradient_where_a_peer_sends_nothing():
    # Rank 1 sends no row to rank 0, whose slice begins where rank 2's does.
    fields = [np.zeros((RANKS, RANKS), np.int32) for _ in range(4)]
    fields[1][:, 0] = fields[3][0] = [2, 0, 3, 1]
    fields[2][:, 0] = [0, 2, 2, 5]
    cotangent = values(0, RANKS, 160, 24)
    operand_bar, output_bar = gradients(fields, cotangent)
    expected = slow_gradients(cotangent, 96, fields)
    np.testing.assert_array_equal(operand_bar, expected[0])
    np.testing.assert_array_equal(output_bar, expected[1])
    assert not np.any(output_bar[0, :6])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "float8_e5m2"])
def test_gradients_of_other_dtypes(dtype):
    fields = plan(8, overlap=True)
    cotangent = values(9, RANKS, 160, 24).astype(jnp.dtype(dtype))
    got = gradients(fields, cotangent)
    wide = np.complex128 if dtype == "complex64" else np.float64
    expected = slow_gradients(cotangent.astype(wide), 96, fields)
    for bar, want in zip(got, expected, strict=True):
        assert bar.dtype == cotangent.dtype
        np.testing.assert_array_equal(np.asarray(bar), want.astype(cotangent.dtype))


def test_c02_gradient_of_a_routed_layer_equals_dense():
    # https://github.com/jax-ml/jax/issues/26915: R=4, T=16, k=2, E=8, H=8.
    tokens, k, experts, hidden = 16, 2, 8, 8
    local = experts // RANKS
    rng = np.random.default_rng(0)
    x = rng.standard_normal((RANKS, tokens, hidden)).astype(np.float32)
    w = rng.random((RANKS, tokens, k)).astype(np.float32)
    params = rng.standard_normal((RANKS, local, hidden, hidden)).astype(np.float32)
    ids = rng.random((RANKS, tokens, experts)).argsort(-1)[..., :k].astype(np.int32)
    ids[1] = 0  # all of rank 1's tokens to one expert: other ranks get no row of it
    ids[1, :, 1] = 1
    capacity = RANKS * tokens * k

    def layer(x, w, params, ids):
        flat = ids.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=experts)
        every = lax.all_gather(counts, "x")
        me = lax.axis_index("x")
        # One slice an expert: what arrives is in the order of experts, then ranks.
        mine = lax.dynamic_slice_in_dim(every, me * local, local, 1)
        by_expert = (jnp.cumsum(every, 0) - every)[me]
        by_rank = every.sum(0).reshape(RANKS, local)
        base = (jnp.cumsum(by_rank, 1) - by_rank).reshape(-1)
        there = (jnp.cumsum(counts) - counts, counts, base + by_expert)
        sent = x[order // k]
        empty = jnp.zeros((capacity, hidden), x.dtype)
        rows = ragged_all_to_all(sent, empty, *there, mine.reshape(-1), axis_name="x")
        eid = jnp.repeat(jnp.arange(local), by_rank[me], total_repeat_length=capacity)
        y = jnp.tanh(jnp.einsum("rh,rhg->rg", rows, params[eid]))
        start = lax.all_to_all(there[2], "x", 0, 0, tiled=True)
        home = lax.all_to_all(there[0], "x", 0, 0, tiled=True)
        back = ragged_all_to_all(
            y,
            jnp.zeros((tokens * k, hidden)),
            start,
            mine.reshape(-1),
            home,
            counts,
            axis_name="x",
        )
        inverse = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * k))
        return jnp.einsum("tk,tkh->th", w, back[inverse].reshape(tokens, k, hidden))

    def ours(x, w, params, ids):
        def loss(*args):
            return (layer(*args, ids) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(x, w, params)

    def dense(x, w, params):
        y = jnp.tanh(
            jnp.einsum("rth,rtkhg->rtkg", x, params.reshape(-1, hidden, hidden)[ids])
        )
        return (jnp.einsum("rtk,rtkh->rth", w, y) ** 2).sum()

    got = mapped(ours)(x, w, params, ids)
    expected = jax.grad(dense, (0, 1, 2))(x, w, params)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_jvp_linearize_twice_and_second_order():
    fields = plan(11, overlap=True)
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)
    dots = values(2, RANKS, 96, 24), values(3, RANKS, 160, 24)

    def per_rank(operand, output, operand_dot, output_dot, *fields):
        def f(a, b):
            return call(a, b, *fields)

        def energy(a):
            return (jnp.sin(f(a, output)) ** 2).sum()

        _, one = jax.jvp(f, (operand, output), (operand_dot, output_dot))
        _, linear = jax.linearize(f, operand, output)
        # The same linear map twice in one program: two calls, not one.
        two = linear(operand_dot, output_dot) + linear(operand_dot + 1, output_dot)
        hessian = jax.jvp(jax.grad(energy), (operand,), (operand_dot,))[1]
        return one, two, hessian

    one, two, hessian = mapped(per_rank)(operand, output, *dots, *fields)
    expected = slow(*dots, fields)
    np.testing.assert_array_equal(one, expected)
    np.testing.assert_array_equal(two, expected + slow(dots[0] + 1, dots[1], fields))
    result = slow(operand, output, fields)
    moved = slow(dots[0], np.zeros_like(dots[1]), fields)
    curvature = 2 * np.cos(2 * result) * moved
    want, _ = slow_gradients(curvature, 96, fields)
    np.testing.assert_allclose(hessian, want, rtol=1e-4, atol=1e-4)
