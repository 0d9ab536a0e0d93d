"""to_device, to_host and device_put: whole arrays, under every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def values(shape=(64, 64), dtype=jnp.float32, seed=0):
    bits = np.random.default_rng(seed).integers(-100, 100, shape)
    return jnp.asarray(bits).astype(dtype)


def assert_same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def kind(x):
    return x.sharding.memory_kind


def test_there_and_back_eagerly():
    x = values()
    host = tb.to_host(x)
    assert kind(host) == "pinned_host"
    assert_same(host, x)
    back = tb.to_device(host)
    assert kind(back) == "device"
    assert_same(back, x)


def test_an_eager_out_is_overwritten_and_donated():
    x = values()
    out = tb.to_host(values(seed=1))
    result = tb.to_host(x, out)
    assert out.is_deleted()
    assert kind(result) == "pinned_host"
    assert_same(result, x)


def test_there_and_back_inside_jit():
    x = values()
    assert_same(jax.jit(lambda x: tb.to_device(tb.to_host(jnp.sin(x))))(x), jnp.sin(x))


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
        return tb.to_host(3 * x, host), tb.to_device(host) + x

    compiled = jax.jit(step, donate_argnums=1).lower(x, host).compile()
    hlo = compiled.as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in hlo
    tripled, doubled = compiled(x, host)
    assert kind(tripled) == "pinned_host"
    assert_same(tripled, 3 * x)
    assert_same(doubled, 2 * x)
