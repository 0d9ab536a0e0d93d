"""The chunked layer equals the dense one, whatever the number of chunks."""

import re

import jax
import jax.numpy as jnp
import moe_reference as ref
import numpy as np
import pytest
from moe_mesh import NUM_RANKS, expert_of_rows, integers, make_mesh, on_mesh, routing

from jax_turbobus import moe

R, T, K, E, H = NUM_RANKS, 10, 2, 8, 160


def inputs(kind="masked"):
    ids = routing(kind, R, T, K, E).reshape(-1, K)
    return (
        integers((R * T, H), seed=1),
        jnp.asarray(ids),
        integers((R * T, K), seed=2),
        integers((E, H), seed=3),
    )


def dense(tokens, ids, weights, scale):
    return ref.moe_layer(tokens, ids, weights, lambda e, x: x * scale[e], E)


def layer(**options):
    def run(tokens, ids, weights, scale):
        def experts(rows, sizes):
            flat = rows.reshape(-1, H)
            expert = expert_of_rows(
                sizes, flat.shape[0], options.get("expert_capacity")
            )
            out = jnp.where((expert >= 0)[:, None], flat * scale[expert], jnp.nan)
            return out.reshape(rows.shape)

        return moe.expert_parallel(
            experts, tokens, ids, weights, num_experts=E, axis_name="x", **options
        )

    return run


@pytest.mark.parametrize("options", [{}, {"expert_capacity": 40}])
@pytest.mark.parametrize("num_chunks", [1, 3, 16])
def test_any_number_of_chunks_gives_the_dense_layer(num_chunks, options):
    args = inputs()
    mapped = on_mesh(layer(num_chunks=num_chunks, **options), make_mesh())
    np.testing.assert_array_equal(jax.jit(mapped)(*args), dense(*args))
    if num_chunks == 3:
        got = jax.jit(jax.grad(lambda *a: (mapped(*a) ** 2).sum(), (0, 2, 3)))(*args)
        want = jax.grad(lambda *a: (dense(*a) ** 2).sum(), (0, 2, 3))(*args)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


def test_overflow_is_the_most_that_a_chunk_wanted_and_did_not_get():
    args = inputs("first_rank")  # 2 rows of each token, all on rank 0.
    mapped = jax.jit(
        on_mesh(
            lambda *a: tuple(
                x if i == 0 else x[None]
                for i, x in enumerate(
                    layer(num_chunks=4, recv_capacity=5 * R, with_overflow=True)(*a)
                )
            ),
            make_mesh(),
        )
    )
    _, overflow = mapped(*args)
    # Chunks of 3, 3, 3 and 1 tokens on each rank want 6, 6, 6 and 2 rows from each.
    np.testing.assert_array_equal(overflow, [6 * R, *(0,) * (R - 1)])


def test_a_chunk_waits_only_for_the_sums_of_the_one_three_before():
    """Its dispatch must not depend on the experts of the chunk before."""
    args = inputs()
    text = str(jax.make_jaxpr(on_mesh(layer(num_chunks=5), make_mesh()))(*args))
    assert text.count("turbobus_moe_dispatch[") == 1
    assert text.count("turbobus_moe_dispatch_start[") == 4
    assert len(re.findall(r"turbobus_moe_in_order\[on_gpus=False\]", text)) == 2
    compiled = jax.jit(on_mesh(layer(num_chunks=5), make_mesh())).lower(*args).compile()
    assert "turbobus_moe_finish" not in compiled.as_text()


def test_experts_are_traced_once():
    calls = []

    def experts(rows, _):
        calls.append(rows.shape)
        return rows * 2

    def run(tokens, ids, weights, _):
        return moe.expert_parallel(
            experts, tokens, ids, weights, num_experts=E, axis_name="x", num_chunks=3
        )

    jax.make_jaxpr(on_mesh(run, make_mesh()))(*inputs())
    assert len(calls) == 1


def test_chunks_have_second_derivatives_and_batches():
    """Those of halves of exchanges are whole exchanges."""
    tokens, ids, weights, scale = inputs()

    def hessians(num_chunks):
        mapped = on_mesh(layer(num_chunks=num_chunks), make_mesh())

        def loss(tokens, weights, scale):
            return (mapped(tokens, ids, weights, scale) ** 2).sum()

        def slope(*args):
            return sum((g**2).sum() for g in jax.grad(loss, (0, 1, 2))(*args))

        def batched(tokens, weights, scale):
            one = jax.grad(loss, (0, 1, 2))
            stack = jnp.stack([tokens, 2 * tokens])
            return jax.vmap(one, (0, None, None))(stack, weights, scale)

        both = jax.jit(lambda *a: (jax.grad(slope, (0, 1, 2))(*a), batched(*a)))
        return both(tokens, weights, scale)

    for got, want in zip(*map(jax.tree.leaves, map(hessians, (3, 1))), strict=True):
        np.testing.assert_array_equal(got, want)


