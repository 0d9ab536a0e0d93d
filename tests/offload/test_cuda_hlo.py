"""The same calls compiled for CUDA, without a GPU: what XLA makes of them.

Each call appears as often as it was written, reads host memory itself (space 5) and
writes the memory that it was given; no copy of host memory appears beside it.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from cuda_calls import (
    HOST_TYPE,
    N,
    assert_done_with_what_was_started,
    assert_host_operand,
    assert_in_place,
    first_matmul,
)
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb
from jax_turbobus.offload import _primitives as p


def test_to_device_reads_host_memory(cuda):
    hlo = cuda.compile(lambda h: tb.to_device(h) + 1, cuda.host((N, N)))
    assert hlo.counts() == {"turbobus_h2d_copy": 1}
    assert_host_operand(hlo, *hlo.calls("turbobus_h2d_copy"), 0)
    assert not hlo.host_copies()


def test_to_host_writes_what_it_was_given(cuda):
    hlo = cuda.compile(
        lambda x, out: tb.to_host(jnp.sin(x), out),
        cuda.device((N, N)),
        cuda.host((N, N)),
        donate_argnums=1,
    )
    assert hlo.counts() == {"turbobus_d2h_copy": 1}
    (call,) = hlo.calls("turbobus_d2h_copy")
    assert re.search(HOST_TYPE, call)
    assert_in_place(call, 1)
    assert_host_operand(hlo, call, 1)
    assert not hlo.host_copies()


def test_to_host_makes_host_memory_of_its_own(cuda):
    hlo = cuda.compile(
        lambda x: (tb.to_host(x), tb.to_host(jnp.cos(x)), tb.to_host(x)),
        cuda.device((N, N)),
    )
    assert hlo.counts() == {"AllocateBuffer": 3, "turbobus_d2h_copy": 3}
    for call in hlo.calls("turbobus_d2h_copy"):
        assert re.search(HOST_TYPE, call)
        assert_in_place(call, 1)
    assert not hlo.host_copies()


def test_there_and_back(cuda):
    hlo = cuda.compile(
        lambda x: tb.to_device(tb.to_host(jnp.sin(x))) + x, cuda.device((N, N))
    )
    assert hlo.counts() == {
        "AllocateBuffer": 1,
        "turbobus_d2h_copy": 1,
        "turbobus_h2d_copy": 1,
    }
    assert_host_operand(hlo, *hlo.calls("turbobus_h2d_copy"), 0)
    assert not hlo.host_copies()


def test_rows_are_read_and_written_where_they_lie(cuda):
    def step(stack, i, x):
        return tb.store(stack, i + 1, jnp.sin(x)), tb.fetch(stack, i)

    hlo = cuda.compile(
        step, cuda.host((4, N, N)), cuda.device((), jnp.int32), cuda.device((N, N))
    )
    assert hlo.counts() == {"turbobus_fetch": 1, "turbobus_store": 1}
    assert_host_operand(hlo, *hlo.calls("turbobus_fetch"), 0)

    hlo = cuda.compile(
        lambda stack, x: tb.store(stack, 2, jnp.sin(x)),
        cuda.host((4, N, N)),
        cuda.device((N, N)),
        donate_argnums=0,
    )
    (call,) = hlo.calls("turbobus_store")
    assert re.search(HOST_TYPE, call)
    assert_in_place(call, 0)
    assert not hlo.host_copies()


def test_a_loop_reads_and_writes_rows_where_they_lie(cuda):
    def body(carry, i):
        stack, x = carry
        layer = tb.fetch(stack, i)
        return (tb.store(stack, i, layer + x), jnp.tanh(x @ layer)), layer

    hlo = cuda.compile(
        lambda stack, x: jax.lax.scan(body, (stack, x), jnp.arange(4)),
        cuda.host((4, N, N)),
        cuda.device((N, N)),
        donate_argnums=0,
    )
    assert hlo.counts() == {"turbobus_fetch": 1, "turbobus_store": 1}
    assert_host_operand(hlo, *hlo.calls("turbobus_fetch"), 0)
    assert_in_place(*hlo.calls("turbobus_store"), 0)
    assert not hlo.host_copies()


def test_no_call_ends_up_in_a_fusion_that_writes_slices(cuda):
    """Scan's `ys` are such slices: XLA would run the call again for another use."""

    def body(x, i):
        row = tb.fetch(stack, i)
        return jnp.tanh(x @ row), row

    def program(host, x):
        nonlocal stack
        stack = host
        return jax.lax.scan(body, x, jnp.arange(4))

    stack = None
    hlo = cuda.compile(program, cuda.host((4, N, N)), cuda.device((N, N)))
    (call,) = hlo.calls("turbobus_fetch")
    # In the loop's body, on an operand of that body: not inside a fusion.
    assert "get-tuple-element" in call


