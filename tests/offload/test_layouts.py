"""Two operands of one call that are split over the devices in different ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb

TYPES = [AxisType.Auto, AxisType.Explicit]
# How a stack is split, and how a row that goes there is.
PAIRS = [
    (P(None, "a", "b"), P("b", "a")),
    (P(None, "a", "b"), P("a")),
    (P(None, "a"), P("b")),
    (P(None, "a"), P(None, "a")),
    (P(None, ("a", "b")), P(("b", "a"))),
    (P(), P("a", "b")),
]


def make_mesh(axis_type, names=("a", "b"), order=slice(None)):
    devices = np.array(jax.devices()[:4][order]).reshape(2, 2)
    return Mesh(devices, names, axis_types=(axis_type,) * 2)


def values(shape=(3, 16, 32), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def laid(x, mesh, spec, kind="device"):
    return jax.device_put(x, NamedSharding(mesh, spec, memory_kind=kind))


def assert_stored(stored, like, stack, x, i=1):
    expected = stack.copy()
    expected[i] = x
    assert stored.sharding.memory_kind == "pinned_host"
    assert stored.sharding.is_equivalent_to(like.sharding, 3)
    np.testing.assert_array_equal(stored, expected)


@pytest.mark.parametrize("axis_type", TYPES)
@pytest.mark.parametrize(("spec", "row_spec"), PAIRS)
def test_a_row_is_laid_out_as_the_stack_is(axis_type, spec, row_spec):
    mesh = make_mesh(axis_type)
    stack, x = values(), values((16, 32), seed=1)
    row = laid(x, mesh, row_spec)
    for store in (tb.store, jax.jit(tb.store, donate_argnums=0)):
        host = laid(stack, mesh, spec, "pinned_host")
        assert_stored(store(host, 1, row), host, stack, x)


@pytest.mark.parametrize("axis_type", TYPES)
def test_a_row_of_another_mesh_is_laid_out_as_the_stack_is(axis_type):
    stack, x = values(), values((16, 32), seed=1)
    for other in TYPES:
        mesh = make_mesh(axis_type)
        turned = make_mesh(other, ("p", "q"), slice(None, None, -1))
        host = laid(stack, mesh, P(None, "a", "b"), "pinned_host")
        row = laid(x, turned, P("p", "q"))
        assert_stored(tb.store(host, 1, row), host, stack, x)


@pytest.mark.parametrize("axis_type", TYPES)
def test_values_that_a_program_makes_itself_are_laid_out_too(axis_type):
    """Where no mesh is set they have none in their type."""
    mesh = make_mesh(axis_type)
    stack = values()

    @jax.jit
    def program(stack, out):
        x = jnp.arange(512.0).reshape(16, 32)
        y = tb.overlap(jnp.sin, x, offload=x + 1, out=out)[2]
        return tb.store(stack, 1, x), tb.to_host(x, out), y

    host = laid(stack, mesh, P(None, "a", "b"), "pinned_host")
    out = laid(stack[0], mesh, P("b"), "pinned_host")
    x = np.arange(512, dtype=np.float32).reshape(16, 32)
    stored, copied, beside = program(host, out)
    assert_stored(stored, host, stack, x)
    np.testing.assert_array_equal(copied, x)
    np.testing.assert_array_equal(beside, x + 1)


@pytest.mark.parametrize("axis_type", TYPES)
def test_out_of_an_equal_layout_in_other_words(axis_type):
    x = values((16, 32))
    for other in TYPES:
        turned = make_mesh(other, ("p", "q"))
        row = laid(x, make_mesh(axis_type), P("a", "b"))
        out = laid(x * 0, turned, P("p", "q"), "pinned_host")
        np.testing.assert_array_equal(tb.to_host(row, out), x)


@pytest.mark.parametrize("axis_type", TYPES)
@pytest.mark.parametrize("spec", [P(None, "a", "b"), P(None, "a"), P()], ids=str)
def test_gradients_are_split_like_the_stack(axis_type, spec):
    mesh = make_mesh(axis_type)
    stack, x = values(), values((16, 32), seed=1)
    host = laid(stack, mesh, spec, "pinned_host")
    row = laid(x, mesh, P(*spec[1:]))

    def loss(stack, x):
        stored = tb.store(stack, 1, jnp.sin(x))
        return (tb.fetch(stored, 1) * tb.fetch(stack, 2)).sum()

    with jax.set_mesh(mesh):
        results = [jax.grad(loss, argnums=(0, 1))(host, row)]
        results.append(jax.jit(jax.grad(loss, argnums=(0, 1)))(host, row))
    for dstack, dx in results:
        assert dstack.sharding.memory_kind == "pinned_host"
        assert dstack.sharding.is_equivalent_to(host.sharding, 3)
        expected = np.zeros_like(stack)
        expected[2] = np.sin(x)
        np.testing.assert_allclose(dstack, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dx, np.cos(x) * stack[2], rtol=1e-5, atol=1e-6)


def test_gradients_of_a_stack_that_is_not_on_the_default_device():
    stack, x = values(), values((16, 32), seed=1)
    there = jax.devices()[3]
    host = tb.to_host(jax.device_put(stack, there))
    row = jax.device_put(x, there)

    def loss(stack, x):
        return (tb.to_device(tb.store(stack, 1, x)) ** 2).sum()

    dstack, dx = jax.grad(loss, argnums=(0, 1))(host, row)
    expected = 2 * stack
    expected[1] = 0
    np.testing.assert_array_equal(dstack, expected)
    np.testing.assert_array_equal(dx, 2 * x)
    fetched = jax.grad(lambda s: (tb.fetch(s, -1) ** 2).sum())(host)
    expected = np.zeros_like(stack)
    expected[2] = 2 * stack[2]
    np.testing.assert_array_equal(fetched, expected)
    # Forwards, with a tangent of one operand alone.
    _, tangent = jax.jvp(lambda x: loss(host, x), (row,), (row,))
    np.testing.assert_allclose(tangent, 2 * (x**2).sum(), rtol=1e-5)
    _, tangent = jax.jvp(lambda s: loss(s, row), (host,), (host,))
    np.testing.assert_allclose(tangent, 2 * (stack[[0, 2]] ** 2).sum(), rtol=1e-5)


@pytest.mark.parametrize("axis_type", TYPES)
def test_a_batch_of_rows_is_laid_out_as_the_stacks_are(axis_type):
    mesh = make_mesh(axis_type)
    stacks, rows = values((2, 3, 16, 32)), values((2, 16, 32), seed=1)
    host = laid(stacks, mesh, P(None, None, "a", "b"), "pinned_host")
    index = jnp.array([2, 0])
    with jax.set_mesh(mesh):
        replicated = laid(rows, mesh, P())
        same = jax.jit(jax.vmap(tb.store, (0, None, 0)))(host, 1, replicated)
        each = jax.jit(jax.vmap(tb.store))(host, index, replicated)
        one = jax.jit(jax.vmap(tb.store, (0, None, None)))(host, 1, replicated[0])
    for stored, at, x in (
        (same, (slice(None), 1), rows),
        (each, ([0, 1], [2, 0]), rows),
        (one, (slice(None), 1), rows[0]),
    ):
        expected = stacks.copy()
        expected[at] = x
        np.testing.assert_array_equal(stored, expected)
        assert stored.sharding.is_equivalent_to(host.sharding, 4)


@pytest.mark.parametrize("axis_type", TYPES)
@pytest.mark.parametrize("spec", [P(None, "a"), P()], ids=str)
def test_keys_have_one_dimension_more_in_a_program(axis_type, spec):
    mesh = make_mesh(axis_type)
    sharding = NamedSharding(mesh, spec)
    first, second = (
        jax.device_put(jax.random.split(jax.random.key(seed), (4, 64)), sharding)
        for seed in range(2)
    )

    def assert_same(found, expected):
        data = jax.random.key_data
        np.testing.assert_array_equal(data(found), data(expected))

    host = tb.to_host(first)
    assert host.sharding.is_equivalent_to(sharding.with_memory_kind("pinned_host"), 2)
    assert_same(tb.to_device(host), first)
    assert_same(jax.jit(lambda x: tb.to_device(tb.to_host(x)))(first), first)
    _, fetched, offloaded = tb.overlap(jnp.sin, 1.0, fetch=host, offload=second)
    assert_same(fetched, first)
    assert_same(jax.device_put(offloaded, jax.memory.Space.Device), second)
    row = tb.fetch(host, 2)
    assert row.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec[1:])), 1)
    assert_same(row, first[2])
    stored = tb.store(host, 2, second[3])
    assert_same(tb.to_device(stored)[:3], jnp.stack([*first[:2], second[3]]))
    assert_same(tb.to_device(tb.to_host(second, stored)), second)


def test_arrays_of_two_meshes_are_refused_where_nothing_can_be_resharded():
    mesh, turned, other = (
        make_mesh(AxisType.Auto),
        make_mesh(AxisType.Auto, order=slice(None, None, -1)),
        make_mesh(AxisType.Auto, ("p", "q")),
    )
    host = laid(values(), mesh, P(None, "a"), "pinned_host")
    for there, reason in ((turned, "devices of stack"), (other, "mesh of stack")):
        index, x = laid(1, there, P()), laid(values((8, 16)), there, P())
        with pytest.raises(
            ValueError, match=f"argument i: expected it on the {reason}"
        ):
            tb.fetch(host, index)
        with pytest.raises(
            ValueError, match=f"argument x: expected it on the {reason}"
        ):
            tb.scan_layers(lambda w, x: x, host, x)
    # Where only the order of the devices differs, that is what the error tells.
    out = laid(values(), turned, P(None, "a"), "pinned_host")
    x = laid(values(), mesh, P(None, "a"))
    with pytest.raises(ValueError, match=r"argument out: .* over \[CpuDevice\(id=0\)"):
        tb.to_host(x, out)
