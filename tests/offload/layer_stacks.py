"""Stacks of layers, and the loop in device memory that `scan_layers` equals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

WIDTH = 32


def values(*shape, seed=0, scale=1.0):
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32
    )


def layers(num_layers, seed=0):
    return {
        "w": values(num_layers, WIDTH, WIDTH, seed=seed, scale=1 / 6),
        "b": values(num_layers, WIDTH, seed=seed + 1, scale=0.1),
        # An integer leaf: it travels, and has no gradient.
        "shift": jnp.arange(num_layers * WIDTH, dtype=jnp.int32).reshape(-1, WIDTH) % 3,
    }


def layer(params, x):
    y = x @ params["w"] + params["b"] + params["shift"].astype(x.dtype) / 10
    return jnp.tanh(y) + x


def reference(f, stack, x):
    return jax.lax.scan(lambda x, params: (f(params, x), None), x, stack)[0]


def assert_close(ours, theirs):
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def loss(run, stack, x):
    return (run(layer, stack, x) ** 2).sum()


def gradients(scan, stack, x, **options):
    """Of a stack with leaves in several memories; integers have none."""

    def inner(params, x):
        full = {**params, "shift": stack["shift"]}
        return (scan(layer, full, x, **options) ** 2).sum()

    return jax.grad(inner, argnums=(0, 1))({n: stack[n] for n in ("w", "b")}, x)


OFFLOAD_INPUTS = pytest.mark.parametrize(
    "offload_inputs", [False, True], ids=["", "inputs on the host"]
)


def squared(scan, stack, x):
    return (scan(lambda w, x: jnp.tanh(x @ w), stack, x) ** 2).sum()
