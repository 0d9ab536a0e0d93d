"""overlap: transfers beside a computation, in one body under every transform."""

import gc
import itertools
import re
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb
from jax_turbobus import _ffi
from jax_turbobus.offload import _primitives as p

SLEEP_S = 0.4


def values(shape=(64, 64), seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def compute(x):
    for _ in range(3):
        x = jnp.tanh(x @ x / 8)
    return x


@pytest.fixture
def slow_links():
    """4 MiB a transfer take about SLEEP_S on every link of this machine."""
    topology = {"topology": "2xh200", "pooled": False, "emulate": True}
    scale = (4 << 20) / SLEEP_S / 55e9
    with tb.configured(**topology, rate_scale=scale):
        yield


def seconds(f, *args):
    jax.block_until_ready(f(*args))  # compiles
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    return time.perf_counter() - start


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_returns_the_result_and_both_trees(transform):
    x, w = values(), values(seed=1)
    host = {"a": tb.to_host(w), "b": [tb.to_host(values((3,)))]}

    def run(x, host):
        return tb.overlap(compute, x, fetch=host, offload=(x, {"s": w}))

    result, fetched, offloaded = transform(run)(x, host)
    np.testing.assert_allclose(result, compute(x), rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(fetched) == jax.tree.structure(host)
    jax.tree.map(assert_same, fetched, host)
    jax.tree.map(assert_same, offloaded, (x, {"s": w}))
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(fetched)]
    assert kinds == ["device", "device"]
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(offloaded)]
    assert kinds == ["pinned_host", "pinned_host"]


def test_out_is_written_in_place():
    x = values((256, 256))
    out = tb.to_host(values((256, 256), seed=1))
    address = out.unsafe_buffer_pointer()

    def run(x, out):
        # The host array first: see docs/offload.md, "Sharp bits".
        result, _, offloaded = tb.overlap(compute, x, offload=x, out=out)
        return offloaded, result

    offloaded, result = jax.jit(run, donate_argnums=1)(x, out)
    assert offloaded.unsafe_buffer_pointer() == address
    assert_same(offloaded, x)
    assert_same(result, jax.jit(compute)(x))


def test_arguments_and_results_need_not_be_arrays():
    x = values()

    def scaled(x, factor, nothing):
        assert nothing is None
        return {"y": x * factor, "label": nothing}

    def run(x, host):
        result, fetched, offloaded = tb.overlap(scaled, x, 3, None, fetch=host)
        assert (result["label"], offloaded) == (None, ())
        return result["y"], fetched

    for transform in (lambda f: f, jax.jit):
        result, fetched = transform(run)(x, tb.to_host(x))
        assert_same(result, 3 * x)
        assert_same(fetched, x)


def test_one_value_may_travel_twice():
    x = values()
    host = tb.to_host(x)

    def run(x, host):
        result, fetched, offloaded = tb.overlap(
            compute, x, fetch=(host, host), offload=(x, x)
        )
        return result, *fetched, *offloaded

    _, *moved = jax.jit(run)(x, host)
    for value in moved:
        assert_same(value, x)


@pytest.mark.parametrize("used", range(3))
def test_using_one_result_keeps_all_transfers_whole(used):
    x, host = values(), tb.to_host(values(seed=1))

    @jax.jit
    def run(x, host):
        return tb.overlap(compute, x, fetch=host, offload=x)[used]

    hlo = run.lower(x, host).compile().as_text()
    for half in ("start", "done"):
        assert hlo.count(f'custom_call_target="turbobus_h2d_{half}"') == 1
    assert hlo.count('custom_call_target="turbobus_d2h_done"') == 1
    expected = (jax.jit(compute)(x), host, x)[used]
    assert_same(run(x, host), expected)


