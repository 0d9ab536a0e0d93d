"""The same calls compiled for CUDA, without a GPU: what XLA makes of them.

Each call appears as often as it was written, reads host memory itself (space 5) and
writes the memory that it was given; no copy of host memory appears beside it.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb
from jax_turbobus.offload import _primitives as p

HOST_TYPE = r"f32\[[\d,]+\]\{[\d,]+:S\(5\)\}"
N = 256  # more than 512 bytes, and matmuls that XLA takes seriously


def assert_host_operand(hlo, line, position):
    """The call's operand at `position` lies in host memory."""
    operands = re.search(r"custom-call\(([^)]*)\)", line)[1].split(", ")
    name = re.escape(operands[position].split()[-1])
    definition = next(
        other for other in hlo.splitlines() if re.match(rf"\s*(ROOT )?{name} = ", other)
    )
    assert "S(5)" in definition, definition


def assert_in_place(line, operand):
    """The call's result is its operand's memory, in host space if it says so."""
    assert re.search(
        rf"output_to_operand_aliasing=\{{\{{\}}: \({operand}, \{{\}}\)\}}", line
    ), line


def assert_done_with_what_was_started(hlo):
    """Each done gets its start's result itself, through ties only."""
    text = re.sub(r"/\*index=\d+\*/", "", hlo)
    definitions = dict(re.findall(r"^\s*(?:ROOT )?(%\S+) = (.*)$", text, re.M))
    for target in ("turbobus_h2d_done", "turbobus_d2h_done"):
        for call in hlo.calls(target):
            name = re.search(r"custom-call\((%[^,)]+)", call)[1]
            while match := re.search(
                r" get-tuple-element\((%\S+)\), index=(\d+)", definitions[name]
            ):
                ties = re.search(
                    r" (?:tuple|opt-barrier)\((.*?)\)", definitions[match[1]]
                )
                if ties is None:
                    break
                name = ties[1].split(", ")[int(match[2])]
            assert '_start"' in definitions[name], f"{definitions[name]} is no start"


def first_matmul(text):
    found = [text.find(word) for word in ("gemm", "dot(", "cublas")]
    return min(position for position in found if position >= 0)


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


