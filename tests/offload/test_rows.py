"""fetch and store: rows of a stack in host memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb

INDICES = (0, 2, 4, -1, -5, 7, -9)


def values(shape=(5, 16, 32), seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def row(stack, i):
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)


def replaced(stack, i, x):
    return jax.lax.dynamic_update_index_in_dim(stack, x, i, 0)


@pytest.mark.parametrize("i", INDICES)
def test_an_index_means_what_it_means_to_jax(i):
    stack, x = values(), values((16, 32), seed=1)
    host = tb.to_host(stack)
    for index in (i, jnp.int32(i), jnp.int8(i), jnp.int16(i)):
        fetched = tb.fetch(host, index)
        assert fetched.sharding.memory_kind == "device"
        assert_same(fetched, row(stack, i))
        assert_same(jax.jit(tb.fetch)(host, index), row(stack, i))
    stored = jax.jit(tb.store)(host, jnp.int32(i), x)
    assert stored.sharding.memory_kind == "pinned_host"
    assert_same(stored, replaced(stack, i, x))


@pytest.mark.parametrize(
    ("dtype", "i", "expected"),
    [
        (jnp.uint8, 200, 4),
        (jnp.uint32, 2**32 - 1, 4),
        (jnp.int64, 2**40, 4),
        (jnp.int64, -(2**40), 0),
        (jnp.int64, -2, 3),
        (jnp.uint64, 2**63, 4),
    ],
)
def test_an_index_that_no_int32_holds_gives_the_nearest_row(dtype, i, expected):
    stack = values()
    host = tb.to_host(stack)
    with jax.enable_x64(True):
        assert_same(jax.jit(tb.fetch)(host, jnp.asarray(i, dtype)), stack[expected])


def test_an_eager_store_is_in_place():
    stack, x = values((5, 64, 64)), values((64, 64), seed=1)
    host = tb.to_host(stack)
    address = host.unsafe_buffer_pointer()
    stored = tb.store(host, 3, x)
    assert host.is_deleted()
    assert stored.unsafe_buffer_pointer() == address
    assert_same(stored, stack.at[3].set(x))


def test_an_undonated_stack_stays_as_it_was():
    stack, x = values(), values((16, 32), seed=1)
    host = tb.to_host(stack)
    assert_same(jax.jit(tb.store)(host, 3, x), stack.at[3].set(x))
    assert_same(host, stack)


def test_trees_of_stacks():
    stack = {"w": values(), "b": values((5, 16), seed=1)}
    host = tb.to_host(stack)
    jax.tree.map(assert_same, tb.fetch(host, 2), jax.tree.map(lambda s: s[2], stack))
    rows = jax.tree.map(lambda s: -s[0], stack)
    stored = tb.store(host, 2, rows)
    expected = jax.tree.map(lambda s, x: s.at[2].set(x), stack, rows)
    jax.tree.map(assert_same, stored, expected)


def test_packed_rows():
    stack = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (5, 3, 34)), jnp.int4)
    host = tb.to_host(stack)
    assert_same(tb.fetch(host, 3), stack[3])
    stored = tb.store(host, 1, stack[4])
    assert_same(stored, stack.at[1].set(stack[4]))


def test_rows_of_keys():
    keys = jax.random.split(jax.random.key(0), 300)
    fetched = tb.fetch(tb.to_host(keys), 299)
    assert_same(jax.random.key_data(fetched), jax.random.key_data(keys[299]))


def test_scalar_rows():
    stack = values((300,))
    assert_same(tb.fetch(tb.to_host(stack), 299), stack[299])
    stored = tb.store(tb.to_host(stack), 7, jnp.float32(1.5))
    assert_same(stored, stack.at[7].set(1.5))


def test_a_loop_over_layers_reads_and_writes_rows():
    stack, x = values((5, 32, 32)) / 6, values((8, 32), seed=1)

    def body(carry, i):
        stack, x = carry
        layer = tb.fetch(stack, i)
        x = jnp.tanh(x @ layer)
        return (tb.store(stack, i, layer + 1), x), layer

    loop = jax.jit(
        lambda s, x: jax.lax.scan(body, (s, x), jnp.arange(5)), donate_argnums=0
    )
    (stored, last), layers = loop(tb.to_host(stack), x)
    assert stored.sharding.memory_kind == "pinned_host"
    assert_same(stored, stack + 1)
    assert_same(layers, stack)
    expected = x
    for layer in stack:
        expected = jnp.tanh(expected @ layer)
    np.testing.assert_allclose(last, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec", [P(None, "x", "y"), P(None, None, ("x", "y")), P()], ids=str
)
def test_each_shard_of_a_row_moves_itself(axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    stack = jax.device_put(values(), NamedSharding(mesh, spec))
    host = tb.to_host(stack)
    row_sharding = NamedSharding(mesh, P(*spec[1:]))
    x = jax.device_put(values((16, 32), seed=1), row_sharding)
    assert tb.fetch(host, 2).sharding.is_equivalent_to(row_sharding, 2)
    assert_same(tb.fetch(host, 2), stack[2])

    def step(stack, x, i):
        return tb.store(stack, i + 1, x), tb.fetch(stack, i)

    compiled = jax.jit(step).lower(host, x, jnp.int32(2)).compile()
    hlo = compiled.as_text()
    assert "all-gather" not in hlo
    assert "all-to-all" not in hlo
    stored, fetched = compiled(host, x, jnp.int32(2))
    assert stored.sharding.is_equivalent_to(host.sharding, 3)
    assert_same(stored, stack.at[3].set(x))
    assert_same(fetched, stack[2])


def test_a_row_split_otherwise_is_resharded_and_the_stack_is_not():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, None, "x"))
    host = tb.to_host(jax.device_put(values(), sharding))
    x = jax.device_put(values((16, 32), seed=1), NamedSharding(mesh, P("x", None)))
    step = jax.jit(tb.store, donate_argnums=0)
    hlo = step.lower(host, 3, x).compile().as_text()
    assert "f32[5,16,32]" not in hlo  # nowhere is there a whole stack
    stored = step(host, 3, x)
    assert stored.sharding.is_equivalent_to(host.sharding, 3)
    assert_same(stored, values().at[3].set(x))


def test_inside_shard_map_with_an_index_that_differs():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    stack = values((8, 16, 32))
    host = jax.device_put(stack, NamedSharding(mesh, P(), memory_kind="pinned_host"))

    def mine(stack):
        return tb.fetch(stack, jax.lax.axis_index("x"))[None]

    mapped = jax.shard_map(
        mine, mesh=mesh, in_specs=P(), out_specs=P("x"), check_vma=True
    )
    assert_same(jax.jit(mapped)(host), stack)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_over_stacks(dim):
    stacks = values((3, 5, 7, 64))
    moved = jnp.moveaxis(stacks, 0, dim)
    x = values((3, 7, 64), seed=1)
    host = tb.to_host(moved)
    fetch = jax.jit(jax.vmap(tb.fetch, in_axes=(dim, None)))
    assert_same(fetch(host, 3), stacks[:, 3])
    store = jax.jit(jax.vmap(tb.store, in_axes=(dim, None, 0), out_axes=dim))
    assert_same(store(host, 3, x), jnp.moveaxis(stacks.at[:, 3].set(x), 0, dim))
    one = jax.jit(jax.vmap(tb.store, in_axes=(dim, None, None), out_axes=dim))
    assert_same(one(host, 3, x[0]), jnp.moveaxis(stacks.at[:, 3].set(x[0]), 0, dim))


def test_vmap_over_indices():
    stack = values()
    indices = jnp.array([4, 0, -1, 9])
    rows = jax.jit(jax.vmap(tb.fetch, in_axes=(None, 0)))(tb.to_host(stack), indices)
    assert_same(rows, stack[jnp.array([4, 0, 4, 4])])


def test_vmap_over_stacks_and_indices():
    stacks, x = values((3, 5, 7, 64)), values((3, 7, 64), seed=1)
    host, indices = tb.to_host(stacks), jnp.array([4, 0, 2])
    at = (jnp.arange(3), indices)
    assert_same(jax.jit(jax.vmap(tb.fetch))(host, indices), stacks[at])
    assert_same(jax.jit(jax.vmap(tb.store))(host, indices, x), stacks.at[at].set(x))


def test_vmap_refuses_to_write_a_batch_into_one_stack():
    host, x = tb.to_host(values()), values((3, 16, 32))
    with pytest.raises(ValueError, match="argument stack must be mapped"):
        jax.vmap(tb.store, in_axes=(None, None, 0))(host, 2, x)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients(transform):
    stack, x = values(), values((16, 32), seed=1)
    host = tb.to_host(stack)

    def loss(fetch, store, stack, x):
        stored = store(stack, 3, jnp.sin(x))
        return (fetch(stored, 3) * fetch(stored, 1) * fetch(stack, 3)).sum()

    ours = jax.grad(functools.partial(loss, tb.fetch, tb.store), argnums=(0, 1))
    theirs = jax.grad(functools.partial(loss, row, replaced), argnums=(0, 1))
    dstack, dx = transform(ours)(host, x)
    assert dstack.sharding.memory_kind == "pinned_host"
    for mine, expected in zip((dstack, dx), theirs(stack, x), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_integer_stacks_have_no_gradient():
    stack, x = tb.to_host(jnp.arange(640).reshape(5, 128)), values((128,))
    grad = jax.grad(lambda x: (tb.fetch(stack, 2) * x).sum())(x)
    assert_same(grad, jnp.arange(256.0, 384.0))


def test_rematerialized():
    stack, x = values((5, 32, 32)) / 6, values((8, 32), seed=1)
    host = tb.to_host(stack)
    layer = jax.checkpoint(lambda x, i: jnp.tanh(x @ tb.fetch(host, i)))

    def loss(layer, x):
        return (
            jax.lax.scan(lambda x, i: (layer(x, i), None), x, jnp.arange(5))[0]
        ).sum()

    ours = jax.jit(jax.grad(functools.partial(loss, layer)))(x)
    plain = functools.partial(loss, lambda x, i: jnp.tanh(x @ stack[i]))
    np.testing.assert_allclose(ours, jax.grad(plain)(x), rtol=1e-5, atol=1e-6)


def test_gradients_of_gradients_and_batches_of_them():
    stack, v = values((3, 16, 32)), values((3, 16, 32), seed=1)
    host, indices = tb.to_host(stack), jnp.array([2, 0])

    def cubes(fetch, i, stack):
        return (fetch(stack, i) ** 3).sum()

    def twice(fetch, move, stack):
        first = jax.grad(functools.partial(cubes, fetch, 1))
        return jax.grad(lambda s: (move(first(s)) * v).sum())(stack)

    np.testing.assert_allclose(
        twice(tb.fetch, tb.to_device, host), twice(row, lambda x: x, stack), rtol=1e-5
    )

    def over_indices(fetch, stack):
        grad = jax.grad(functools.partial(cubes, fetch), argnums=1)
        return jax.vmap(grad, in_axes=(0, None))(indices, stack)

    np.testing.assert_allclose(
        over_indices(tb.fetch, host), over_indices(row, stack), rtol=1e-5
    )
    for dim in (0, 2):
        stacks = jnp.moveaxis(jnp.stack([stack, v]), 0, dim)
        over = functools.partial(jax.vmap, in_axes=dim, out_axes=dim)
        ours = over(jax.grad(functools.partial(cubes, tb.fetch, 1)))(tb.to_host(stacks))
        theirs = over(jax.grad(functools.partial(cubes, row, 1)))(stacks)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


ROWS_OF_A_BATCH = {
    "grad_vmap": lambda f: jax.grad(
        lambda s, i: (jax.vmap(f, (None, 0))(s, i) ** 3).sum()
    ),
    "grad_vmap_vmap": lambda f: jax.grad(
        lambda s, i: (
            jax.vmap(jax.vmap(f, (None, 0)), (None, 0))(s, i.reshape(2, 2)) ** 3
        ).sum()
    ),
    "vmap_grad": lambda f: jax.vmap(
        jax.grad(lambda s, i: (f(s, i) ** 3).sum()), (None, 0)
    ),
    "jacrev_vmap": lambda f: jax.jacrev(jax.vmap(f, (None, 0))),
    "grad_vmap_over_both": lambda f: jax.grad(
        lambda s, i: (
            jax.vmap(jax.vmap(f, (None, 0)))(in_halves(s), i.reshape(2, 2)) ** 3
        ).sum()
    ),
}


def in_halves(s):
    return s.reshape(2, s.shape[0] // 2, *s.shape[1:])


@pytest.mark.parametrize("order", ROWS_OF_A_BATCH)
def test_gradients_of_a_batch_of_rows(order):
    transform = ROWS_OF_A_BATCH[order]
    stack, i = values((4, 2, 3)), jnp.array([0, 2, 2, -1])
    ours = jax.jit(transform(tb.fetch))(tb.to_host(stack), i)
    assert ours.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(ours, transform(row)(stack, i), rtol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("order", ["grad_vmap", "vmap_grad"])
def test_gradients_of_a_batch_of_rows_of_each_shard(axis_type, order):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    transform = ROWS_OF_A_BATCH[order]
    stack, i = values((4, 2, 8)), jnp.array([0, 2, 2, -1])
    sharded = jax.device_put(stack, NamedSharding(mesh, P(None, None, "x")))
    with jax.set_mesh(mesh):
        ours = jax.jit(transform(tb.fetch))(tb.to_host(sharded), i)
    assert ours.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(ours, transform(row)(stack, i), rtol=1e-6)


def test_gradients_of_a_batch_of_rows_inside_shard_map():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    transform = ROWS_OF_A_BATCH["grad_vmap"]
    stack, i = values((4, 2, 8)), jnp.array([0, 2, 2, -1, 1, 1, 0, 3])
    sharded = jax.device_put(stack, NamedSharding(mesh, P(None, None, "x")))
    spec = P(None, None, "x")
    mapped = jax.shard_map(
        transform(tb.fetch),
        mesh=mesh,
        in_specs=(spec, P()),
        out_specs=spec,
    )
    ours = jax.jit(mapped)(tb.to_host(sharded), i)
    np.testing.assert_allclose(ours, transform(row)(stack, i), rtol=1e-6)
