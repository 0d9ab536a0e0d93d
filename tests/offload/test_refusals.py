"""What is refused by where it is, how it is sharded or what became of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from offload_arrays import DEVICE, HOST, on_device, on_host, unpinned

import jax_turbobus as tb


def test_an_error_of_a_layer_tells_how_it_was_called():
    stack = {"w": on_host((3, 16, 8))}
    with pytest.raises(TypeError) as caught:
        tb.scan_layers(lambda x, layer: x @ layer["w"], stack, on_device((4, 16)))
    notes = "\n".join(caught.value.__notes__)
    for part in ("f(layer, x)", "'w': 'float32[16,8]'", "x float32[4,16]"):
        assert part in notes


def test_a_layer_that_splits_its_result_otherwise_is_refused():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(on_device(), NamedSharding(mesh, P()))
    stack = tb.to_host(x)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="a result split like x"):
        tb.scan_layers(lambda w, x: jax.sharding.reshard(x, P("x")), stack, x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_whose_shards_end_within_a_byte_are_refused(axis_type):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, P(None, "x"), memory_kind="pinned_host")
    stack = jax.device_put(on_device((4, 8, 3), jnp.int4), sharding)
    with pytest.raises(ValueError, match=r"argument stack: .* \(1, 3\) int4, one dev"):
        tb.fetch(stack, 0)


@pytest.mark.parametrize("name", ["int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"])
def test_dtypes_that_cannot_be_moved_are_refused(name):
    # Only traced: XLA itself cannot make an array of most of these.
    x = jax.ShapeDtypeStruct((16, 32), jnp.dtype(name))
    with pytest.raises(TypeError, match=f"argument x: arrays of {name}"):
        jax.eval_shape(tb.to_host, x)


def test_errors_come_at_trace_time():
    """Inside jit, too, and before anything runs."""
    with pytest.raises(ValueError, match="argument out: expected shape"):
        jax.jit(tb.to_host).lower(on_device(), on_host((32, 16)))
    with pytest.raises(ValueError, match="argument x: expected memory kind"):
        jax.jit(lambda x: tb.to_device(jnp.sin(x))).lower(on_device())


def test_arguments_whose_types_do_not_tell_where_they_are():
    x, keys = on_device(), jax.random.split(jax.random.key(0), 16)
    host, host_keys = tb.to_host(x), tb.to_host(keys)
    shape = jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=host.sharding)
    with pytest.raises(ValueError, match=r"argument x: .* jax\.typeof\(array\)"):
        jax.jit(tb.to_device).lower(shape)
    program = jax.jit(tb.to_device, in_shardings=host.sharding)
    for argument in (host, jax.typeof(host)):
        compiled = program.lower(argument).compile()
        np.testing.assert_array_equal(compiled(host), x)

    for call in (lambda s: tb.fetch(s, 1), tb.to_device):
        with pytest.raises(ValueError, match=r"jax\.random\.key_data\(keys\)"):
            jax.jit(call)(host_keys)
    data = tb.to_host(jax.random.key_data(keys))
    row = jax.jit(lambda s: jax.random.wrap_key_data(tb.fetch(s, 1)))(data)
    np.testing.assert_array_equal(
        jax.random.key_data(row), jax.random.key_data(keys[1])
    )


def test_an_out_of_another_sharding_is_refused():
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
        x = jax.device_put(on_device(), NamedSharding(mesh, P("x")))
        other = NamedSharding(mesh, P("y"), memory_kind="pinned_host")
        out = jax.device_put(on_device(), other)
        with pytest.raises(
            ValueError, match="argument out: expected the sharding of x"
        ):
            tb.to_host(x, out)
        if axis_type == AxisType.Explicit:  # there, types tell while tracing
            with pytest.raises(ValueError, match="argument out: expected the sharding"):
                jax.jit(tb.to_host).lower(x, out)


def test_a_stack_sharded_between_its_rows_is_refused():
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
        sharding = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
        stack = jax.device_put(on_device(), sharding)
        with pytest.raises(ValueError, match=re.escape("must not be sharded")):
            tb.fetch(stack, 0)


def test_an_array_that_was_donated_is_refused():
    host = tb.to_host(on_device())
    tb.to_host(on_device(), host)
    with pytest.raises(ValueError, match=r"argument x: this array .* was donated"):
        tb.to_device(host)
    with pytest.raises(ValueError, match=r"argument out: this array .* was donated"):
        tb.to_host(on_device(), host)


def test_device_put_takes_other_memory_too():
    for space, kind in ((HOST, "pinned_host"), (DEVICE, "device")):
        moved = tb.device_put(unpinned(), space)
        assert moved.sharding.memory_kind == kind
        np.testing.assert_array_equal(moved, on_device())


def pair(a, b):
    return {"a": a, "b": b}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: tb.to_device(pair(on_host(), on_device())), "x['b']"),
        (lambda: tb.to_host(pair(on_device(), on_host())), "x['b']"),
        (lambda: tb.fetch(pair(on_host(), on_device()), 0), "stack['b']"),
        (
            lambda: tb.scan_layers(
                lambda w, x: x + w["a"].sum() + w["b"].sum(),
                pair(on_device(), unpinned()),
                on_device(),
            ),
            "stack['b']",
        ),
        (
            lambda: tb.overlap(
                jnp.sin, on_device(), offload=pair(on_device(), on_host())
            ),
            "offload['b']",
        ),
    ],
    ids=["to_device", "to_host", "fetch", "scan_layers", "overlap"],
)
def test_messages_name_the_leaf(call, name):
    with pytest.raises(ValueError, match=re.escape(f"argument {name}: expected mem")):
        call()


def test_a_store_that_is_refused_leaves_every_stack_as_it_was():
    stacks = pair(on_host(), on_host())
    with pytest.raises(
        ValueError, match=r"argument x\['b'\]: .* a row of stack\['b'\]"
    ):
        tb.store(stacks, 0, pair(on_device((32,)), on_device((16,))))
    assert not any(x.is_deleted() for x in stacks.values())


def test_a_transfer_that_is_refused_leaves_every_out_as_it_was():
    into = pair(on_host(), on_host())
    with pytest.raises(ValueError, match=r"argument out\['b'\]: .* as x\['b'\]"):
        tb.to_host(pair(on_device(), on_device((4, 8))), out=into)
    assert not any(x.is_deleted() for x in into.values())


@pytest.mark.parametrize("value", ["no", None, 2, np.ones(2)], ids=str)
def test_a_switch_that_is_neither_on_nor_off_is_refused(value):
    stack = jnp.ones((2, 8, 128))
    with pytest.raises(TypeError, match="argument offload_inputs: expected True or"):
        tb.scan_layers(lambda w, x: x + w, stack, stack[0], offload_inputs=value)
