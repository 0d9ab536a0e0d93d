"""Dispatch and combine equal the dense single-device layer, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import moe_reference as ref
import numpy as np
import pytest
from moe_mesh import KINDS, integers, make_mesh, on_mesh, routing, scaling_layer

from jax_turbobus import moe

R, T, K, E, H = 4, 12, 3, 8, 160


def inputs(kind, dtype=np.float32, *, num_ranks=R, num_tokens=T, hidden=H):
    ids = routing(kind, num_ranks, num_tokens, K, E)
    return (
        integers((num_ranks * num_tokens, hidden), dtype, seed=1),
        jnp.asarray(ids.reshape(-1, K)),
        integers((num_ranks * num_tokens, K), seed=2),
        integers((E, hidden), seed=3),
    )


def dense(tokens, ids, weights, scale):
    def expert(e, x):
        return (x * scale[e].astype(x.dtype)).astype(jnp.float32)

    return ref.moe_layer(tokens, ids, weights, expert, E).astype(tokens.dtype)


@functools.cache
def sender(**options):
    """A jitted dispatch; one for all routings."""

    def run(tokens, ids, weights):
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x", **options
        )
        overflow = state.overflow[None]
        return rows[None], sizes[None], state.slots, state.wanted[None], overflow

    return jax.jit(on_mesh(run, make_mesh()))


def sent(tokens, ids, weights, **options):
    """Runs a dispatch; returns rows by rank, sizes by rank, and the state."""
    return [np.asarray(x) for x in sender(**options)(tokens, ids, weights)]


def dot_loss(f):
    """Returns a loss and its gradients in tokens, weights and scales."""

    def loss(tokens, weights, scale, ids, seed):
        return (f(tokens, ids, weights, scale) * seed).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


@functools.cache
def layer_and_gradients(**options):
    layer = on_mesh(scaling_layer(E, **options), make_mesh())
    return jax.jit(layer), dot_loss(layer)


dense_gradients = dot_loss(dense)


@pytest.mark.parametrize("layout", ["dropless", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_and_gradients_equal_the_dense_ones(kind, layout):
    options = {"expert_capacity": R * T} if layout == "padded" else {}
    tokens, ids, weights, scale = inputs(kind)
    layer, gradients = layer_and_gradients(**options)
    want = dense(tokens, ids, weights, scale)
    np.testing.assert_array_equal(layer(tokens, ids, weights, scale), want)
    args = (tokens, weights, scale, ids, integers(tokens.shape, seed=4))
    got = gradients(*args)
    want = dense_gradients(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("schedule", ["auto", "packed", "broadcast", "direct", "relay"])
def test_schedules_never_change_a_result(schedule):
    args = inputs("duplicates")
    layer = on_mesh(scaling_layer(E, schedule=schedule), make_mesh())
    np.testing.assert_array_equal(jax.jit(layer)(*args), dense(*args))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "dropless"),
        ({"recv_capacity": R * T * 2}, "roomy"),
        ({"recv_capacity": 17}, "half"),
        ({"recv_capacity": 1}, "one"),
        ({"recv_capacity": 0}, "zero"),
        ({"expert_capacity": 5}, "padded"),
        ({"expert_capacity": R * T}, "padded_roomy"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_sizes_and_drops_are_the_stated_ones(kind, options, name):
    tokens, ids, weights, _ = inputs(kind)
    by_rank = np.asarray(ids).reshape(R, T, K)
    rows, sizes, slots, wanted, overflow = sent(tokens, ids, weights, **options)
    kept = ref.rows_kept(by_rank, E, **options)
    num_rows = rows[0].reshape(-1, H).shape[0]
    want_rows, want_sizes = ref.dispatched_rows(
        np.asarray(tokens).reshape(R, T, H),
        kept,
        R,
        num_rows,
        options.get("expert_capacity"),
    )
    np.testing.assert_array_equal(rows.reshape(R, -1, H), want_rows)
    np.testing.assert_array_equal(sizes, want_sizes)
    all_rows = [len(pairs) for pairs in ref.rows_wanted(by_rank, E)]
    np.testing.assert_array_equal(wanted.reshape(-1), all_rows)
    lost = wanted.sum(-1) > sizes.sum(-1)
    np.testing.assert_array_equal(overflow, np.where(lost, wanted.sum(-1), 0))

    # Slots name the row that holds the token.
    slots = slots.reshape(R, T, K)
    flat = rows.reshape(R, -1, H)
    for r, t, j in np.ndindex(R, T, K):
        e = by_rank[r, t, j]
        is_kept = 0 <= e < E and (r, t) in kept[e]
        assert (slots[r, t, j] >= 0) == is_kept
        if is_kept:
            np.testing.assert_array_equal(
                flat[e // (E // R), slots[r, t, j]], np.asarray(tokens)[r * T + t]
            )


@pytest.mark.parametrize("options", [{"recv_capacity": 9}, {"expert_capacity": 4}])
@pytest.mark.parametrize("kind", ["distinct", "duplicates", "one"])
def test_dropped_rows_count_exactly_zero_forward_and_backward(kind, options):
    tokens, ids, weights, scale = inputs(kind)
    kept = ref.rows_kept(np.asarray(ids).reshape(R, T, K), E, **options)
    # The dense layer with every choice masked that has lost its row.
    masked = np.array(ids)
    for r, t, j in np.ndindex(R, T, K):
        e = masked[r * T + t, j]
        if e >= 0 and (r, t) not in kept[e]:
            masked[r * T + t, j] = -1
    assert (masked != np.asarray(ids)).any()
    seed = integers(tokens.shape, seed=4)
    got = layer_and_gradients(**options)[1](tokens, weights, scale, ids, seed)
    want = dense_gradients(tokens, weights, scale, jnp.asarray(masked), seed)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floating_dtypes_forward_and_backward(dtype):
    tokens, ids, weights, scale = inputs("distinct", jnp.dtype(dtype))
    layer = on_mesh(scaling_layer(E), make_mesh())
    got = jax.jit(layer)(tokens, ids, weights, scale)
    assert got.dtype == tokens.dtype
    np.testing.assert_array_equal(got, dense(tokens, ids, weights, scale))

    def loss(f):
        return lambda x, w: f(x, ids, w, scale).astype(jnp.float32).sum()

    got = jax.jit(jax.grad(loss(layer), (0, 1)))(tokens, weights)
    want = jax.grad(loss(dense), (0, 1))(tokens, weights)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w)


def test_float64_accumulates_in_float64():
    with jax.enable_x64(True):
        tokens = integers((R * T, H), jnp.float64, seed=1) * (1 + 2.0**-40)
        _, ids, weights, scale = inputs("distinct")
        weights, scale = weights.astype(jnp.float64), scale.astype(jnp.float64)
        layer = on_mesh(scaling_layer(E), make_mesh())

        def dense64(tokens, weights):
            def expert(e, x):
                return x * scale[e]

            return ref.moe_layer(tokens, ids, weights, expert, E)

        got = jax.jit(layer)(tokens, ids, weights, scale)
        assert got.dtype == jnp.float64
        np.testing.assert_array_equal(got, dense64(tokens, weights))
        grads = jax.jit(jax.grad(lambda x, w: layer(x, ids, w, scale).sum(), (0, 1)))(
            tokens, weights
        )
        want = jax.grad(lambda x, w: dense64(x, w).sum(), (0, 1))(tokens, weights)
        np.testing.assert_allclose(grads[0], want[0], rtol=1e-15)
        np.testing.assert_allclose(grads[1], want[1], rtol=1e-13)


@pytest.mark.parametrize(
    "dtype", ["int8", "int32", "uint16", "bool", "float8_e4m3fn", "float8_e5m2"]
)
def test_any_payload_of_whole_bytes_is_dispatched(dtype):
    tokens, ids, weights, _ = inputs("masked")
    tokens = tokens.astype(dtype)
    rows, *_ = sent(tokens, ids, weights)
    kept = ref.rows_kept(np.asarray(ids).reshape(R, T, K), E)
    want, _ = ref.dispatched_rows(
        np.asarray(tokens).reshape(R, T, H), kept, R, rows.shape[1]
    )
    assert rows.dtype == tokens.dtype
    np.testing.assert_array_equal(rows, want)


def test_integer_and_fp8_rows_are_combined_in_float32():
    tokens, ids, weights, scale = inputs("distinct")

    def layer(dtype):
        def run(tokens, ids, weights):
            rows, _, state = moe.dispatch(
                tokens, ids, weights, num_experts=E, axis_name="x"
            )
            return moe.combine(rows.astype(dtype), state)

        return jax.jit(on_mesh(run, make_mesh()))

    want = dense(tokens, ids, weights, jnp.ones_like(scale))
    got = layer(jnp.int8)(tokens, ids, weights)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
    got = layer(jnp.float8_e4m3fn)(tokens, ids, weights)
    assert got.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(
        got.astype(jnp.float32), want.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    )


def test_fp8_tokens_have_fp8_gradients():
    tokens, ids, weights, _ = inputs("distinct")

    def run(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine(rows.astype(jnp.float32), state)

    layer = on_mesh(run, make_mesh())
    grad = jax.jit(jax.grad(lambda x: layer(x, ids, weights).sum()))(
        tokens.astype(jnp.float8_e4m3fn)
    )
    assert grad.dtype == jnp.float8_e4m3fn
    want = np.broadcast_to(weights.sum(-1, keepdims=True), tokens.shape)
    np.testing.assert_array_equal(grad.astype(jnp.float32), want)


@pytest.mark.parametrize("hidden", [1, 7, 1025])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_odd_sizes(hidden, num_tokens):
    args = inputs("masked", num_tokens=num_tokens, hidden=hidden)
    layer = on_mesh(scaling_layer(E), make_mesh())
    np.testing.assert_array_equal(jax.jit(layer)(*args), dense(*args))


def test_valid_masks_all_choices_of_a_token():
    tokens, ids, weights, scale = inputs("distinct")
    valid = jnp.asarray(np.random.default_rng(5).random(R * T) < 0.5)

    def masked_layer(tokens, ids, weights, scale, valid):
        return scaling_layer(E, valid=valid)(tokens, ids, weights, scale)

    layer = on_mesh(masked_layer, make_mesh())
    args = (tokens, jnp.where(valid[:, None], ids, -1), weights, scale)
    got = jax.jit(layer)(tokens, ids, weights, scale, valid)
    np.testing.assert_array_equal(got, dense(*args))
    grad = jax.jit(jax.grad(lambda w: layer(tokens, ids, w, scale, valid).sum()))
    assert not np.asarray(grad(weights))[~np.asarray(valid)].any()


def test_infinite_weights_and_tokens_of_masked_choices_do_no_harm():
    tokens, ids, weights, scale = inputs("masked")
    bad = (ids < 0) | (ids >= E)
    weights = jnp.where(bad, jnp.nan, weights)
    tokens = jnp.where(bad.all(-1, keepdims=True), jnp.nan, tokens)
    layer = on_mesh(scaling_layer(E), make_mesh())
    value, grads = jax.jit(
        jax.value_and_grad(lambda x, w: layer(x, ids, w, scale).sum(), (0, 1))
    )(tokens, weights)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)


def test_eager_calls_work():
    args = inputs("distinct")
    layer = on_mesh(scaling_layer(E), make_mesh())
    np.testing.assert_array_equal(layer(*args), dense(*args))


def test_experts_may_change_hidden_size_and_dtype():
    tokens, ids, weights, _ = inputs("distinct")
    down = integers((H, 24), seed=6)

    def run(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine((rows @ down).astype(jnp.bfloat16), state)

    got = jax.jit(on_mesh(run, make_mesh()))(tokens, ids, weights)
    want = ref.moe_layer(
        tokens, ids, weights, lambda _, x: (x @ down).astype(jnp.bfloat16), E
    )
    assert got.shape == (R * T, 24)
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))
