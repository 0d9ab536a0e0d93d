"""The bytes that exchanges between GPUs count are those that `volume` says."""

import gpu_exchanges as g
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_exchange_counts import check_counts, counted
from gpu_exchanges import FEW, MANY
from gpu_programs import PLATFORM, gpus, run_python
from jax.sharding import PartitionSpec as P
from moe_mesh import on_mesh, scaling_layer

from jax_turbobus import moe


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
from gpu_exchange_counts import check_counts
assert check_counts({schedule!r}, {num_tokens}) == {went}
"""
    run_python(code, JAX_TURBOBUS_PEER_ACCESS="0")


@pytest.mark.multigpu
def test_a_vmapped_exchange_is_one_call_of_all_its_bytes():
    tokens, ids, weights, scale = g.inputs("masked")
    mapped = jax.jit(
        jax.shard_map(
            jax.vmap(scaling_layer(g.E), (0, None, None, None)),
            mesh=g.mesh_of_gpus(),
            in_specs=(P(None, "x"), P("x"), P("x"), P("x")),
            out_specs=P(None, "x"),
        )
    )
    one = jax.jit(on_mesh(scaling_layer(g.E), g.mesh_of_gpus()))
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
    num_tokens = 64
    ids = jnp.arange(num_tokens, dtype=jnp.int32)[:, None] % g.E
    args = (
        jnp.ones((num_tokens, g.H)),
        ids,
        jnp.ones((num_tokens, 1)),
        jnp.ones((g.E, g.H)),
    )
    layer = jax.jit(on_mesh(scaling_layer(g.E), g.mesh_of(gpus()[:1])))
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
