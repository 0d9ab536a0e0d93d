"""Exchanges under jit, grad, vmap, scan and remat."""

import jax
import jax.numpy as jnp
import pytest
from exchange_inputs import E, H, assert_same, inputs
from jax import lax
from jax.sharding import PartitionSpec as P
from moe_mesh import integers, make_mesh, on_mesh, scaling_layer
from moe_reference import dense

from jax_turbobus import moe


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, 0), (None, 0, None)])
def test_vmap_over_microbatches_meets_once(in_axes):
    tokens, ids, weights, scale = inputs(4, batch=(3,))
    args = [
        x if a == 0 else x[0]
        for x, a in zip((tokens, ids, weights), in_axes, strict=True)
    ]

    def layer(tokens, ids, weights, scale):
        return jax.vmap(lambda *a: scaling_layer(E)(*a, scale), in_axes)(
            tokens, ids, weights
        )

    specs = tuple(P(None, "x") if a == 0 else P("x") for a in in_axes)
    mapped = jax.shard_map(
        layer,
        mesh=make_mesh(),
        in_specs=(*specs, P("x")),
        out_specs=P(None, "x"),
    )

    def dense_batch(*a):
        return jax.vmap(lambda *b: dense(*b, scale), in_axes)(*a)

    moe.reset_exchange_stats()
    assert_same(jax.jit(mapped)(*args, scale), dense_batch(*args))
    calls = {s.op: s.num_calls for s in moe.exchange_stats()}
    assert calls == {"dispatch": 1, "combine": 1}
    got = jax.jit(jax.grad(lambda x, w: mapped(x, args[1], w, scale).sum(), (0, 1)))
    want = jax.grad(lambda x, w: dense_batch(x, args[1], w).sum(), (0, 1))
    assert_same(got(args[0], args[2]), want(args[0], args[2]))


def test_vmap_of_vmap():
    tokens, ids, weights, scale = inputs(2, batch=(2, 3))
    layer = jax.vmap(jax.vmap(scaling_layer(E), (0, 0, 0, None)), (0, 0, 0, None))
    mapped = jax.shard_map(
        layer,
        mesh=make_mesh((2,)),
        in_specs=(*(P(None, None, "x"),) * 3, P("x")),
        out_specs=P(None, None, "x"),
    )
    want = jax.vmap(jax.vmap(dense, (0, 0, 0, None)), (0, 0, 0, None))
    assert_same(
        jax.jit(mapped)(tokens, ids, weights, scale),
        want(tokens, ids, weights, scale),
    )


def layers(one_layer, *, remat=False, num_layers=4):
    """A scan over layers: the routing of each is its own data."""

    def run(tokens, ids, weights, scales):
        def body(x, layer):
            y = one_layer(x, *layer)
            return jnp.clip(jnp.round(y / 4), -3, 3) + x, y.sum(-1)

        body = jax.checkpoint(body) if remat else body
        return lax.scan(body, tokens, (ids, weights, scales))

    return run


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(remat):
    tokens, ids, weights, scale = inputs(4, batch=(4,))
    tokens = tokens[0]
    scales = jnp.stack([jnp.roll(scale, i, 0) for i in range(4)])
    mapped = jax.shard_map(
        layers(scaling_layer(E), remat=remat),
        mesh=make_mesh(),
        in_specs=(P("x"), P(None, "x"), P(None, "x"), P(None, "x")),
        out_specs=(P("x"), P(None, "x")),
    )
    assert_same(
        jax.jit(mapped)(tokens, ids, weights, scales),
        layers(dense)(tokens, ids, weights, scales),
    )

    def loss(f):
        def run(tokens, weights, scales):
            y, sums = f(tokens, ids, weights, scales)
            return y.sum() + sums.sum()

        return run

    got = jax.jit(jax.grad(loss(mapped), (0, 1, 2)))(tokens, weights, scales)
    want = jax.grad(loss(layers(dense)), (0, 1, 2))(tokens, weights, scales)
    assert_same(got, want)


def test_scan_with_the_same_routing_in_every_step():
    """What a loop does not change may be hoisted; the steps still do not mix."""
    tokens, ids, weights, scale = inputs(4, kind="distinct")

    def run(one_layer):
        def step(x, ids, weights, scale):
            def body(x, _):
                return jnp.clip(one_layer(x, ids, weights, scale), -2, 2), None

            return lax.scan(body, x, None, length=5, unroll=2)[0]

        return step

    mapped = on_mesh(run(scaling_layer(E)), make_mesh())
    args = (tokens, ids, weights, scale)
    assert_same(jax.jit(mapped)(*args), run(dense)(*args))
    got = jax.jit(jax.grad(lambda *a: mapped(*a).sum(), (0, 2, 3)))(*args)
    assert_same(got, jax.grad(lambda *a: run(dense)(*a).sum(), (0, 2, 3))(*args))