def layer(w, x):
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_scan_layers(cuda, num_devices):
    hlo = cuda.compile(
        functools.partial(tb.scan_layers, layer),
        cuda.host((4, N, N), spec=P(None, None, "x")),
        cuda.device((N, N)),
        num_devices=num_devices,
    )
    assert hlo.counts() == {
        "turbobus_fetch": 1,
        "turbobus_fetch_start": 1,
        "turbobus_h2d_done": 1,
    }
    for target in ("turbobus_fetch", "turbobus_fetch_start"):
        assert_host_operand(hlo, *hlo.calls(target), 0)
    assert_done_with_what_was_started(hlo)
    assert not hlo.host_copies()
    (body,) = [b for b in hlo.split("\n}") if '"turbobus_fetch_start"' in b]
    start, done = (
        body.index(f'"turbobus_{half}"') for half in ("fetch_start", "h2d_done")
    )
    assert start < first_matmul(body) < done


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "checkpoint"])
def test_gradients_of_scan_layers(cuda, num_devices, remat):
    def loss(stack, x):
        return (tb.scan_layers(layer, stack, x) ** 2).sum()

    loss = jax.checkpoint(loss) if remat else loss
    hlo = cuda.compile(
        jax.grad(loss, argnums=(0, 1)),
        cuda.host((4, N, N), spec=P(None, None, "x")),
        cuda.device((N, N)),
        num_devices=num_devices,
    )
    again = 1 if remat else 0  # the forward pass: run again for its inputs
    assert hlo.counts() == {
        "AllocateBuffer": 1,
        "turbobus_d2h_done": 1,
        "turbobus_fetch": 2 + again,
        "turbobus_fetch_start": 3 + again,
        "turbobus_h2d_done": 3 + again,
        "turbobus_store": 1,
        "turbobus_store_start": 1,
    }
    for target in ("turbobus_store", "turbobus_store_start", "turbobus_d2h_done"):
        (call,) = hlo.calls(target)
        assert re.search(HOST_TYPE, call)
        assert_in_place(call, 0)
    assert_done_with_what_was_started(hlo)
    assert not hlo.host_copies()


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("streamed", [False, True], ids=["kept", "streamed"])
def test_inputs_of_layers_on_the_host(cuda, streamed, num_devices):
    """They are written and read in place, beside the layer, in one stack."""

    def loss(stack, x):
        return (tb.scan_layers(layer, stack, x, offload_inputs=True) ** 2).sum()

    place = cuda.host if streamed else cuda.device
    hlo = cuda.compile(
        jax.grad(loss, argnums=(0, 1)),
        place((4, N, N), spec=P(None, None, "x")),
        cuda.device((2 * N, N)),
        num_devices=num_devices,
    )
    expected = {
        "AllocateBuffer": 1,
        "turbobus_d2h_done": 1,
        "turbobus_fetch_start": 2,
        "turbobus_h2d_done": 2,
        "turbobus_store_start": 1,
    }
    if streamed:
        expected = {
            "AllocateBuffer": 2,
            "turbobus_d2h_done": 2,
            "turbobus_fetch": 2,
            "turbobus_fetch_start": 5,
            "turbobus_h2d_done": 5,
            "turbobus_store": 1,
            "turbobus_store_start": 2,
        }
    assert hlo.counts() == expected
    for call in hlo.calls("turbobus_store_start"):
        assert re.search(HOST_TYPE, call)
        assert_in_place(call, 0)
    assert_done_with_what_was_started(hlo)
    assert not hlo.host_copies()
    # No stack of inputs on the device beside it.
    assert not re.search(rf" = f32\[3,{2 * N},{N}\]\{{[\d,]+\}} ", hlo)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_shard_moves_itself(cuda, axis_type):
    def step(h, x, out):
        return tb.to_host(jnp.sin(x), out), tb.to_device(h) + x, tb.to_host(x)

    hlo = cuda.compile(
        step,
        cuda.host((N, N), spec=P("x")),
        cuda.device((N, N), spec=P("x")),
        cuda.host((N, N), spec=P("x")),
        num_devices=2,
        axis_type=axis_type,
        donate_argnums=2,
    )
    assert hlo.counts() == {
        "AllocateBuffer": 1,
        "turbobus_d2h_copy": 2,
        "turbobus_h2d_copy": 1,
    }
    assert f"f32[{N},{N}]" not in hlo[hlo.index("\nENTRY") :]
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in hlo
    assert not hlo.host_copies()


def test_inside_shard_map(cuda):
    def program(h, x):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            mesh = jax.typeof(x).sharding.mesh
        mapped = jax.shard_map(
            lambda h, x: tb.to_device(h) + jax.lax.psum(x, "x"),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
        )
        return mapped(h, x)

    hlo = cuda.compile(
        program,
        cuda.host((N, N), spec=P("x")),
        cuda.device((N, N), spec=P("x")),
        num_devices=2,
        axis_type=AxisType.Explicit,
    )
    assert hlo.counts() == {"turbobus_h2d_copy": 1}
    assert_host_operand(hlo, *hlo.calls("turbobus_h2d_copy"), 0)
    assert not hlo.host_copies()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_gradient_of_a_sharded_stack_is_one_shard_each(cuda, axis_type):
    # Its cotangent is an argument: a mesh with explicit axes has no devices here
    # to make one on.
    def gradient(stack, ct):
        return jax.vjp(lambda s: tb.fetch(s, 1), stack)[1](ct)[0]

    hlo = cuda.compile(
        gradient,
        cuda.host((4, N, N), spec=P(None, "x")),
        cuda.device((N, N), spec=P("x")),
        num_devices=2,
        axis_type=axis_type,
    )
    assert hlo.counts() == {"AllocateBuffer": 1, "turbobus_d2h_copy": 1}
    assert f"f32[4,{N},{N}]" not in hlo
    assert f"f32[4,{N // 2},{N}]" in hlo
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
