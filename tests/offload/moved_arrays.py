"""Arrays of any dtype, and how to compare their bytes."""

import jax
import jax.numpy as jnp
import numpy as np

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def values(shape=(64, 64), dtype=jnp.float32, seed=0):
    bits = np.random.default_rng(seed).integers(-100, 100, shape)
    return jnp.asarray(bits).astype(dtype)


def bits(x):
    """The bytes of an array, so that NaN equals NaN and -0 differs from 0."""
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def assert_same(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(bits(a), bits(b))


def kind(x):
    return x.sharding.memory_kind
