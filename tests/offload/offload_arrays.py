"""Arrays of ones in each kind of memory."""

import jax
import jax.numpy as jnp

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on_device(shape=(16, 32), dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def on_host(shape=(16, 32), dtype=jnp.float32):
    return jax.device_put(on_device(shape, dtype), HOST)


def unpinned(shape=(16, 32)):
    x = on_device(shape)
    return jax.device_put(x, x.sharding.with_memory_kind("unpinned_host"))
