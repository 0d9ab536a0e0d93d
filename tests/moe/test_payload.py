"""Several arrays of one token travel in one exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from moe_mesh import NUM_RANKS, integers, make_mesh, routing

from jax_turbobus import moe

R, T, K, E = NUM_RANKS, 50, 3, 8
CAPACITY = {"packed": {"recv_capacity": 300}, "padded": {"expert_capacity": 30}}


def inputs():
    ids = jnp.asarray(routing("masked", R, T, K, E).reshape(-1, K))
    values = integers((R * T, 160), seed=1, most=8).astype(jnp.float8_e4m3fn)
    scales = integers((R * T, 5), seed=2)
    other = {
        "flags": integers((R * T, 3), seed=3) > 0,
        "pairs": integers((R * T, 2), seed=4) + 1j * integers((R * T, 2), seed=5),
        "counts": integers((R * T, 7), np.int16, seed=6),
    }
    return ids, integers((R * T, K), seed=7), (values, scales, other)


def on_mesh(f):
    return jax.jit(
        jax.shard_map(f, mesh=make_mesh(), in_specs=P("x"), out_specs=P("x"))
    )


@pytest.mark.parametrize("options", CAPACITY.values(), ids=CAPACITY)
def test_a_tree_arrives_as_its_arrays_do(options):
    def together(ids, weights, tokens):
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x", **options
        )
        return rows, sizes, state.slots

    def one_by_one(ids, weights, tokens):
        parts = [
            moe.dispatch(x, ids, weights, num_experts=E, axis_name="x", **options)
            for x in jax.tree.leaves(tokens)
        ]
        rows = jax.tree.unflatten(jax.tree.structure(tokens), [p[0] for p in parts])
        return rows, parts[0][1], parts[0][2].slots

    got, want = on_mesh(together)(*inputs()), on_mesh(one_by_one)(*inputs())
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w)


def test_parts_may_have_no_columns_and_trees_no_tokens():
    ids, weights, (values, *_) = inputs()

    def run(ids, weights, values):
        results = []
        for n in (T, 0):
            # Empty ones are made here: JAX 0.11 compiles no shard_map of them.
            tokens = (values[:n], {"nothing": values[:n, :0]})
            rows, _, state = moe.dispatch(
                tokens,
                ids[:n],
                weights[:n],
                num_experts=E,
                axis_name="x",
                recv_capacity=300,
            )
            assert rows[1]["nothing"].shape == (300, 0)
            results.append((rows[0], state.slots))
        return results

    def plain(ids, weights, values):
        rows, _, state = moe.dispatch(
            values, ids, weights, num_experts=E, axis_name="x", recv_capacity=300
        )
        return rows, state.slots

    got, none = on_mesh(run)(ids, weights, values)
    for g, w in zip(got, on_mesh(plain)(ids, weights, values), strict=True):
        np.testing.assert_array_equal(g, w)
    assert not np.asarray(none[0]).any()


def test_gradients_reach_values_and_scales():
    """Rows dequantized at the experts are the dense tokens, and so are gradients."""
    ids, weights, (values, scales, _) = inputs()

    def wide(values, scales):
        return (
            values.astype(jnp.float32).reshape(-1, 5, 32) * scales[..., None]
        ).reshape(-1, 160)

    def quantized(ids, weights, values, scales):
        rows, _, state = moe.dispatch(
            (values, scales), ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine(wide(*rows), state)

    def plain(ids, weights, values, scales):
        rows, _, state = moe.dispatch(
            wide(values, scales), ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine(rows, state)

    def gradients(f):
        mapped = jax.shard_map(f, mesh=make_mesh(), in_specs=P("x"), out_specs=P("x"))
        return jax.jit(
            jax.value_and_grad(lambda w, v, s: mapped(ids, w, v, s).sum(), (0, 2))
        )(weights, values, scales)

    for g, w in zip(
        *map(jax.tree.leaves, map(gradients, (quantized, plain))), strict=True
    ):
        np.testing.assert_array_equal(g, w)


def test_what_is_no_tree_of_rows_is_refused():
    ids, weights, _ = inputs()

    def run(tokens):
        return lambda ids, weights: moe.dispatch(
            tokens(), ids, weights, num_experts=E, axis_name="x"
        )[1]

    for tokens, message in (
        (lambda: (), "tokens: expected at least one array"),
        (lambda: {"a": jnp.zeros(3)}, r"tokens\['a'\]: expected shape"),
        (lambda: (jnp.zeros((T, 2)), jnp.zeros((T + 1, 2))), "expert_ids: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            on_mesh(run(tokens))(ids, weights)
    with pytest.raises(TypeError, match=r"tokens\[1\]: expected an array, got str"):
        on_mesh(run(lambda: (jnp.zeros((T, 2)), "x")))(ids, weights)
