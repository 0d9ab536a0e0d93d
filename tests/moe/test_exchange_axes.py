"""Exchanges on meshes of several axes, of any sizes and orders."""

import jax
import pytest
from exchange_inputs import E, assert_same, inputs
from jax import lax
from jax.sharding import PartitionSpec as P
from moe_mesh import make_mesh, on_mesh, scaling_layer
from moe_reference import dense


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_any_number_of_ranks_gives_the_same(num_ranks):
    args = inputs(8)  # The same tokens, spread differently.
    layer = on_mesh(scaling_layer(E), make_mesh((num_ranks,)))
    assert_same(jax.jit(layer)(*args), dense(*args))
    got = jax.jit(jax.grad(lambda *a: layer(*a).sum(), (0, 2, 3)))(*args)
    assert_same(got, jax.grad(lambda *a: dense(*a).sum(), (0, 2, 3))(*args))


def test_a_rank_is_its_axis_index_not_its_device():
    args = inputs(4)
    layer = on_mesh(scaling_layer(E), make_mesh(is_reversed=True))
    assert_same(jax.jit(layer)(*args), dense(*args))


@pytest.mark.parametrize("check_vma", [True, False])
def test_several_mesh_axes(check_vma):
    """Groups along one axis exchange among themselves only."""
    mesh = make_mesh((2, 4), ("data", "expert"))
    tokens, ids, weights, scale = inputs(8)

    def layer(tokens, ids, weights, scale):
        return scaling_layer(E, "expert")(tokens, ids, weights, scale)

    spec = P(("data", "expert"))
    mapped = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(spec, spec, spec, P("expert")),
        out_specs=spec,
        check_vma=check_vma,
    )
    assert_same(jax.jit(mapped)(tokens, ids, weights, scale), dense(*inputs(8)))
    if check_vma:
        got = jax.jit(jax.grad(lambda *a: mapped(*a).sum(), (0, 2, 3)))(
            tokens, ids, weights, scale
        )
        want = jax.grad(lambda *a: dense(*a).sum(), (0, 2, 3))(*inputs(8))
        assert_same(got, want)


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_several_axes_taken_together(axes):
    mesh = make_mesh((2, 4), ("a", "b"))
    args = inputs(8)
    layer = on_mesh(scaling_layer(E, axes), mesh, axes)
    assert_same(jax.jit(layer)(*args), dense(*args))


def test_the_first_of_several_axes():
    mesh = make_mesh((2, 2, 2), ("a", "b", "c"))
    args = inputs(8)
    spec = P(("b", "a", "c"))
    mapped = jax.shard_map(
        scaling_layer(E, "a"),
        mesh=mesh,
        in_specs=(spec, spec, spec, P("a")),
        out_specs=spec,
    )
    assert_same(jax.jit(mapped)(*args), dense(*args))


def test_operands_that_do_not_vary_have_summed_gradients():
    """Replicated tokens and weights: each rank dispatches the same ones."""
    tokens, ids, weights, scale = inputs(1)
    mesh = make_mesh()
    mapped = jax.shard_map(
        lambda *a: lax.psum(scaling_layer(E)(*a), "x"),
        mesh=mesh,
        in_specs=(P(), P(), P(), P("x")),
        out_specs=P(),
    )
    got, grads = jax.jit(jax.value_and_grad(lambda *a: mapped(*a).sum(), (0, 2, 3)))(
        tokens, ids, weights, scale
    )
    want, grads_want = jax.value_and_grad(lambda *a: 4 * dense(*a).sum(), (0, 2, 3))(
        tokens, ids, weights, scale
    )
    assert_same(got, want)
    assert_same(grads, grads_want)
