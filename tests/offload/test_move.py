"""to_device, to_host and device_put: whole arrays of every dtype, shape and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moved_arrays import DEVICE, HOST, assert_same, kind, values

import jax_turbobus as tb

# int1, uint1 and the 6-bit floats are refused (test_refusals.py).
DTYPES = [
    "bool",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


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


def test_a_donated_out_inside_jit_is_written_in_place():
    x = values((256, 256))
    out = tb.to_host(values((256, 256), seed=1))
    address = out.unsafe_buffer_pointer()
    result = jax.jit(tb.to_host, donate_argnums=1)(x, out)
    assert result.unsafe_buffer_pointer() == address
    assert kind(result) == "pinned_host"
    assert_same(result, x)


def test_an_undonated_out_inside_jit_stays_as_it_was():
    x, other = values(), values(seed=1)
    out = tb.to_host(other)
    assert_same(jax.jit(tb.to_host)(x, out), x)
    assert_same(out, other)


def test_memory_kinds_are_what_the_types_say():
    x, host = values(), tb.to_host(values())

    def program(x, host):
        results = tb.to_host(jnp.sin(x)), tb.to_device(host), tb.to_host(x, host)
        assert [jax.typeof(r).memory_space for r in results] == [HOST, DEVICE, HOST]
        return results

    assert [kind(r) for r in jax.jit(program)(x, host)] == [
        "pinned_host",
        "device",
        "pinned_host",
    ]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_moves_bit_for_bit(name):
    with jax.enable_x64(True):
        dtype = jnp.dtype(name)
        # 17 x 31: more than 512 bytes for most, and no whole number of bytes a row.
        raw = np.random.default_rng(0).integers(-8, 8, (17, 31))
        x = jnp.asarray(raw.astype(dtype))
        host = tb.to_host(x)
        assert_same(host, x)
        assert_same(tb.to_device(host), x)
        assert_same(tb.to_host(x, tb.to_host(jnp.zeros_like(x))), x)
        there_and_back = jax.jit(
            lambda x: tb.to_device(tb.to_host(x)) + jnp.zeros_like(x)
        )
        if name not in ("bool", "float8_e8m0fnu"):
            assert_same(there_and_back(x), jax.jit(lambda x: x + jnp.zeros_like(x))(x))


def test_packed_elements_write_no_byte_beyond_their_buffer():
    # Three int4 buffers of odd length next to others, many times: a copy that took
    # a byte an element would run over its end.
    xs = [values((1001,), jnp.int4, seed) for seed in range(3)]
    program = jax.jit(lambda xs: [tb.to_device(tb.to_host(x)) for x in xs])
    for _ in range(50):
        for x, y in zip(xs, program(xs), strict=True):
            assert_same(x, y)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (1, 1, 1)], ids=str)
def test_shapes_of_no_or_one_element(shape):
    x = jnp.ones(shape)
    host = tb.to_host(x)
    assert kind(host) == "pinned_host"
    assert_same(host, x)
    assert_same(tb.to_device(host), x)
    assert_same(tb.to_host(x + 1, host), x + 1)
    assert_same(jax.jit(lambda x: tb.to_device(tb.to_host(x)))(x), x)


def test_keys_move_too():
    key = jax.random.key(3)
    host = tb.to_host(key)
    assert kind(host) == "pinned_host"
    assert_same(jax.random.key_data(tb.to_device(host)), jax.random.key_data(key))


def test_trees_move_leaf_by_leaf():
    tree = {"a": values(), "b": [values((3,)), None]}
    host = tb.to_host(tree)
    assert {kind(leaf) for leaf in jax.tree.leaves(host)} == {"pinned_host"}
    back = tb.to_device(host)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(assert_same, back, tree)
    jax.tree.map(assert_same, tb.to_host(tree, host), tree)