def test_halves_keep_their_order_in_the_program():
    x, host = values(), tb.to_host(values(seed=1))
    program = jax.jit(lambda x, h: tb.overlap(compute, x, fetch=h))
    text = program.lower(x, host).as_text()
    wanted = "turbobus_h2d_start|optimization_barrier|dot_general|turbobus_h2d_done"
    found = [match.group() for match in re.finditer(wanted, text)]
    order = [kind for kind, _ in itertools.groupby(found)]
    assert order == [
        "turbobus_h2d_start",
        "optimization_barrier",
        "dot_general",
        "optimization_barrier",
        "turbobus_h2d_done",
        "optimization_barrier",
    ]


def fastest(f, *args):
    """Of three runs: another process may take our cores for a while."""
    return min(seconds(f, *args) for _ in range(3))


def test_a_transfer_takes_no_time_beside_a_computation(slow_links):
    x = values((1024, 1024))  # 4 MiB
    host = tb.to_host(x)
    assert fastest(tb.to_device, host) > 0.9 * SLEEP_S
    # The computation: as long, on no core, in the links' other direction.
    beside = jax.jit(lambda x, h: tb.overlap(tb.to_host, x, fetch=h))
    assert fastest(beside, x, host) < 1.6 * SLEEP_S
    result, fetched, _ = beside(x, host)
    assert_same(result, x)
    assert_same(fetched, x)


def test_both_directions_at_once(slow_links):
    x = values((1024, 1024))
    host = tb.to_host(x)
    both = jax.jit(lambda x, h: tb.overlap(jnp.sin, x, fetch=h, offload=x))
    assert fastest(both, x, host) < 1.6 * SLEEP_S
    _, fetched, offloaded = both(x, host)
    assert_same(fetched, x)
    assert_same(offloaded, x)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_gradients(transform):
    x, w = values() / 8, values(seed=1) / 8
    host = tb.to_host(w)

    def ours(x, host):
        result, fetched, offloaded = tb.overlap(
            compute, x, fetch=host, offload=jnp.sin(x)
        )
        return (result @ fetched + tb.to_device(offloaded)).sum()

    def theirs(x, w):
        return (compute(x) @ w + jnp.sin(x)).sum()

    dx, dhost = jax.grad(transform(ours), argnums=(0, 1))(x, host)
    assert dhost.sharding.memory_kind == "pinned_host"
    expected = jax.grad(theirs, argnums=(0, 1))(x, w)
    np.testing.assert_allclose(dx, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dhost, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_vmap(transform):
    xs, hosts = values((5, 16, 16)), tb.to_host(values((5, 8, 64), seed=1))

    def run(x, host):
        return tb.overlap(compute, x, fetch=host, offload=x)

    result, fetched, offloaded = transform(jax.vmap(run))(xs, hosts)
    expected = jax.vmap(compute)(xs)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert_same(fetched, hosts)
    assert_same(offloaded, xs)


def test_inside_scan():
    x, w = values() / 8, values(seed=1) / 8
    host = tb.to_host(w)

    def body(x, _):
        result, fetched, offloaded = tb.overlap(compute, x, fetch=host, offload=x)
        return jnp.tanh(result @ fetched), offloaded

    def reference(x, _):
        return jnp.tanh(compute(x) @ w), x

    last, inputs = jax.jit(lambda x: jax.lax.scan(body, x, None, length=4))(x)
    expected = jax.lax.scan(reference, x, None, length=4)
    np.testing.assert_allclose(last, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(inputs, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays(axis_type):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    x = jax.device_put(values(), NamedSharding(mesh, P("x")))
    host = tb.to_host(x)
    run = jax.jit(lambda x, h: tb.overlap(jnp.sin, x, fetch=(h, h), offload=x))
    hlo = run.lower(x, host).compile().as_text()
    assert "all-gather" not in hlo
    result, (fetched, again), offloaded = run(x, host)
    assert_same(result, jax.jit(jnp.sin)(x))
    assert offloaded.sharding.memory_kind == "pinned_host"
    for moved in (fetched, again, offloaded):
        assert moved.sharding.is_equivalent_to(
            x.sharding.with_memory_kind(moved.sharding.memory_kind), 2
        )
        assert_same(moved, x)


def test_sharded_over_emulated_links(slow_links):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(values((256, 256)), NamedSharding(mesh, P("x")))
    host = tb.to_host(x)

    def step(x, host):
        result, fetched, offloaded = tb.overlap(
            lambda x: jax.lax.psum(x, "x"), x, fetch=host, offload=2 * x
        )
        return result, fetched, offloaded

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P("x"), out_specs=(P(), P("x"), P("x"))
    )
    result, fetched, offloaded = jax.jit(mapped)(x, host)
    np.testing.assert_allclose(result, x[:128] + x[128:], rtol=1e-6)
    assert_same(fetched, x)
    assert_same(offloaded, 2 * x)


def lost(x):
    """A second half whose first half never ran."""
    _ffi.register()
    return p.done_p.bind(x, x, target="turbobus_h2d_done")


def test_a_done_without_a_start_is_an_error_that_names_the_call():
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as error:
        jax.block_until_ready(jax.jit(lambda x: lost(jnp.sin(x)))(values()))
    message = str(error.value)
    assert message.startswith("FAILED_PRECONDITION: jax_turbobus: turbobus_h2d_done")
    assert "no transfer into this buffer is in flight" in message


def test_a_program_that_fails_midway_leaves_no_one_writing_to_its_memory(slow_links):
    x, host = values((1024, 1024)), tb.to_host(values((1024, 1024)))
    failing = jax.jit(lambda x, h: tb.overlap(lambda x: lost(jnp.sin(x)), x, fetch=h))
    for _ in range(3):
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError), match="FAILED_PRECONDITION"
        ):
            jax.block_until_ready(failing(x, host))
        # The same memory, given out again while the engine may still be moving.
        fresh = [jnp.full((1024, 1024), float(k)) for k in range(8)]
        jax.block_until_ready(fresh)
        time.sleep(SLEEP_S / 2)
        for k, array in enumerate(fresh):
            assert_same(array, jnp.full((1024, 1024), float(k)))
    assert_same(tb.to_device(host), values((1024, 1024)))