def test_gradients_of_a_transfer(cuda):
    def loss(h, x):
        return (jnp.sin(tb.to_device(h)) @ x).sum()

    hlo = cuda.compile(jax.grad(loss), cuda.host((N, N)), cuda.device((N, N)))
    assert hlo.counts() == {
        "AllocateBuffer": 1,
        "turbobus_d2h_copy": 1,
        "turbobus_h2d_copy": 1,
    }
    assert_in_place(*hlo.calls("turbobus_d2h_copy"), 1)
    assert not hlo.host_copies()


def test_rematerialized_transfers_run_again(cuda):
    @jax.checkpoint
    def layer(h, x):
        return jnp.tanh(x @ tb.to_device(h))

    def loss(h, x):
        return (layer(h, layer(h, x)) ** 2).sum()

    hlo = cuda.compile(
        jax.grad(loss, argnums=1), cuda.host((N, N)), cuda.device((N, N))
    )
    # Twice forward (merged: one value) and once for each layer backward at most.
    assert 1 <= hlo.counts()["turbobus_h2d_copy"] <= 3
    assert not hlo.host_copies()


def overlapped(h, x, out):
    result, fetched, offloaded = tb.overlap(
        lambda x: jnp.tanh(x @ x), x, fetch=h, offload=jnp.sin(x), out=out
    )
    return offloaded, result @ fetched


def test_overlap_starts_computes_and_ends_in_this_order(cuda):
    hlo = cuda.compile(
        overlapped,
        cuda.host((N, N)),
        cuda.device((N, N)),
        cuda.host((N, N)),
        donate_argnums=2,
    )
    assert hlo.counts() == {
        "turbobus_d2h_done": 1,
        "turbobus_d2h_start": 1,
        "turbobus_h2d_done": 1,
        "turbobus_h2d_start": 1,
    }
    assert "is_scheduled=true" in hlo
    entry = hlo[hlo.index("\nENTRY") :]
    first_dot = first_matmul(entry)
    for direction in ("h2d", "d2h"):
        assert entry.index(f'"turbobus_{direction}_start"') < first_dot
        assert first_dot < entry.index(f'"turbobus_{direction}_done"')
        assert_in_place(*hlo.calls(f"turbobus_{direction}_done"), 0)
    assert_in_place(*hlo.calls("turbobus_d2h_start"), 1)
    assert_host_operand(hlo, *hlo.calls("turbobus_h2d_start"), 0)
    assert_done_with_what_was_started(hlo)
    assert not hlo.host_copies()


def test_a_start_and_a_done_apart_are_told_from_ones_together(cuda):
    """What the other tests rely on: a transfer across a loop's edge is found out."""

    def apart(stack, x):
        def body(carry, i):
            x, coming = carry
            layer = p.done_p.bind(coming, stack, i, target="turbobus_h2d_done")
            coming = p.fetch_start_p.bind(stack, (i + 1) % 4, axis=0)
            return (jnp.tanh(x @ layer), coming), None

        first = p.fetch_start_p.bind(stack, jnp.int32(0), axis=0)
        return jax.lax.scan(body, (x, first), jnp.arange(4))[0]

    hlo = cuda.compile(apart, cuda.host((4, N, N)), cuda.device((N, N)))
    with pytest.raises(AssertionError, match="is no start"):
        assert_done_with_what_was_started(hlo)


def test_an_out_that_is_not_donated_costs_a_copy(cuda):
    """And so the checks that there is none can fail."""
    hlo = cuda.compile(tb.to_host, cuda.device((N, N)), cuda.host((N, N)))
    assert len(hlo.host_copies()) == 1


@pytest.mark.parametrize("num_devices", [1, 2])
def test_overlap_in_scan(cuda, num_devices):
    def body(x, _):
        result, fetched, _ = tb.overlap(lambda x: jnp.tanh(x @ x), x, fetch=stack)
        return result @ fetched, None

    def program(host, x):
        nonlocal stack
        stack = host
        return jax.lax.scan(body, x, None, length=3)[0]

    stack = None
    hlo = cuda.compile(
        program,
        cuda.host((N, N), spec=P("x")),
        cuda.device((N, N)),
        num_devices=num_devices,
    )
    assert hlo.counts() == {"turbobus_h2d_done": 1, "turbobus_h2d_start": 1}
    assert_done_with_what_was_started(hlo)
    assert not hlo.host_copies()


def test_packed_elements(cuda):
    hlo = cuda.compile(
        lambda h: tb.to_host(tb.to_device(h)), cuda.host((N, N), jnp.int4)
    )
    (call,) = hlo.calls("turbobus_h2d_copy")
    assert "s4[" in call
    assert not hlo.host_copies()


def test_vmap(cuda):
    hlo = cuda.compile(
        lambda s, i: jax.vmap(tb.fetch, in_axes=(0, None))(s, i),
        cuda.host((3, 5, N, N)),
        cuda.device((), jnp.int32),
    )
    assert hlo.counts() == {"turbobus_fetch": 1}
    assert_host_operand(hlo, *hlo.calls("turbobus_fetch"), 0)
    assert not hlo.host_copies()
