"""The bytes that exchanges on GPUs count, held against `moe.volume`."""

import jax
import jax.numpy as jnp
import numpy as np
from gpu_exchanges import E, H, K, by_rank, inputs, mesh_of_gpus, num_ranks
from moe_mesh import on_mesh, scaling_layer

from jax_turbobus import moe


def counted():
    return {kind.op: kind for kind in moe.exchange_stats()}


def check_counts(schedule, num_tokens, dtype=jnp.float32):
    """Runs a layer there and back twice; returns the (schedule, path) of each op."""
    tokens, ids, weights, scale = inputs("duplicates", num_tokens, dtype)
    layer = on_mesh(scaling_layer(E, schedule=schedule), mesh_of_gpus())

    def loss(tokens, weights):
        return (layer(tokens, ids, weights, scale).astype(jnp.float32) ** 2).sum()

    run = jax.jit(jax.grad(loss, (0, 1)))
    jax.block_until_ready(run(tokens, weights))
    moe.reset_exchange_stats()
    assert not moe.exchange_stats()
    for _ in range(2):
        jax.block_until_ready(run(tokens, weights))
    kinds = counted()
    assert {kind.num_calls for kind in kinds.values()} == {2}
    volume = moe.volume(
        tokens_per_rank=num_tokens,
        hidden=H,
        num_experts=E,
        top_k=K,
        num_ranks=num_ranks(),
        dtype=dtype,
        expert_ids=by_rank(ids),
    )

    def bytes_of(op, phase):
        return 2 * getattr(volume[kinds[op].schedule], phase)

    pair_bytes = {op: kind.pair_bytes for op, kind in kinds.items()}
    np.testing.assert_array_equal(
        pair_bytes["dispatch"], bytes_of("dispatch", "dispatch")
    )
    for op in ("combine", "dispatch_grad"):
        np.testing.assert_array_equal(pair_bytes[op], bytes_of(op, "combine"))
    # A float32 comes back for each choice.
    choices = volume.counts.slots.T * (1 - np.eye(num_ranks()))
    np.testing.assert_array_equal(
        pair_bytes["combine_grad"],
        bytes_of("combine_grad", "dispatch") + 2 * 4 * choices,
    )
    return {(kind.schedule, kind.path) for kind in kinds.values()}
