"""The bytes that exchanges between GPUs count are those that `volume` says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gpu_exchange as exchange
from gpu_programs import PLATFORM, gpus, run_python
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from moe_mesh import on_mesh, scaling_layer

from jax_turbobus import moe

# Few tokens go by mail where GPUs do not reach each other's memory, many by rings.
FEW, MANY = 300, 2000


def counted():
    return {kind.op: kind for kind in moe.exchange_stats()}


def check_counts(schedule, num_tokens, dtype=jnp.float32):
    """Runs a layer there and back twice; returns the (schedule, path) of each op."""
    num_ranks = exchange.num_ranks()
    tokens, ids, weights, scale = exchange.inputs(
        "duplicates", dtype=dtype, num_tokens=num_tokens
    )
    layer = on_mesh(
        scaling_layer(exchange.E, schedule=schedule), exchange.mesh_of_gpus()
    )

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
    by_rank = np.asarray(ids).reshape(num_ranks, num_tokens, exchange.K)
    volume = moe.volume(
        tokens_per_rank=num_tokens,
        hidden=exchange.H,
        num_experts=exchange.E,
        top_k=exchange.K,
        num_ranks=num_ranks,
        dtype=dtype,
        expert_ids=by_rank,
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
    choices = volume.counts.slots.T * (1 - np.eye(num_ranks))
    np.testing.assert_array_equal(
        pair_bytes["combine_grad"],
        bytes_of("combine_grad", "dispatch") + 2 * 4 * choices,
    )
    return {(kind.schedule, kind.path) for kind in kinds.values()}


@pytest.mark.multigpu
@pytest.mark.parametrize("num_tokens", [FEW, MANY])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_between_gpus_are_those_of_volume(num_tokens, dtype):
    went = check_counts("auto", num_tokens, jnp.dtype(dtype))
    if PLATFORM == "cuda" and all(path == "peer" for _, path in went):
        assert went == {("direct", "peer")}


@pytest.mark.multigpu
@pytest.mark.skipif(PLATFORM != "cuda", reason="CPU devices share one memory")
@pytest.mark.parametrize(
    ("schedule", "num_tokens", "went"),
    [
        ("packed", FEW, {("packed", "mail")}),
        ("packed", MANY, {("packed", "host")}),
        ("broadcast", MANY, {("broadcast", "host"), ("packed", "host")}),
    ],
)
def test_bytes_through_host_memory_are_those_of_volume(schedule, num_tokens, went):
    code = f"""
import test_gpu_exchange_counts as t
assert t.check_counts({schedule!r}, {num_tokens}) == {went}
"""
    run_python(code, JAX_TURBOBUS_PEER_ACCESS="0")


@pytest.mark.multigpu
def test_a_vmapped_exchange_is_one_call_of_all_its_bytes():
    tokens, ids, weights, scale = exchange.inputs("masked")
    mapped = jax.jit(
        jax.shard_map(
            jax.vmap(scaling_layer(exchange.E), (0, None, None, None)),
            mesh=exchange.mesh_of_gpus(),
            in_specs=(P(None, "x"), P("x"), P("x"), P("x")),
            out_specs=P(None, "x"),
        )
    )
    one = jax.jit(on_mesh(scaling_layer(exchange.E), exchange.mesh_of_gpus()))
    moe.reset_exchange_stats()
    jax.block_until_ready(one(tokens, ids, weights, scale))
    alone = counted()
    moe.reset_exchange_stats()
    jax.block_until_ready(mapped(jnp.stack([tokens] * 3), ids, weights, scale))
    together = counted()
    for op in ("dispatch", "combine"):
        assert together[op].num_calls == alone[op].num_calls == 1
        np.testing.assert_array_equal(together[op].pair_bytes, 3 * alone[op].pair_bytes)


@pytest.mark.gpu
def test_a_gpu_alone_counts_its_calls_and_sends_nobody_anything():
    mesh = Mesh(np.array(gpus()[:1]), ("x",), axis_types=(AxisType.Auto,))
    num_tokens = 64
    ids = jnp.arange(num_tokens, dtype=jnp.int32)[:, None] % exchange.E
    args = (
        jnp.ones((num_tokens, exchange.H)),
        ids,
        jnp.ones((num_tokens, 1)),
        jnp.ones((exchange.E, exchange.H)),
    )
    layer = jax.jit(on_mesh(scaling_layer(exchange.E), mesh))
    moe.reset_exchange_stats()
    for _ in range(3):
        jax.block_until_ready(layer(*args))
    kinds = counted()
    assert {op: kind.num_calls for op, kind in kinds.items()} == {
        "dispatch": 3,
        "combine": 3,
    }
    assert all(kind.total_bytes == 0 for kind in kinds.values())
    moe.reset_exchange_stats()
    assert not moe.exchange_stats()
