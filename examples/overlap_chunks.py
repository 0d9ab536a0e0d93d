"""Experts compute on one chunk of tokens while the next chunk is on its way.

`expert_parallel` splits the tokens into equal chunks. The result does not depend on
how many; the time does: more chunks hide more of the exchange, until each is too small
to be worth its launch. CPU devices have no link that is idle while experts compute:
there chunks only cost, and one is best. Run: python examples/overlap_chunks.py
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe


def main(tokens=4096, hidden=256, num_experts=8, top_k=2, chunks=(1, 2, 4), repeats=5):
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    scores = rng.standard_normal((tokens, num_experts)).astype(np.float32)
    up = rng.standard_normal((num_experts, hidden, 2 * hidden)).astype(np.float32)

    def layer(up, x, scores, num_chunks):
        weights, expert_ids = jax.lax.top_k(jax.nn.softmax(scores), top_k)

        def expert_fn(rows, group_sizes):
            inner = jax.nn.relu(jax.lax.ragged_dot(rows, up, group_sizes))
            return jax.lax.ragged_dot(inner, jnp.swapaxes(up, 1, 2), group_sizes)

        return moe.expert_parallel(
            expert_fn,
            x,
            expert_ids,
            weights,
            num_experts=num_experts,
            axis_name="devices",
            num_chunks=num_chunks,
        )

    results = {}
    for num_chunks in chunks:
        run = jax.jit(
            jax.shard_map(
                functools.partial(layer, num_chunks=num_chunks),
                mesh=mesh,
                in_specs=P("devices"),
                out_specs=P("devices"),
            )
        )
        results[num_chunks] = run(up, x, scores).block_until_ready()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            run(up, x, scores).block_until_ready()
            times.append(time.perf_counter() - started)
        print(f"{num_chunks} chunks: {1e3 * float(np.median(times)):.1f} ms")
    if jax.default_backend() == "cpu":
        print(
            "(CPU devices have no link to hide an exchange on: there chunks only bound "
            "the memory for rows)"
        )
    first, *others = results.values()
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-4, atol=1e-2)
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