def test_eager_programs_are_compiled_once_and_let_go():
    x, host = values(), tb.to_host(values())
    traces = []

    class Compute:
        def __call__(self, x):
            traces.append(x)
            return x + 1

    compute = Compute()
    for _ in range(3):
        tb.overlap(compute, x, fetch=host)
    assert len(traces) == 1
    gone = weakref.ref(compute)
    traces.clear()
    del compute
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("shape", [(3, 0), (0,)])
def test_empty_arrays_beside_others(shape):
    x = values()
    empty = jnp.zeros(shape)
    result, fetched, offloaded = tb.overlap(
        compute,
        x,
        fetch=(tb.to_host(empty), tb.to_host(x), tb.to_host(empty)),
        offload=(empty, x, empty),
    )
    assert_same(result, compute(x))
    for moved in (fetched, offloaded):
        assert [m.shape for m in moved] == [shape, x.shape, shape]
        assert_same(moved[1], x)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_loop_around_it_can_be_differentiated(transform):
    """JAX moves what is alike in every step out of such a loop."""
    x, host = values() / 8, tb.to_host(values(seed=1) / 8)
    layers = tb.to_host(values((2, 64, 64), seed=2) / 8)

    def loss(overlap, scan_layers, x):
        def body(x, _):
            y, w = overlap(jnp.tanh, x)
            return scan_layers(lambda w, x: jnp.tanh(x @ w), y @ w), None

        return (jax.lax.scan(body, x, None, length=3)[0] ** 2).sum()

    def overlap(f, x):
        return tb.overlap(f, x, fetch=host)[:2]

    ours = transform(
        jax.grad(lambda x: loss(overlap, lambda f, x: tb.scan_layers(f, layers, x), x))
    )
    w, ws = tb.to_device((host, layers))
    theirs = jax.grad(
        lambda x: loss(lambda f, x: (f(x), w), lambda f, x: f(ws[1], f(ws[0], x)), x)
    )
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-6)
