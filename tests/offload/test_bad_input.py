"""Bad arguments: an error that names the argument, what was expected, what came."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb
from jax_turbobus import _ffi

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on_device(shape=(16, 32), dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def on_host(shape=(16, 32), dtype=jnp.float32):
    return jax.device_put(on_device(shape, dtype), HOST)


def unpinned(shape=(16, 32)):
    x = on_device(shape)
    return jax.device_put(x, x.sharding.with_memory_kind("unpinned_host"))


def identity(x):
    return x


def elsewhere(x):
    return jax.device_put(x, jax.devices()[1])


def deleted(x):
    x.delete()
    return x


def twice(x):
    return (x, x)


def multiply(layer, x):
    return x @ layer


CASES = {
    # What is called, the error, and what its message must tell.
    "to_device: device memory": (
        lambda: tb.to_device(on_device()),
        ValueError,
        ["to_device", "argument x", "'pinned_host'", "'device'", "float32[16, 32]"],
    ),
    "to_device: unpinned host memory": (
        lambda: tb.to_device(unpinned()),
        ValueError,
        ["argument x", "'pinned_host'", "'unpinned_host'"],
    ),
    "to_device: NumPy array": (
        lambda: tb.to_device(np.ones(3)),
        TypeError,
        ["argument x", "jax.Array", "numpy.ndarray", "jax.device_put"],
    ),
    "to_device: a leaf of a tree": (
        lambda: tb.to_device({"a": on_host(), "b": 1.5}),
        TypeError,
        ["argument x", "jax.Array", "float"],
    ),
    "to_host: host memory": (
        lambda: tb.to_host(on_host()),
        ValueError,
        ["to_host", "argument x", "'device'", "'pinned_host'"],
    ),
    "to_host: out on the device": (
        lambda: tb.to_host(on_device(), on_device()),
        ValueError,
        ["argument out", "'pinned_host'", "'device'"],
    ),
    "to_host: out of another shape": (
        lambda: tb.to_host(on_device(), on_host((32, 16))),
        ValueError,
        ["argument out", "(16, 32)", "(32, 16)"],
    ),
    "to_host: out of another dtype": (
        lambda: tb.to_host(on_device(), on_host(dtype=jnp.bfloat16)),
        TypeError,
        ["argument out", "float32", "bfloat16"],
    ),
    "to_host: out of another tree": (
        lambda: tb.to_host({"a": on_device()}, {"b": on_host()}),
        ValueError,
        ["argument out", "'a'", "'b'"],
    ),
    "to_host: out is a number": (
        lambda: tb.to_host(on_device(), 3),
        TypeError,
        ["argument out", "jax.Array", "int"],
    ),
    "device_put: a sharding": (
        lambda: tb.device_put(on_device(), jax.devices()[0]),
        ValueError,
        ["argument space", "Space.Host", "jax.device_put"],
    ),
    "fetch: stack on the device": (
        lambda: tb.fetch(on_device(), 0),
        ValueError,
        ["fetch", "argument stack", "'pinned_host'", "'device'"],
    ),
    "fetch: no rows": (
        lambda: tb.fetch(on_host((0, 32)), 0),
        ValueError,
        ["argument stack", "(0, 32)"],
    ),
    "fetch: a scalar": (
        lambda: tb.fetch(on_host(()), 0),
        ValueError,
        ["argument stack", "[num_layers, ...]", "()"],
    ),
    "fetch: float index": (
        lambda: tb.fetch(on_host(), jnp.float32(1)),
        TypeError,
        ["argument i", "integer", "float32"],
    ),
    "fetch: index of a list": (
        lambda: tb.fetch(on_host(), [1]),
        TypeError,
        ["argument i", "integer", "list"],
    ),
    "fetch: index is True": (
        lambda: tb.fetch(on_host(), True),
        TypeError,
        ["argument i", "integer", "bool"],
    ),
    "fetch: several indices": (
        lambda: tb.fetch(on_host(), jnp.arange(3)),
        ValueError,
        ["argument i", "scalar", "(3,)", "jax.vmap"],
    ),
    "fetch: rows that end within a byte": (
        lambda: tb.fetch(on_host((16, 33), jnp.int4), 0),
        ValueError,
        ["argument stack", "(33,) int4", "byte"],
    ),
    "fetch: index on another device": (
        lambda: tb.fetch(on_host(), elsewhere(1)),
        ValueError,
        ["fetch", "argument i", "devices of stack", "jax.device_put"],
    ),
    "fetch: deleted index": (
        lambda: tb.fetch(on_host(), deleted(jnp.int32(1))),
        ValueError,
        ["fetch", "argument i", "deleted"],
    ),
    "store: index on another device": (
        lambda: tb.store(on_host(), elsewhere(1), on_device((32,))),
        ValueError,
        ["store", "argument i", "devices of stack", "jax.device_put"],
    ),
    "store: one stack twice": (
        lambda: tb.store(twice(on_host()), 1, twice(on_device((32,)))),
        ValueError,
        ["store", "argument stack[1]", "the same array as stack[0]"],
    ),
    "to_host: one out twice": (
        lambda: tb.to_host((on_device(), on_device()), twice(on_host())),
        ValueError,
        ["to_host", "argument out[1]", "the same array as out[0]"],
    ),
    "overlap: values on two devices": (
        lambda: tb.overlap(identity, [elsewhere(on_device())], fetch=on_host()),
        ValueError,
        ["overlap", "argument fetch", "devices of args[0][0]", "jax.device_put"],
    ),
    "overlap: deleted argument": (
        lambda: tb.overlap(identity, deleted(on_device()), fetch=on_host()),
        ValueError,
        ["overlap", "argument args[0]", "deleted"],
    ),
    "scan_layers: x on another device": (
        lambda: tb.scan_layers(multiply, on_host(), elsewhere(on_device())),
        ValueError,
        ["scan_layers", "argument x", "devices of stack", "jax.device_put"],
    ),
    "scan_layers: stacks on two devices": (
        lambda: tb.scan_layers(
            multiply, [on_host(), tb.to_host(elsewhere(on_device()))], on_device()
        ),
        ValueError,
        ["argument stack[1]", "devices of stack[0]", "jax.device_put"],
    ),
    "scan_layers: deleted x": (
        lambda: tb.scan_layers(multiply, on_host(), {"a": deleted(on_device())}),
        ValueError,
        ["scan_layers", "argument x['a']", "deleted"],
    ),
    "scan_layers: a result on the host": (
        lambda: tb.scan_layers(lambda w, x: tb.to_host(x), on_host(), on_device()),
        ValueError,
        ["argument f", "device memory", "float32<host>[16,32]", "to_device"],
    ),
    "scan_layers: x first, another shape": (
        lambda: tb.scan_layers(lambda x, w: x + w.sum(), on_host(), on_device((4, 8))),
        ValueError,
        ["argument f", "f(layer, x)", "float32[32]", "float32[4,8]"],
    ),
    "store: row on the host": (
        lambda: tb.store(on_host(), 0, on_host((32,))),
        ValueError,
        ["store", "argument x", "'device'", "'pinned_host'"],
    ),
    "store: row on another device": (
        lambda: tb.store(
            on_host(), 0, jax.device_put(on_device((32,)), jax.devices()[1])
        ),
        ValueError,
        ["store", "argument x", "devices of stack", "jax.device_put"],
    ),
    "store: row of another shape": (
        lambda: tb.store(on_host(), 0, on_device((16,))),
        ValueError,
        ["argument x", "(32,)", "(16,)"],
    ),
    "store: row of another dtype": (
        lambda: tb.store(on_host(), 0, on_device((32,), jnp.int32)),
        TypeError,
        ["argument x", "float32", "int32"],
    ),
    "store: row of another tree": (
        lambda: tb.store({"a": on_host()}, 0, on_device((32,))),
        ValueError,
        ["argument x", "tree", "'a'"],
    ),
    "overlap: fetch on the device": (
        lambda: tb.overlap(identity, on_device(), fetch=on_device()),
        ValueError,
        ["overlap", "argument fetch", "'pinned_host'", "'device'"],
    ),
    "overlap: offload on the host": (
        lambda: tb.overlap(identity, on_device(), offload=[on_host()]),
        ValueError,
        ["argument offload", "'device'", "'pinned_host'"],
    ),
    "overlap: fetch is no array": (
        lambda: tb.overlap(identity, on_device(), fetch="x"),
        TypeError,
        ["argument fetch", "jax.Array", "str"],
    ),
    "overlap: out of another shape": (
        lambda: tb.overlap(identity, 1, offload=on_device(), out=on_host((4, 8))),
        ValueError,
        ["argument out", "(16, 32) as offload", "(4, 8)"],
    ),
    "overlap: words as arguments": (
        lambda: tb.overlap(identity, {"a": "word"}, fetch=on_host()),
        TypeError,
        ["overlap", "argument args[0]['a']", "arrays or numbers", "str"],
    ),
    "overlap: out of another tree": (
        lambda: tb.overlap(identity, 1, offload=on_device(), out=[on_host()]),
        ValueError,
        ["argument out", "offload"],
    ),
    "overlap: compute is no function": (
        lambda: tb.overlap(on_device(), fetch=on_host()),
        TypeError,
        ["argument compute", "function", "Array"],
    ),
    "scan_layers: no layers": (
        lambda: tb.scan_layers(lambda w, x: x, {}, on_device()),
        ValueError,
        ["scan_layers", "argument stack", "none"],
    ),
    "scan_layers: layers on the device": (
        lambda: tb.scan_layers(lambda w, x: x, on_device(), on_device()),
        ValueError,
        ["argument stack", "'pinned_host'", "'device'"],
    ),
    "scan_layers: two numbers of layers": (
        lambda: tb.scan_layers(
            lambda w, x: x, {"a": on_host(), "b": on_host((3, 4))}, on_device()
        ),
        ValueError,
        ["argument stack", "[3, 16]"],
    ),
    "scan_layers: another shape": (
        lambda: tb.scan_layers(lambda w, x: x[:8], on_host(), on_device()),
        ValueError,
        ["argument f", "float32[16, 32]", "float32[8, 32]"],
    ),
    "scan_layers: another dtype": (
        lambda: tb.scan_layers(
            lambda w, x: x.astype(jnp.bfloat16), on_host(), on_device()
        ),
        ValueError,
        ["argument f", "float32", "bfloat16", "cast"],
    ),
    "scan_layers: another tree": (
        lambda: tb.scan_layers(lambda w, x: (x, x), on_host(), on_device()),
        ValueError,
        ["argument f", "tree structure"],
    ),
    "scan_layers: x on the host": (
        lambda: tb.scan_layers(lambda w, x: x, on_host(), on_host()),
        ValueError,
        ["argument x", "'device'", "'pinned_host'"],
    ),
    "scan_layers: words as x": (
        lambda: tb.scan_layers(lambda w, x: x, on_host(), "word"),
        TypeError,
        ["scan_layers", "argument x", "arrays or numbers", "str"],
    ),
    "scan_layers: f is no function": (
        lambda: tb.scan_layers(None, on_host(), on_device()),
        TypeError,
        ["argument f", "function", "NoneType"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_arguments_are_refused_in_words(name):
    call, error, parts = CASES[name]
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


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


def call(target, operands, result, **attributes):
    """One of our targets, called as nobody should: handlers check what they get."""
    _ffi.register()
    aval = jax.ShapeDtypeStruct(*result)
    program = jax.jit(lambda *xs: jax.ffi.ffi_call(target, aval)(*xs, **attributes))
    return jax.block_until_ready(program(*operands))


@pytest.mark.parametrize(
    ("target", "operands", "result", "attributes", "parts"),
    [
        (
            "turbobus_h2d_copy",
            [on_device],
            ((8, 32), jnp.float32),
            {},
            ["turbobus_h2d_copy", "source", "[16,32]", "result", "[8,32]"],
        ),
        (
            "turbobus_d2h_copy",
            [on_device, lambda: on_device((16, 31))],
            ((16, 32), jnp.float32),
            {},
            ["turbobus_d2h_copy", "out", "[16,31]"],
        ),
        (
            "turbobus_fetch",
            [on_device, lambda: jnp.int32(0)],
            ((31,), jnp.float32),
            {"axis": np.int64(0)},
            ["turbobus_fetch", "no row along axis 0"],
        ),
        (
            "turbobus_fetch",
            [on_device, lambda: jnp.float32(0)],
            ((32,), jnp.float32),
            {"axis": np.int64(0)},
            ["turbobus_fetch", "expected one int32"],
        ),
        (
            "turbobus_fetch",
            [on_device, lambda: jnp.int32(0)],
            ((32,), jnp.float32),
            {"axis": np.int64(7)},
            ["turbobus_fetch", "axis 7"],
        ),
        (
            "turbobus_store",
            [on_device, lambda: jnp.int32(0), lambda: on_device((32,), jnp.int32)],
            ((16, 32), jnp.float32),
            {"axis": np.int64(0)},
            ["turbobus_store", "no row along axis 0"],
        ),
    ],
)
def test_handlers_check_what_they_get(target, operands, result, attributes, parts):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        call(target, [make() for make in operands], result, **attributes)
    message = str(caught.value)
    assert message.startswith("INVALID_ARGUMENT: jax_turbobus: ")
    for part in parts:
        assert part in message


def test_an_alias_that_is_not_shared_still_gives_the_right_bytes():
    """XLA may drop one; here there is none to begin with."""
    x, stack = on_device() * 3, on_device((4, 16, 32))
    copied = call("turbobus_d2h_copy", [x, on_device()], (x.shape, x.dtype))
    np.testing.assert_array_equal(copied, x)
    stored = call(
        "turbobus_store",
        [stack, jnp.int32(2), x],
        (stack.shape, stack.dtype),
        axis=np.int64(0),
    )
    np.testing.assert_array_equal(stored, stack.at[2].set(x))


def test_a_library_for_another_ffi_is_refused_before_jax_sees_it():
    found = _ffi._compat.ffi_api_version()
    for version in ((found[0], found[1] + 1), (found[0] + 1, 0)):
        with pytest.raises(ImportError, match="was built against XLA FFI"):
            _ffi.check_api_version("a library", version)
    _ffi.check_api_version("a library", (found[0], 0))


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
                pair(on_host(), on_device()),
                on_device(),
            ),
            "stack['b']",
        ),
        (
            lambda: tb.overlap(
                identity, on_device(), offload=pair(on_device(), on_host())
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
