"""Transfers on real GPUs: exact, in stream order, whatever else is going on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import (
    MIB,
    PLATFORM,
    assert_same_bytes,
    on_device,
    on_host,
    random,
)

import jax_turbobus as tb
from jax_turbobus import gpu as engine_of_gpus

pytestmark = pytest.mark.gpu

SIZES = [1, 1000, MIB, 5 * MIB + 3, 16 * MIB, 64 * MIB + 4096, 200 * MIB + 17]


@pytest.mark.parametrize("size", SIZES)
def test_bytes_survive_a_round_trip(gpu, size):
    x = random(size, np.uint8, seed=size)
    h = on_host(x, gpu)
    d = jax.jit(tb.to_device)(h)
    assert_same_bytes(d, x)
    assert d.sharding.memory_kind == "device"
    back = jax.jit(tb.to_host, donate_argnums=1)(d, on_host(np.zeros_like(x), gpu))
    assert back.sharding.memory_kind == "pinned_host"
    assert_same_bytes(back, x)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_, jnp.complex64]
)
def test_every_kind_of_element_is_moved(gpu, dtype):
    x = random((1031, 4099), dtype)
    assert_same_bytes(jax.jit(tb.to_device)(on_host(x, gpu)), x)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,)])
def test_tiny_shapes(gpu, shape):
    x = random(shape)
    assert_same_bytes(jax.jit(tb.to_device)(on_host(x, gpu)), x)


def test_the_given_buffer_is_written_without_a_copy(gpu):
    x = on_device(random(8 * MIB), gpu)
    out = on_host(np.zeros(8 * MIB, np.float32), gpu)
    before = out.unsafe_buffer_pointer()
    y = jax.jit(tb.to_host, donate_argnums=1)(x, out)
    assert y.unsafe_buffer_pointer() == before
    assert_same_bytes(y, x)


def test_host_memory_is_made_inside_the_program(gpu):
    x = random(3 * MIB)

    @jax.jit
    def program(v):
        a = tb.to_host(jnp.sin(v))
        b = tb.to_host(jnp.cos(v))
        return tb.to_device(a) + tb.to_device(b), a

    total, a = program(on_device(x, gpu))
    expected = jax.jit(jnp.sin)(on_device(x, gpu))
    assert_same_bytes(a, expected)
    np.testing.assert_array_equal(
        total, jax.jit(lambda v: jnp.sin(v) + jnp.cos(v))(on_device(x, gpu))
    )


def test_the_source_may_change_right_after(gpu):
    x = random(40 * MIB, np.uint8, seed=3)

    def program(v, out):
        v = v + 1  # a temporary, whose memory what follows gets
        moved = tb.to_host(v, out=out)
        for i in range(6):
            v = jnp.flip(v) * 3 + i
        return moved, v

    # Both have one shape: donating v as well would make JAX alias it to `moved`.
    step = jax.jit(program, donate_argnums=1)
    d = on_device(x, gpu)
    for _ in range(4):
        moved, _ = step(d, on_host(np.zeros_like(x), gpu))
        assert_same_bytes(moved, x + np.uint8(1))


def test_transfers_wait_for_what_computes_their_source(gpu):
    a = on_device(np.full((2048, 2048), 1e-3, np.float32), gpu)
    out = on_host(np.zeros((2048, 2048), np.float32), gpu)

    def compute(a):
        for _ in range(8):
            a = jnp.tanh(a @ a)
        return a

    expected = jax.jit(compute)(a)
    step = jax.jit(lambda a, out: tb.to_host(compute(a), out=out), donate_argnums=1)
    assert_same_bytes(step(a, out), expected)


def test_many_in_a_row_are_issued_ahead(gpu):
    x = random(16 * MIB, np.uint8)
    h = on_host(x, gpu)

    @jax.jit
    def program(h):
        total = jnp.zeros(x.shape, jnp.int32)
        for _ in range(20):
            h, total = jax.lax.optimization_barrier((h, total))
            total = total + tb.to_device(h)
        return total

    np.testing.assert_array_equal(program(h), x.astype(np.int32) * 20)


@pytest.mark.parametrize("rows", [(5, 3), (4, 1 << 20), (6, 5 * MIB // 4 + 1)])
def test_rows_are_fetched_and_stored_where_the_device_says(gpu, rows):
    stack = random(rows, np.int32, seed=2)
    h = on_host(stack, gpu)
    order = np.array([3, 0, -1, rows[0] + 7, 2, 1], np.int32)
    clamped = np.clip(np.where(order < 0, order + rows[0], order), 0, rows[0] - 1)

    @jax.jit
    def gather(h, order):
        return jax.lax.map(lambda i: tb.fetch(h, i), order)

    assert_same_bytes(gather(h, order), stack[clamped])

    def scatter(h, order):
        def body(h, i):
            row = jnp.full(rows[1:], i + 100, jnp.int32)
            return tb.store(h, i, row), None

        return jax.lax.scan(body, h, order)[0]

    expected = stack.copy()
    for i, j in zip(order, clamped, strict=True):
        expected[j] = i + 100
    assert_same_bytes(jax.jit(scatter, donate_argnums=0)(h, order), expected)


def test_a_row_number_that_the_program_knows(gpu):
    stack = random((5, 10 * MIB), np.uint8, seed=4)
    h = on_host(stack, gpu)
    assert_same_bytes(jax.jit(lambda h: tb.fetch(h, 3))(h), stack[3])
    row = random(10 * MIB, np.uint8, seed=6)
    stored = jax.jit(lambda h, row: tb.store(h, 2, row), donate_argnums=0)(h, row)
    stack[2] = row
    assert_same_bytes(stored, stack)


def test_large_layers_stream_back(gpu):
    """Rows that are worth a relay, forwards, backwards and stored."""
    n, d = 5, 2048
    w = random((n, d, d), np.uint8).astype(np.float32) / 256 / d
    stack, x = on_host(w, gpu), on_device(np.ones((8, d), np.float32), gpu)

    def loss(run, stack, x):
        return jnp.sum(run(lambda layer, x: x @ layer, stack, x))

    def plain(f, w, x):
        return jax.lax.scan(lambda x, layer: (f(layer, x), None), x, w)[0]

    step = jax.jit(jax.grad(functools.partial(loss, tb.scan_layers)))
    expected = jax.jit(jax.grad(functools.partial(loss, plain)))(on_device(w, gpu), x)
    for _ in range(3):
        np.testing.assert_allclose(step(stack, x), expected, rtol=1e-3, atol=1e-6)


def test_rows_along_another_axis(gpu):
    stack = random((3, 7, 50_001), np.int32)
    h = on_host(stack, gpu)
    fetched = jax.jit(jax.vmap(tb.fetch, in_axes=(0, None)))(h, 4)
    assert_same_bytes(fetched, stack[:, 4])


def test_overlap_moves_both_ways(gpu):
    a = on_device(np.eye(1024, dtype=np.float32), gpu)
    fetched = [on_host(random(n, np.uint8, n), gpu) for n in (12 * MIB, 1000, 70 * MIB)]
    sent = on_device(random(33 * MIB, np.uint8, 5), gpu)

    @jax.jit
    def program(a, fetched, sent):
        return tb.overlap(lambda a: a @ a, a, fetch=fetched, offload=sent)

    for _ in range(3):
        result, came, went = program(a, fetched, sent)
        assert_same_bytes(result, a)
        for one, other in zip(came, fetched, strict=True):
            assert_same_bytes(one, other)
        assert_same_bytes(went, sent)


@pytest.mark.parametrize("offload_inputs", [False, True], ids=["", "inputs too"])
def test_layers_stream_forward_and_back(gpu, offload_inputs):
    n, d = 6, 1200
    w = (random((n, d, d), np.uint8).astype(np.float32) / 256 - 0.5) / np.sqrt(d)
    x = random((8, d), np.uint8).astype(np.float32) / 256
    stack, x = on_host(w, gpu), on_device(x, gpu)

    def f(layer, x):
        return jnp.tanh(x @ layer)

    def loss(stack, x):
        y = tb.scan_layers(f, stack, x, offload_inputs=offload_inputs)
        return jnp.sum(y**2)

    def plain(w, x):
        return jnp.sum(jax.lax.scan(lambda x, layer: (f(layer, x), None), x, w)[0] ** 2)

    expected, (grad_w, grad_x) = jax.jit(jax.value_and_grad(plain, (0, 1)))(
        on_device(w, gpu), x
    )
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    for _ in range(3):  # guesses of rows are wrong in the first run only
        value, (stack_grad, x_grad) = step(stack, x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(stack_grad, grad_w, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(x_grad, grad_x, rtol=1e-4, atol=1e-6)
    assert stack_grad.sharding.memory_kind == "pinned_host"


def test_inputs_of_layers_go_out_and_come_back(gpu):
    """Layers on the device; inputs large enough for a relay, small ones beside them."""
    n, d = 5, 1024
    w = (random((n, d, d), np.uint8).astype(np.float32) / 256 - 0.5) / np.sqrt(d)
    x = random((4096, d), np.uint8).astype(np.float32) / 256
    w, x = on_device(w, gpu), on_device(x, gpu)

    def loss(w, x, scan):
        y, _ = scan(lambda w, x: (jnp.tanh(x[0] @ w), x[1] + 1), w, (x, jnp.zeros(5)))
        return jnp.sum(y**2)

    def plain(f, w, x):
        return jax.lax.scan(lambda x, layer: (f(layer, x), None), x, w)[0]

    kept = jax.jit(jax.grad(functools.partial(loss, scan=plain), (0, 1)))(w, x)
    ours = functools.partial(tb.scan_layers, offload_inputs=True)
    step = jax.jit(jax.grad(functools.partial(loss, scan=ours), (0, 1)))
    first = step(w, x)
    for a, b in zip(first, kept, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, step(w, x), first)


def test_a_transfer_that_xla_copied_is_an_error_with_a_name(gpu):
    """A start in one iteration and its done in the next."""
    from jax_turbobus.offload import _primitives as p

    if PLATFORM != "cuda":
        pytest.skip("tests/offload has the CPU case")
    h = on_host(random((4, 8 * MIB), np.uint8), gpu)

    @jax.jit
    def program(h):
        def body(carry, i):
            flying, total = carry
            ready = p.done_p.bind(flying, h, target="turbobus_h2d_done")
            total = total + jnp.sum(ready.astype(jnp.int32))
            flying = p.h2d_start_p.bind(h)
            return (jnp.flip(flying), total), None

        first = jnp.flip(p.h2d_start_p.bind(h))
        return jax.lax.scan(body, (first, jnp.int32(0)), jnp.arange(3))[0][1]

    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match="turbobus_h2d_done"
    ):
        jax.block_until_ready(program(h))
    # The process goes on.
    assert_same_bytes(jax.jit(tb.to_device)(h), h)


def test_what_is_in_flight_is_awaited_where_another_op_ends_the_program(gpu):
    """Else it would write into memory that has become another's, or read it."""
    size = 256 * MIB
    h, d = on_host(random(size, np.uint8, 1), gpu), on_device(np.arange(1000), gpu)
    sent = on_device(random(size // 2, np.uint8, 2), gpu)

    def refused(d):
        # By XLA: it has one operand.
        return jax.ffi.ffi_call("turbobus_h2d_copy", jax.typeof(d))(d, d)

    def program(d, h, sent):
        return tb.overlap(refused, d, fetch=h, offload=sent + 1)

    def num_started():
        raw = engine_of_gpus.engine().raw()
        assert raw["num_started"] == 0
        return raw["num_direct"] + raw["num_pooled"]

    program = jax.jit(program).lower(d, h, sent).compile()
    fill = jax.jit(lambda: jnp.full(size, 7, jnp.uint8)).lower().compile()
    before = num_started() if PLATFORM == "cuda" else None
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="number of arguments"):
            jax.block_until_ready(program(d, h, sent))
        # The allocator gives the memory that was fetched into.
        filled = jax.block_until_ready(fill())
        assert_same_bytes(jax.jit(tb.to_device)(h), h)  # behind what was left
        assert (filled == 7).all()
        del filled
    if PLATFORM == "cuda":
        # Each time one in and one out, then one more of ours.
        assert num_started() - before == 9


def test_lowered_calls_run_under_other_flags(gpu):
    """Also amid operations that XLA puts into command buffers."""
    x = random((9 * MIB // 4,), np.int32)

    def program(h, a):
        for _ in range(6):
            a = jnp.sin(a @ a)
        y = tb.to_device(h) + 1
        for _ in range(6):
            a = jnp.cos(a @ a)
        return y, a

    a = on_device(np.eye(256, dtype=np.float32), gpu)
    f = jax.jit(program).lower(on_host(x, gpu), a)
    flag = "xla_gpu_graph_min_graph_size"
    for options in ({}, {flag: "1"}, {"xla_gpu_enable_command_buffer": ""}):
        compiled = f.compile(compiler_options=options if PLATFORM == "cuda" else {})
        for _ in range(3):
            y, same = compiled(on_host(x, gpu), a)
            assert_same_bytes(y, x + 1)
    assert np.isfinite(same).all()
