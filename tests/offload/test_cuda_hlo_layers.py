"""Loops over layers and sharded arrays, compiled for CUDA without a GPU."""

import functools
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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb


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
