"""Exchanges under jit, grad, vmap, scan, remat, on meshes of several axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moe_mesh import integers, make_mesh, on_mesh, routing, scaling_layer
from moe_reference import dense

from jax_turbobus import _ffi, moe
from jax_turbobus.moe import _devices

T, K, E, H = 10, 2, 8, 160


def inputs(num_ranks, *, kind="masked", batch=(), seed=0):
    count = int(np.prod(batch, dtype=int))
    ids = [routing(kind, num_ranks, T, K, E, seed + i) for i in range(count)]
    n = num_ranks * T
    return (
        integers((*batch, n, H), seed=seed + 1),
        jnp.asarray(np.reshape(ids, (*batch, n, K))),
        integers((*batch, n, K), seed=seed + 2, most=2),
        integers((E, H), seed=seed + 3, most=2),
    )


def assert_same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(g, w)


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


def test_ahead_of_time_compilation_and_sharded_arguments():
    mesh = make_mesh()
    args = inputs(4)
    mapped = jax.jit(on_mesh(scaling_layer(E), mesh))
    sharded = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in args]
    compiled = mapped.lower(*sharded).compile()
    assert_same(compiled(*sharded), dense(*args))
    text = compiled.as_text()
    # What crosses by XLA's own collectives is keys: s32[4] of each rank.
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(gathers) == 2
    assert all("s32[" in line and "f32[" not in line for line in gathers)
    assert " all-to-all(" not in text


def test_nested_shard_maps_that_map_one_axis_each():
    """The inner one's mesh is abstract when it is lowered."""
    args = inputs(4)
    spec = P("y")

    def outer(*args):
        inner = jax.shard_map(
            scaling_layer(E, "y"),
            in_specs=(spec,) * 4,
            out_specs=spec,
            axis_names={"y"},
        )
        return inner(*args)

    mapped = jax.shard_map(
        outer,
        mesh=make_mesh((2, 2), ("x", "y")),
        in_specs=(P("x"), P("x"), P("x"), P()),
        out_specs=P("x"),
        axis_names={"x"},
    )
    # JAX cannot lower the gradient of such a nest, whatever is in it.
    assert_same(jax.jit(mapped)(*args), dense(*args))


def test_lowering_for_an_abstract_mesh():
    mesh = jax.sharding.AbstractMesh(
        (4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    traced = jax.jit(on_mesh(scaling_layer(E), mesh)).trace(*inputs(4))
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "turbobus_moe_dispatch" in text
    assert "turbobus_moe_combine" in text


@pytest.mark.parametrize("is_ragged", [False, True])
def test_an_exported_program_exchanges_after_a_round_trip(is_ragged):
    mesh = make_mesh()
    args = inputs(4)
    layer = scaling_layer(E)
    want = dense(*args)
    if is_ragged:
        args, want = args[:1], args[0]

        def layer(x):
            sizes = jnp.full(4, T // 4)
            plan = (jnp.arange(4) * (T // 4), sizes)
            back = (jnp.full(4, lax.axis_index("x") * (T // 4)), sizes)
            for _ in range(2):
                x = moe.ragged_all_to_all(x, x, *plan, *back, axis_name="x")
            return x

    sharded = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in args]
    mapped = jax.jit(on_mesh(layer, mesh))
    with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
        export.export(mapped)(*sharded)
    checks = moe.export_checks()
    exported = export.export(mapped, disabled_checks=checks)(*sharded)
    again = export.deserialize(exported.serialize())
    assert_same(jax.jit(again.call)(*sharded), want)


def test_programs_for_gpus_can_be_exported(monkeypatch):
    """They have calls that CPU devices have not."""
    # GPUs that do not reach each other have one more.
    monkeypatch.setattr(_devices, "why_through_host", lambda ctx: "a test says so")

    def layer(tokens, ids, weights):
        y = moe.expert_parallel(
            lambda rows, _: rows * 2,
            tokens,
            ids,
            weights,
            num_experts=E,
            axis_name="x",
            num_chunks=2,
        )
        sizes = jnp.zeros(4, jnp.int32)
        return moe.ragged_all_to_all(y, jnp.zeros_like(y), *[sizes] * 4, axis_name="x")

    mesh = make_mesh()
    args = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in inputs(4)[:3]]

    def loss(tokens, ids, weights):
        return (on_mesh(layer, mesh)(tokens, ids, weights) ** 2).sum()

    exported = export.export(
        jax.jit(jax.grad(loss)), platforms=["cuda"], disabled_checks=moe.export_checks()
    )(*args)
    called = exported.mlir_module()
    for name in _ffi.CUDA_ONLY:
        assert name in called


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
