"""Exchanges and transfers on eight CPU devices, for a core built with sanitizers.

Run by `.ci/native`; a plain program, so that nothing but the core, XLA and this
file takes part. Exits with a message if a result is wrong.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_turbobus as tb
from jax_turbobus import moe

RANKS, TOKENS, HIDDEN, EXPERTS, TOP_K = 8, 64, 256, 16, 2
MESH = jax.make_mesh((RANKS,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = PartitionSpec("x")


def layer(tokens, ids, weights, scale):
    """Four exchanges there and back, mixed with XLA's own collectives."""
    for _ in range(2):
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=EXPERTS, axis_name="x"
        )
        expert = jnp.repeat(jnp.arange(2), sizes, total_repeat_length=rows.shape[0])
        tokens = tokens + moe.combine(rows * scale[expert], state)
        tokens = tokens - jax.lax.pmean(tokens, "x")
    return tokens


def exchange(num_rounds):
    """Runs the layer and its gradient; compares with one device's arithmetic."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((RANKS * TOKENS, HIDDEN), np.float32)
    ids = rng.integers(-1, EXPERTS, (RANKS * TOKENS, TOP_K)).astype(np.int32)
    weights = rng.random((RANKS * TOKENS, TOP_K), np.float32)
    scale = rng.standard_normal((EXPERTS, HIDDEN), np.float32)

    def loss(tokens, ids, weights, scale):
        mapped = jax.shard_map(layer, mesh=MESH, in_specs=ROWS, out_specs=ROWS)
        return (mapped(tokens, ids, weights, scale) ** 2).sum()

    def reference(tokens, ids, weights, scale):
        for _ in range(2):
            chosen = jnp.where((ids >= 0)[..., None], scale[ids], 0)
            tokens = tokens + jnp.einsum("tk,tkh->th", weights, chosen) * tokens
            mean = tokens.reshape(RANKS, TOKENS, HIDDEN).mean(0)
            tokens = tokens - jnp.tile(mean, (RANKS, 1))
        return (tokens**2).sum()

    args = tokens, ids, weights, scale
    sharded = [jax.device_put(a, NamedSharding(MESH, ROWS)) for a in args]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3)))
    expected = jax.value_and_grad(reference, argnums=(0, 2, 3))(*args)
    for _ in range(num_rounds):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3),
            step(*sharded),
            expected,
        )


def transfers(num_rounds):
    """Moves arrays to the host and back, plainly and over emulated links."""
    device = NamedSharding(MESH, ROWS)
    x = jax.device_put(np.arange(RANKS * 65536, dtype=np.float32), device)

    @jax.jit
    def there_and_back(x):
        return tb.to_device(tb.to_host(x * 2)) + 1

    for _ in range(num_rounds):
        np.testing.assert_array_equal(there_and_back(x), np.asarray(x) * 2 + 1)


if __name__ == "__main__":
    exchange(3)
    transfers(3)
    tb.configure(topology="8xh800", emulate=True)
    transfers(2)
    tb.configure(emulate=False)
    print("sanitized: ok")  # noqa: T201
