"""to_device and to_host in programs: sharded, transformed, exported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from moved_arrays import DEVICE, HOST, assert_same, kind, values

import jax_turbobus as tb
from jax_turbobus import offload

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def test_device_put_stands_in_for_jax():
    tree = {"device": values(), "host": tb.to_host(values()), "numpy": np.ones(3)}
    for space, expected in ((HOST, "pinned_host"), (DEVICE, "device")):
        moved = tb.device_put(tree, space)
        jax.tree.map(assert_same, moved, jax.device_put(tree, space))
        assert {kind(leaf) for leaf in jax.tree.leaves(moved)} == {expected}
    assert tb.device_put(tree, HOST)["host"] is tree["host"]
    inside = jax.jit(lambda x: tb.device_put(tb.device_put(x * 2, HOST), DEVICE) + 1)
    assert_same(inside(values()), values() * 2 + 1)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec", [P("x", "y"), P(None, "y"), P(("x", "y")), P("y"), P()], ids=str
)
def test_each_shard_moves_itself(axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    x = jax.device_put(values(), NamedSharding(mesh, spec))
    host = tb.to_host(x)
    assert host.sharding == x.sharding.with_memory_kind("pinned_host")
    assert_same(host, x)
    assert tb.to_device(host).sharding == x.sharding

    def step(x, host):
        return tb.to_host(3 * x, host), tb.to_device(host) + x, tb.to_host(x + 1)

    compiled = jax.jit(step, donate_argnums=1).lower(x, host).compile()
    hlo = compiled.as_text()
    assert not [name for name in COLLECTIVES if name in hlo]
    tripled, doubled, fresh = compiled(x, host)
    assert kind(tripled) == kind(fresh) == "pinned_host"
    assert kind(doubled) == "device"
    assert tripled.sharding.is_equivalent_to(host.sharding, 2)
    assert_same(tripled, 3 * x)
    assert_same(doubled, 2 * x)
    assert_same(fresh, x + 1)


def test_a_reversed_mesh_moves_each_shard_to_its_own_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices())[::-1], ("x",))
    x = jax.device_put(values(), NamedSharding(mesh, P("x")))
    back = jax.jit(lambda x: tb.to_device(tb.to_host(x)))(x)
    for mine, theirs in zip(back.addressable_shards, x.addressable_shards, strict=True):
        assert mine.device == theirs.device
        assert_same(mine.data, theirs.data)


@pytest.mark.parametrize("axis_names", [{"x", "y"}, {"x"}], ids=["manual", "partial"])
def test_inside_shard_map(axis_names):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(values(), NamedSharding(mesh, P("x", None)))
    host = tb.to_host(x)

    def step(x, host):
        moved = tb.to_device(host) + jax.lax.axis_index("x").astype(x.dtype)
        return tb.to_host(2 * x, host), moved, tb.to_device(tb.to_host(jnp.sin(x)))

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        axis_names=axis_names,
        check_vma=True,
    )
    doubled, moved, sine = jax.jit(mapped, donate_argnums=1)(x, host)
    assert kind(doubled) == "pinned_host"
    assert_same(doubled, 2 * x)
    assert_same(moved, x + jnp.repeat(jnp.arange(4.0), 16)[:, None])
    np.testing.assert_allclose(sine, jnp.sin(x), rtol=1e-6)


def test_an_out_that_is_the_same_on_all_shards_is_declared_to_differ():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    out = jax.device_put(
        jnp.zeros((8, 64)), NamedSharding(mesh, P(), memory_kind="pinned_host")
    )
    mapped = jax.shard_map(
        tb.to_host, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")
    )
    assert_same(jax.jit(mapped)(values(), out), values())


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_gradients_travel_the_other_way(transform):
    x, host = values() / 100, tb.to_host(values(seed=1) / 100)

    def ours(x, host):
        return (tb.to_device(tb.to_host(jnp.sin(x))) * tb.to_device(host)).sum()

    def theirs(x, host):
        return (jnp.sin(x) * host).sum()

    dx, dhost = jax.grad(transform(ours), argnums=(0, 1))(x, host)
    assert kind(dx) == "device"
    assert kind(dhost) == "pinned_host"
    expected = jax.grad(theirs, argnums=(0, 1))(x, tb.to_device(host))
    np.testing.assert_allclose(dx, expected[0], rtol=1e-6)
    np.testing.assert_allclose(dhost, expected[1], rtol=1e-6)


def test_an_out_has_no_gradient():
    x, out = values(), tb.to_host(values(seed=1))

    def loss(x, out):
        return (tb.to_device(tb.to_host(x, out)) ** 2).sum()

    dx, dout = jax.grad(loss, argnums=(0, 1))(x, out)
    assert_same(dx, 2 * x)
    assert_same(dout, jnp.zeros_like(x))


def test_forward_mode_moves_tangents():
    x = values()
    out, tangent = jax.jvp(lambda x: tb.to_device(tb.to_host(x)), (x,), (2 * x,))
    assert_same(out, x)
    assert_same(tangent, 2 * x)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap(axis):
    x = values((6, 7, 128))
    host, out = tb.to_host(x), tb.to_host(jnp.zeros_like(x))
    over = functools.partial(jax.vmap, in_axes=axis, out_axes=axis)
    assert_same(over(tb.to_device)(host), x)
    moved = jax.jit(over(tb.to_host))(x, out)
    assert kind(moved) == "pinned_host"
    assert_same(moved, x)
    # x mapped over another axis than out.
    transposed = jax.vmap(tb.to_host, in_axes=(2, 0))(jnp.moveaxis(x, 0, 2), out)
    assert_same(transposed, x)


def test_scan_carries_and_emits_host_arrays():
    x, host = values(), tb.to_host(values(seed=1))

    # The host array comes first: JAX gives the first donated argument to the first
    # result of its shape, whatever the memory (docs/offload.md, "Sharp bits").
    def body(carry, i):
        host, x = carry
        fetched = tb.to_device(host)
        host = tb.to_host(x + i, host)
        return (host, jnp.tanh(fetched) + x), fetched

    def reference(carry, i):
        stored, x = carry
        return (x + i, jnp.tanh(stored) + x), stored

    steps = jnp.arange(5.0)
    run = jax.jit(lambda h, x: jax.lax.scan(body, (h, x), steps), donate_argnums=0)
    (host_last, x_last), seen = run(host, x)
    expected = jax.lax.scan(reference, (values(seed=1), x), steps)
    assert kind(host_last) == "pinned_host"
    np.testing.assert_allclose(host_last, expected[0][0], rtol=1e-6)
    np.testing.assert_allclose(x_last, expected[0][1], rtol=1e-6)
    np.testing.assert_allclose(seen, expected[1], rtol=1e-6)


def test_a_host_stack_as_scan_xs_can_be_differentiated():
    stack = values((4, 32, 32)) / 100
    x = values((8, 32), seed=1) / 100

    def loss(move, stack, x):
        body = jax.checkpoint(lambda c, w: (jnp.tanh(c @ move(w)), None))
        return (jax.lax.scan(body, x, stack)[0] ** 2).sum()

    ours = jax.jit(jax.grad(functools.partial(loss, tb.to_device)))(
        tb.to_host(stack), x
    )
    theirs = jax.grad(functools.partial(loss, lambda w: w))(stack, x)
    assert kind(ours) == "pinned_host"
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_among_collectives_in_a_larger_program():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(values((64, 64)) / 100, NamedSharding(mesh, P("x")))

    def step(x, move):
        for k in range(6):
            moved = move(jnp.sin(x * (k + 1)))
            x = jnp.tanh(moved + jax.lax.psum(x, "x")) + jax.lax.ppermute(
                moved, "x", [(i, (i + 1) % 8) for i in range(8)]
            )
        return x

    def run(move):
        mapped = jax.shard_map(
            lambda x: step(x, move), mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )
        return jax.jit(mapped)(x)

    expected = run(lambda y: y)
    for _ in range(5):
        ours = run(lambda y: tb.to_device(tb.to_host(y)))
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_ahead_of_time():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    on_device = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    on_host = on_device.update(sharding=sharding.with_memory_kind("pinned_host"))
    compiled = jax.jit(
        lambda x, h: tb.to_host(x * tb.to_device(h), h), donate_argnums=1
    )
    compiled = compiled.lower(on_device, on_host).compile()
    x = jax.device_put(values(), sharding)
    result = compiled(x, tb.to_host(x))
    assert kind(result) == "pinned_host"
    assert_same(result, x * x)


@pytest.mark.parametrize("mesh_kind", ["none", "explicit", "shard_map"])
def test_export_round_trip(mesh_kind):
    def step(x, host):
        return tb.to_host(2 * x, host), tb.to_device(host) + x

    x, program = values(), step
    if mesh_kind != "none":
        explicit = mesh_kind == "explicit"
        axis_type = AxisType.Explicit if explicit else AxisType.Auto
        mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
        x = jax.device_put(x, NamedSharding(mesh, P("x")))
        if not explicit:
            program = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    exported = export.export(jax.jit(program), disabled_checks=offload.export_checks())(
        x, tb.to_host(x)
    )
    assert [a.memory_space for a in exported.out_avals] == [HOST, DEVICE]
    again = export.deserialize(exported.serialize())
    doubled, summed = jax.jit(again.call)(x, tb.to_host(x))
    assert kind(doubled) == "pinned_host"
    assert_same(doubled, 2 * x)
    assert_same(summed, 2 * x)


def test_under_disable_jit():
    with jax.disable_jit():
        assert_same(tb.to_device(tb.to_host(values())), values())