def test_gradients_of_a_loop_over_chunks():
    """JAX leaves out of loops what nobody uses, by a rule for each primitive."""

    def gradients(num_chunks):
        one = layer(num_chunks=num_chunks)

        def loop(tokens, *others):
            def body(x, _):
                return x + one(tokens, *others), one(x, *others)[:2]

            return jax.lax.scan(body, tokens, length=2)[0]

        mapped = on_mesh(loop, make_mesh())
        tokens, ids, weights, scale = inputs()

        def loss(tokens, weights, scale):
            return (mapped(tokens, ids, weights, scale) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(tokens, weights, scale)

    for got, want in zip(gradients(3), gradients(1), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_where_there_is_no_room_all_is_zero(num_chunks):
    """JAX 0.11 ended the process when it compiled the gradients."""
    tokens, ids, weights, scale = inputs("distinct")
    options = {"num_chunks": num_chunks, "recv_capacity": 0, "with_overflow": True}

    def run(tokens, weights):
        y, overflow = layer(**options)(tokens, ids[:T], weights, scale)
        return y, overflow[None]

    mapped = on_mesh(run, make_mesh())

    def loss(tokens, weights):
        y, overflow = mapped(tokens, weights)
        return (y**2).sum(), overflow

    got, overflow = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(tokens, weights)
    assert not any(np.asarray(g).any() for g in got)
    assert overflow.sum() > 0


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_rows_of_nothing(num_chunks):
    """JAX 0.11 ended the process when it compiled these."""
    tokens, ids, weights, _ = inputs()

    def run(tokens, ids, weights):
        return moe.expert_parallel(
            lambda rows, _: rows[:, :0],
            tokens,
            ids,
            weights,
            num_experts=E,
            axis_name="x",
            num_chunks=num_chunks,
        )

    mapped = on_mesh(run, make_mesh())
    both = jax.value_and_grad(lambda x, w: mapped(x, ids, w).sum(), (0, 1))
    value, grads = jax.jit(both)(tokens, weights)
    assert value == 0
    assert not any(np.asarray(g).any() for g in grads)


def test_masked_choices_are_no_nan_to_jax_debug_nans():
    """Gradients carry slots as the bits of floats."""
    ids = jnp.full((R * 2, 1), -1)
    args = (jnp.ones((R * 2, 4)), ids, jnp.ones((R * 2, 1)))

    def run(tokens, ids, weights):
        return moe.expert_parallel(
            lambda rows, _: rows * 2,
            tokens,
            ids,
            weights,
            num_experts=R,
            axis_name="x",
            num_chunks=2,
        )

    mapped = on_mesh(run, make_mesh())
    with jax.debug_nans(True):
        grads = jax.grad(lambda x: mapped(x, *args[1:]).sum())(args[0])
    assert not np.asarray(grads).any()


def test_ragged_dot_and_batched_matmul_agree_with_the_dense_layer():
    tokens, ids, weights, _ = inputs("distinct")
    params = integers((E, H, 24), seed=6, most=2)

    def ragged(tokens, ids, weights, params):
        return moe.expert_parallel(
            lambda rows, sizes: jax.lax.ragged_dot(rows, params, sizes),
            tokens,
            ids,
            weights,
            num_experts=E,
            axis_name="x",
        )

    def batched(tokens, ids, weights, params):
        return moe.expert_parallel(
            lambda rows, _: jnp.einsum("ech,eho->eco", rows, params),
            tokens,
            ids,
            weights,
            num_experts=E,
            axis_name="x",
            expert_capacity=R * T,
        )

    def reference(tokens, ids, weights, params):
        return ref.moe_layer(tokens, ids, weights, lambda e, x: x @ params[e], E)

    args = (tokens, ids, weights, params)
    want = jax.value_and_grad(lambda *a: reference(*a).sum(), (0, 2, 3))(*args)
    for one in (ragged, batched):
        mapped = on_mesh(one, make_mesh())
        got = jax.jit(jax.value_and_grad(lambda *a: mapped(*a).sum(), (0, 2, 3)))(*args)  # noqa: B023
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(g, w)
