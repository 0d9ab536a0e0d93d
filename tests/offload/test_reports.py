"""Public bug reports about host memory, as far as CPU devices can show them.

The name of each test ends in the report that it is about.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb

HOST = jax.memory.Space.Host


def values(shape=(64, 64), seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_unpinned_numpy_is_refused_and_not_staged_in_silence_jax_20209():
    with pytest.raises(TypeError, match=r"expected a jax\.Array, got numpy\.ndarray"):
        tb.to_device(np.arange(1024, dtype=np.float32))


def test_a_host_array_reads_as_numpy_without_a_second_copy_xla_12452():
    host = tb.to_host(values((512, 512)))
    first, second = np.asarray(host), np.asarray(host)
    address = host.unsafe_buffer_pointer()
    assert first.__array_interface__["data"][0] == address
    assert second.__array_interface__["data"][0] == address


def test_a_result_outlives_its_deleted_source_jax_24521():
    x = values((8, 512))
    for _ in range(20):
        host = tb.to_host(x)
        moved = tb.to_device(host)
        host.delete()  # perhaps while it is being read
        jax.block_until_ready(moved)
        assert_same(moved, x)
        moved = tb.to_host(moved, tb.to_host(jnp.zeros_like(x)))
        assert_same(moved, x)


def test_rows_of_a_host_array_are_updated_by_a_traced_index_xla_34565():
    """There, x.at[i].set(y) on a host array aborts the process."""
    stack, rows = values((10, 256)), values((5, 256), seed=1)

    def update(stack, rows, indices):
        def body(stack, i):
            return tb.store(stack, indices[i], rows[i]), None

        return jax.lax.scan(body, stack, jnp.arange(5))[0]

    indices = jnp.array([7, 0, 3, 9, 4])
    stored = jax.jit(update, donate_argnums=0)(tb.to_host(stack), rows, indices)
    assert stored.sharding.memory_kind == "pinned_host"
    assert_same(stored, stack.at[indices].set(rows))


def test_a_requested_offload_happens_or_is_an_error_jax_23869():
    """There, an offload by name is dropped without a word."""
    x = values((4, 256, 64))
    step = jax.jit(lambda x: (tb.to_host(jnp.sin(x)), jnp.cos(x)))
    hlo = step.lower(x).compile().as_text()
    assert hlo.count('custom_call_target="turbobus_d2h_new"') == 1
    host, _ = step(x)
    assert host.sharding.memory_kind == "pinned_host"
    assert_same(host, jax.jit(jnp.sin)(x))


@pytest.mark.parametrize("in_shard_map", [False, True])
def test_a_host_operand_is_never_a_device_copy_xla_23152(in_shard_map):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    x = jax.device_put(values((1 << 10, 256)), sharding)
    f = tb.to_device
    if in_shard_map:
        f = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    host = tb.to_host(x)
    assert_same(jax.jit(f)(host), x)
    with pytest.raises(ValueError, match="expected memory kind 'pinned_host'"):
        jax.jit(f).lower(x)  # refused while tracing


def test_two_halves_that_xla_may_move_apart_xla_18139():
    """There, host copies are not overlapped until the scheduler knows them."""
    x, host = values(), tb.to_host(values(seed=1))
    program = jax.jit(lambda x, h: tb.overlap(lambda x: jnp.tanh(x @ x), x, fetch=h))
    hlo = program.lower(x, host).compile().as_text()
    for half in ("start", "done"):
        assert hlo.count(f'custom_call_target="turbobus_h2d_{half}"') == 1


def test_a_million_elements_a_thousand_times_warp_1446():
    """There, calls lowered for the CPU gave wrong results by luck of timing."""
    x = values((1 << 10, 1 << 10))
    expected = np.asarray(x)
    move = jax.jit(lambda x, out: tb.to_host(x, out), donate_argnums=1)
    out = tb.to_host(jnp.zeros_like(x))
    for k in range(1000):
        out = move(x, out)
        if k % 50 == 0:
            np.testing.assert_array_equal(np.asarray(out), expected)
    assert_same(out, x)


def test_a_source_may_be_donated_right_after_prime_rl_3109():
    """There, a source was reused before the bytes had left it."""
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with tb.configured(topology="2xh200", emulate=True, rate_scale=1e-3):
        for k in range(30):
            x = values((64, 256), seed=k)
            expected = np.array(x)
            host = tb.to_host(x)
            overwritten = overwrite(x)
            assert_same(host, expected)
            assert_same(overwritten, jnp.full_like(overwritten, -1))


def test_only_the_row_changes_and_its_neighbours_do_not_ucx_11724():
    """There, an offset inside an allocation was lost on the way."""
    for dtype, width in ((jnp.float32, 33), (jnp.int8, 129), (jnp.int4, 258)):
        stack = jnp.ones((9, 3, width), dtype) * 5
        store = jax.jit(tb.store, donate_argnums=0)
        for i in range(9):
            row = jnp.full((3, width), 2, dtype)
            stored = store(tb.to_host(stack), i, row)
            assert_same(stored, stack.at[i].set(row))


def test_restoring_state_makes_no_second_copy_of_it_marin_8480():
    """There, restoring pinned state took twice its size and was killed for it."""
    chunk = values((4, 1 << 14))
    host = tb.to_host(jnp.zeros((64, 4, 1 << 14), jnp.float32))
    address = host.unsafe_buffer_pointer()
    for i in range(64):
        host = tb.store(host, i, chunk + i)
        assert host.unsafe_buffer_pointer() == address
    expected = np.asarray(chunk) + np.arange(64, dtype=np.float32)[:, None, None]
    assert_same(host, expected)


def test_all_devices_at_once_stay_exact_megatron_6491():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(values((256, 64)), NamedSharding(mesh, P("x")))
    step = jax.jit(lambda x: tb.to_device(tb.to_host(x)))
    with tb.configured(topology="dgx-v100", emulate=True, rate_scale=1e-3):
        for result in [step(x) for _ in range(10)]:
            assert_same(result, x)


def test_a_device_that_the_topology_lacks_is_an_error_that_names_it():
    x = jax.device_put(values(), jax.devices()[7])
    refused = pytest.raises(jax.errors.JaxRuntimeError, match=r"jax_turbobus: .*gpu 7")
    with tb.configured(topology="2xh200", emulate=True), refused:
        jax.block_until_ready(tb.to_host(x))
    assert_same(tb.to_host(x), x)
