"""MoE layers that are compiled for two GPUs, without one."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe

R, T, H, E, K = 2, 256, 512, 8, 2
CAPACITY = 64


def experts(rows, params):
    return jnp.tanh(jnp.einsum("ech,eho->eco", rows, params))


def in_chunks(tokens, ids, weights, params, *, num_chunks=3, experts=experts):
    return moe.expert_parallel(
        lambda rows, _: experts(rows, params),
        tokens,
        ids,
        weights,
        num_experts=E,
        axis_name="x",
        expert_capacity=CAPACITY,
        num_chunks=num_chunks,
    )


def in_loop(layer):
    """Three of them, each with what the one before returned."""

    def run(tokens, ids, weights, params):
        def body(x, _):
            return x + layer(x, ids, weights, params), None

        return jax.lax.scan(body, tokens, length=3)[0]

    return run


def gradients(layer):
    """By all that has some."""

    def run(tokens, ids, weights, params):
        def loss(tokens, weights, params):
            return (layer(tokens, ids, weights, params) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(tokens, weights, params)

    return run


def on_mesh_of(cuda, f):
    split = P("x")
    return jax.shard_map(
        f, mesh=cuda.mesh_of(R), in_specs=(split,) * 4, out_specs=split
    )


def compiled(cuda, f, *, is_mapped=False, depth=None):
    """Compiles ``f(tokens, ids, weights, params)`` for two GPUs.

    `is_mapped`: `f` is on the mesh already. `depth`: params are of so many layers, and
    each rank's are its own experts'.
    """
    split = P("x")
    params = (E, H, H) if depth is None else (depth * R, E // R, H, H)
    return cuda.compile(
        f if is_mapped else on_mesh_of(cuda, f),
        cuda.device((R * T, H), spec=split),
        cuda.device((R * T, K), np.int32, spec=split),
        cuda.device((R * T, K), spec=split),
        cuda.device(params, spec=split),
        num_devices=R,
    )
