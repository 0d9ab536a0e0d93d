"""Bad arguments: an error that names the argument, what was expected, what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from offload_arrays import on_device, on_host, unpinned

import jax_turbobus as tb


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
        ["argument stack", "'pinned_host'", "'device'", "offload_inputs=True"],
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