def test_a_batch_of_tokens_as_scan_xs_with_constant_routing():
    tokens, ids, weights, scale = inputs(4, batch=(6,))
    ids, weights = ids[0], weights[0]

    def run(one_layer):
        def step(tokens, ids, weights, scale):
            def body(total, x):
                return total + one_layer(x, ids, weights, scale), None

            return lax.scan(body, tokens[0] * 0, tokens, unroll=3)[0]

        return step

    mapped = jax.shard_map(
        run(scaling_layer(E)),
        mesh=make_mesh(),
        in_specs=(P(None, "x"), P("x"), P("x"), P("x")),
        out_specs=P("x"),
    )
    args = (tokens, ids, weights, scale)
    got = jax.jit(jax.value_and_grad(lambda *a: mapped(*a).sum(), (0, 2, 3)))(*args)
    want = jax.value_and_grad(lambda *a: run(dense)(*a).sum(), (0, 2, 3))(*args)
    assert_same(got, want)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_anything_except_these_names("nothing"),
    ],
)
def test_remat_under_any_policy(policy):
    args = inputs(4)
    layer = jax.checkpoint(scaling_layer(E), policy=policy)
    mapped = on_mesh(layer, make_mesh())
    got = jax.jit(jax.grad(lambda *a: (mapped(*a) ** 2).sum(), (0, 2, 3)))(*args)
    want = jax.grad(lambda *a: (dense(*a) ** 2).sum(), (0, 2, 3))(*args)
    assert_same(got, want)


def test_exchange_in_a_while_loop_and_in_a_branch():
    args = inputs(4, kind="distinct")

    def run(one_layer):
        def step(x, ids, weights, scale):
            def twice(x):
                return one_layer(x, ids, weights, scale) * 2

            def body(carry):
                i, x = carry
                x = lax.cond(i % 2 == 0, twice, lambda x: x + 1, x)
                return i + 1, jnp.clip(x, -2, 2)

            return lax.while_loop(lambda c: c[0] < 5, body, (0, x))[1]

        return step

    mapped = on_mesh(run(scaling_layer(E)), make_mesh())
    assert_same(jax.jit(mapped)(*args), run(dense)(*args))


def test_one_state_serves_two_combines():
    tokens, ids, weights, _ = inputs(4)

    def layer(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine(rows * 2, state) - moe.combine(rows, state)

    mapped = on_mesh(layer, make_mesh())
    want = dense(tokens, ids, weights, jnp.ones((E, H)))
    assert_same(jax.jit(mapped)(tokens, ids, weights), want)


def test_state_is_a_pytree_that_crosses_jit_and_custom_functions():
    tokens, ids, weights, _ = inputs(4)

    @jax.jit
    def first(tokens, ids, weights):
        return moe.dispatch(tokens, ids, weights, num_experts=E, axis_name="x")

    @jax.jit
    def second(rows, state):
        return moe.combine(rows, jax.tree.map(lambda x: x, state))

    def layer(tokens, ids, weights):
        rows, _, state = first(tokens, ids, weights)
        return second(rows, state)

    mapped = on_mesh(layer, make_mesh())
    want = dense(tokens, ids, weights, jnp.ones((E, H)))
    assert_same(jax.jit(mapped)(tokens, ids, weights), want)


def test_the_result_varies_over_the_axis_like_any_other():
    def step(tokens, ids, weights, scale):
        y = scaling_layer(E)(tokens, ids, weights, scale)
        return lax.psum(y.sum(), "x")

    mapped = jax.shard_map(
        step, mesh=make_mesh(), in_specs=(P("x"),) * 4, out_specs=P()
    )
    args = inputs(4)
    assert_same(jax.jit(mapped)(*args), dense(*args).sum())


@pytest.mark.parametrize("kind", ["masked", "duplicates", "one"])
@pytest.mark.parametrize(
    "options", [{}, {"recv_capacity": 40}, {"expert_capacity": 20}]
)
def test_derivatives_of_derivatives(kind, options):
    """Reverse over reverse, where experts and loss bend in everything."""
    if options and kind != "masked":
        pytest.skip("rows may be dropped; the reference drops none")
    tokens, ids, weights, scale = inputs(4, kind=kind)
    layer = on_mesh(scaling_layer(E, **options), make_mesh())

    def second(layer):
        def loss(args):
            tokens, weights, scale = args
            return (layer(tokens, ids, weights, scale * scale) ** 2).sum()

        def turned(args, along):
            grads = jax.grad(loss)(args)
            products = jax.tree.map(lambda g, v: (g * v).sum(), grads, along)
            return sum(jax.tree.leaves(products))

        args = (tokens, weights, scale)
        along = tuple(integers(x.shape, seed=7 + i) for i, x in enumerate(args))
        return jax.grad(turned)(args, along)

    got = jax.jit(second, static_argnums=0)(layer)
    assert all(g.any() for g in jax.tree.leaves(got))
    assert_same(got, second(dense))
