"""Large dispatches plan and move apart: the same results, and no second buffer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe
from jax_turbobus.moe import _exchange

RANKS, TOKENS, HIDDEN, EXPERTS, TOP_K = 4, 40, 72, 12, 3
MESH = Mesh(np.array(jax.devices()[:RANKS]), ("x",))


def inputs(batch=()):
    rng = np.random.default_rng(0)
    shape = (*batch, RANKS * TOKENS)
    tokens = rng.integers(-4, 5, (*shape, HIDDEN)).astype(np.float32)
    ids = rng.integers(-1, EXPERTS, (*shape, TOP_K)).astype(np.int32)
    weights = rng.integers(1, 4, (*shape, TOP_K)).astype(np.float32)
    return tokens, ids, weights


def program(sizes, batched=False):
    def per_rank(tokens, ids, weights):
        rows, group_sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=EXPERTS, axis_name="x", **sizes
        )
        y = moe.combine(rows * 2, state)
        return y, rows, group_sizes, state.slots, state.overflow[None]

    f = jax.vmap(per_rank) if batched else per_rank
    spec = P(None, "x") if batched else P("x")

    def both(tokens, ids, weights):
        mapped = jax.shard_map(f, mesh=MESH, in_specs=spec, out_specs=spec)

        def loss(tokens, weights):
            return (mapped(tokens, ids, weights)[0] ** 2).sum()

        return mapped(tokens, ids, weights), jax.grad(loss, (0, 1))(tokens, weights)

    sharding = NamedSharding(MESH, spec)
    return lambda *args: jax.jit(both)(*jax.device_put(args, (sharding,) * 3))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "sizes", [{}, {"recv_capacity": 50}, {"expert_capacity": 9}], ids=str
)
def test_results_are_the_same(monkeypatch, sizes, batched):
    args = inputs((2,) if batched else ())
    at_once = program(sizes, batched)(*args)
    monkeypatch.setattr(_exchange, "_LARGE_BYTES", 0)
    in_two = program(sizes, batched)(*args)
    jax.tree.map(np.testing.assert_array_equal, at_once, in_two)


def test_many_large_dispatches_of_one_helper_never_pair_wrongly(monkeypatch):
    monkeypatch.setattr(_exchange, "_LARGE_BYTES", 0)
    tokens, ids, weights = inputs()

    @jax.jit
    def helper(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=EXPERTS, axis_name="x"
        )
        return moe.combine(rows, state)

    def per_rank(tokens, ids, weights):
        total = [helper(tokens + i, ids, weights) for i in range(8)]
        return jnp.stack([t + jax.lax.pmean(t.sum(), "x") * 0 for t in total])

    f = jax.jit(
        jax.shard_map(per_rank, mesh=MESH, in_specs=P("x"), out_specs=P(None, "x"))
    )
    total = np.where(ids >= 0, weights, 0).sum(-1, keepdims=True)
    want = np.stack([total * (tokens + i) for i in range(8)])
    for _ in range(30):
        np.testing.assert_array_equal(f(tokens, ids, weights), want)


def test_an_elementwise_expert_writes_over_the_rows_it_got():
    hidden = 2048

    def per_rank(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=EXPERTS, axis_name="x"
        )
        return moe.combine(rows * 2, state)

    f = jax.shard_map(per_rank, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    args = (
        jax.ShapeDtypeStruct((RANKS * TOKENS, hidden), jnp.float32),
        jax.ShapeDtypeStruct((RANKS * TOKENS, TOP_K), jnp.int32),
        jax.ShapeDtypeStruct((RANKS * TOKENS, TOP_K), jnp.float32),
    )
    compiled = jax.jit(f).lower(*args).compile()
    rows_bytes = RANKS * TOKENS * TOP_K * hidden * 4
    assert rows_bytes > _exchange._LARGE_BYTES
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * rows_bytes
