"""Derivatives of derivatives through control flow, and of complex rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from moe_mesh import make_mesh, routing

from jax_turbobus import moe

R, T, K, E, H = 2, 4, 2, 4, 160


def exchanged(tokens, ids, weights):
    return moe.expert_parallel(
        lambda rows, _: jnp.sin(rows),
        tokens,
        ids,
        weights,
        num_experts=E,
        axis_name="x",
    )


def dense(tokens, ids, weights):
    del ids
    return weights.sum(-1, keepdims=True) * jnp.sin(tokens)


def in_scan(layer):
    def run(tokens, ids, weights):
        def body(x, _):
            return layer(x, ids, weights), None

        return lax.scan(body, tokens, None, length=3)[0]

    return run


def in_fori_loop(layer):
    def run(tokens, ids, weights):
        return lax.fori_loop(0, 3, lambda _, x: layer(x, ids, weights), tokens)

    return run


def in_map(layer):
    def run(tokens, ids, weights):
        parts = jnp.stack([tokens, tokens * 2])
        return lax.map(lambda x: layer(x, ids, weights), parts).sum(0)

    return run


def in_scan_with_remat(layer):
    def run(tokens, ids, weights):
        @jax.checkpoint
        def body(x, _):
            return layer(layer(x, ids, weights), ids, weights), None

        return lax.scan(body, tokens, None, length=2)[0]

    return run


def with_ids_as_xs(layer):
    def run(tokens, ids, weights):
        def body(x, layer_ids):
            return layer(x, layer_ids, weights), None

        return lax.scan(body, tokens, jnp.stack([ids, ids[:, ::-1]]))[0]

    return run


def inputs():
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.normal(size=(R * T, H)), jnp.float32)
    weights = jnp.asarray(rng.uniform(0.5, 1, (R * T, K)), jnp.float32)
    ids = jnp.asarray(routing("distinct", R, T, K, E).reshape(-1, K))
    return tokens, ids, weights


def second(layer, ids):
    """Returns the gradient of a gradient's squared length, in tokens and weights."""

    def penalty(args):
        grads = jax.grad(lambda a: (layer(a[0], ids, a[1]) ** 2).sum())(args)
        return sum((g**2).sum() for g in grads)

    return jax.grad(penalty)


def assert_close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-4 * np.abs(w).max())


@pytest.mark.parametrize(
    ("wrap", "check_vma"),
    [
        (in_scan, True),
        (in_scan, False),
        (in_fori_loop, True),
        (in_map, True),
        (in_scan_with_remat, True),
        (with_ids_as_xs, False),
    ],
)
def test_second_derivatives_through_control_flow(wrap, check_vma):
    tokens, ids, weights = inputs()
    mapped = jax.shard_map(
        wrap(exchanged),
        mesh=make_mesh((R,)),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    got = jax.jit(second(mapped, ids))((tokens, weights))
    assert_close(got, second(wrap(dense), ids)((tokens, weights)))


def test_second_derivatives_inside_shard_map():
    tokens, ids, weights = inputs()
    mapped = jax.shard_map(
        lambda args, ids: second(in_scan(exchanged), ids)(args),
        mesh=make_mesh((R,)),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    got = jax.jit(mapped)((tokens, weights), ids)
    assert_close(got, second(in_scan(dense), ids)((tokens, weights)))


def test_complex_rows():
    """Both parts travel, are added up and have gradients, first and second ones."""
    tokens, ids, weights = inputs()
    tokens = tokens + 1j * tokens[::-1]

    def layer(rows_fn):
        def run(tokens, ids, weights):
            rows, _, state = moe.dispatch(
                tokens, ids, weights, num_experts=E, axis_name="x"
            )
            return moe.combine(rows_fn(rows), state)

        return run

    def turn(rows):
        return rows * rows * (2 - 3j)

    mapped = jax.shard_map(
        layer(turn), mesh=make_mesh((R,)), in_specs=P("x"), out_specs=P("x")
    )

    def plain(tokens, ids, weights):
        del ids
        return weights.sum(-1, keepdims=True) * turn(tokens)

    def first(layer):
        def loss(args):
            y = layer(args[0], ids, args[1])
            return (y.real * 3 + y.imag * y.real).sum()

        return jax.grad(loss)

    def twice(layer):
        def turned(args):
            along = jax.tree.map(jnp.cos, args)
            grads = first(layer)(args)
            return sum((g * v).sum().real for g, v in zip(grads, along, strict=True))

        return jax.grad(turned)

    args = (tokens, weights)
    got = jax.jit(mapped)(tokens, ids, weights)
    assert got.dtype == jnp.complex64
    assert_close([got], [plain(tokens, ids, weights)])
    for derivative in (first, twice):
        got = jax.jit(derivative(mapped))(args)
        assert_close(got, derivative(plain)(args))
