"""Exchanges under way beside the experts, on one GPU: the same program as on many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import gpus
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe
from jax_turbobus.moe import _devices

pytestmark = pytest.mark.gpu

T, H, E, K = 512, 256, 8, 2


def gradients(num_chunks):
    mesh = Mesh(np.array(gpus()[:1]), ("x",), axis_types=(AxisType.Auto,))

    def layer(tokens, ids, weights, params):
        return moe.expert_parallel(
            lambda rows, _: jnp.tanh(jnp.einsum("ech,eho->eco", rows, params)),
            tokens,
            ids,
            weights,
            num_experts=E,
            axis_name="x",
            num_chunks=num_chunks,
            expert_capacity=T,
        )

    on_mesh = jax.shard_map(layer, mesh=mesh, in_specs=(P("x"),) * 4, out_specs=P("x"))

    def loss(tokens, ids, weights, params):
        return (on_mesh(tokens, ids, weights, params) ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 2, 3)))


@pytest.mark.parametrize("reason", [None, "a test says so"], ids=["direct", "counted"])
def test_gradients_of_chunks_are_those_of_the_whole(monkeypatch, reason):
    # The program of GPUs that do not reach each other counts its chunks early.
    monkeypatch.setattr(_devices, "why_through_host", lambda ctx: reason)
    keys = jax.random.split(jax.random.key(0), 4)
    args = (
        jax.random.normal(keys[0], (T, H)),
        jax.random.randint(keys[1], (T, K), 0, E),
        jax.random.uniform(keys[2], (T, K)),
        jax.random.normal(keys[3], (E, H, H)) / 16,
    )
    in_chunks = gradients(3)
    text = in_chunks.lower(*args).as_text()
    assert ("turbobus_moe_count" in text) == (reason is not None)
    results = jax.tree.leaves(in_chunks(*args))
    expected = jax.tree.leaves(gradients(1)(*args))
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)
