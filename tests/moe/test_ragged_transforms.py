"""`ragged_all_to_all` under vmap, scan and remat, and called many times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ragged_mesh import RANKS, Mixture, call, mapped
from ragged_reference import plan, slow, slow_gradients, values


@pytest.mark.parametrize("batched", Mixture.MAPPED)
def test_vmap_takes_any_mixture(batched):
    # C05: shared offsets die in an assertion in jax.lax's own.
    operands, outputs = values(0, RANKS, 3, 96, 40), values(1, RANKS, 3, 160, 40)
    mixture = Mixture(batched, operands, outputs, [plan(seed) for seed in range(3)])
    result = mapped(jax.vmap(call, in_axes=mixture.in_axes))(*mixture.args)
    for i in range(3):
        np.testing.assert_array_equal(result[:, i], slow(*mixture.entry(i)))


def test_vmap_inside_vmap_and_its_gradient():
    operands, outputs = values(0, RANKS, 2, 3, 96, 16), values(1, RANKS, 3, 160, 16)
    fields = plan(12)
    inner = jax.vmap(call, in_axes=(0, 0, *[None] * 4))
    outer = jax.vmap(inner, in_axes=(0, None, *[None] * 4))

    def per_rank(operands, outputs, *fields):
        def loss(a, b):
            return (outer(a, b, *fields) ** 2).sum() / 2

        return outer(operands, outputs, *fields), *jax.grad(loss, (0, 1))(
            operands, outputs
        )

    result, operand_bar, output_bar = mapped(per_rank)(operands, outputs, *fields)
    total = np.zeros(outputs.shape)
    for i in range(2):
        for j in range(3):
            want = slow(operands[:, i, j], outputs[:, j], fields)
            np.testing.assert_array_equal(result[:, i, j], want)
            bars = slow_gradients(want, 96, fields)
            np.testing.assert_array_equal(operand_bar[:, i, j], bars[0])
            total[:, j] += bars[1]
    np.testing.assert_array_equal(output_bar, total)


def test_vmap_at_another_axis_equals_a_loop():
    operands, output = values(0, RANKS, 96, 3, 16), values(1, RANKS, 160, 16)
    fields = plan(13)
    f = jax.vmap(call, in_axes=(1, *[None] * 5), out_axes=1)
    result = mapped(f)(operands, output, *fields)
    for i in range(3):
        want = slow(operands[:, :, i], output, fields)
        np.testing.assert_array_equal(result[:, :, i], want)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_remat_mixed_with_collectives(remat):
    fields = plan(14, output_rows=96, operand_rows=96)
    fields[2] = np.minimum(fields[2], 72)
    x = values(0, RANKS, 96, 32)

    def per_rank(x, *fields):
        def step(x, _):
            y = jnp.sin(x) + lax.pmean(x, "x")
            y = call(jnp.cos(y), y, *fields)
            around = [(i, (i + 1) % RANKS) for i in range(RANKS)]
            return y * 0.5 + lax.ppermute(y, "x", around), None

        def scanned(x):
            body = jax.checkpoint(step) if remat else step
            return (lax.scan(body, x, None, length=3)[0] ** 2).sum()

        def unrolled(x):
            for _ in range(3):
                x, _ = step(x, None)
            return (x**2).sum()

        return jax.value_and_grad(scanned)(x), jax.value_and_grad(unrolled)(x)

    (a, da), (b, db) = mapped(per_rank)(x, *fields)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(da, db, rtol=1e-5, atol=1e-5)


def test_many_calls_of_one_jitted_helper_never_pair_wrongly():
    fields = plan(15)
    helper = jax.jit(call)

    def per_rank(operand, output, *fields):
        total = jnp.zeros(())
        out = []
        for i in range(8):
            got = helper(operand + i, output, *fields)
            out.append(got)
            total = total + lax.psum(got.sum(), "x")
        return jnp.stack(out), total

    operand, output = values(0, RANKS, 96, 64), values(1, RANKS, 160, 64)
    run = mapped(per_rank)
    expected = np.stack([slow(operand + i, output, fields) for i in range(8)], axis=1)
    for _ in range(20):
        got, total = run(operand, output, *fields)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)
