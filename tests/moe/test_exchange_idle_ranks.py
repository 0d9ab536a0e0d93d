"""Public bug reports: ranks without tokens, without rows or without a turn.

Names carry the ids under which the project keeps the reports; each test says where
its own is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from moe_mesh import (
    NUM_RANKS,
    expert_of_rows,
    integers,
    make_mesh,
    on_mesh,
    routing,
    run_dispatch,
    scaling_layer,
)
from moe_reference import dense

from jax_turbobus import moe

R, H = NUM_RANKS, 160


def test_c12_ranks_without_tokens_take_part_and_receive():
    """https://github.com/sgl-project/sglang/pull/25397."""
    ids = routing("distinct", R, 8, 2, 8)
    valid = np.zeros((R, 8), bool)
    valid[0] = True
    _, sizes, *_ = run_dispatch(ids, 8, valid=valid.reshape(-1))
    assert sizes.sum() == 8 * 2  # All of rank 0.
    assert sizes[1:].sum() > 0
    # No tokens at all, statically. (An operand that is not empty is for shard_map.)
    none = jnp.zeros((0, 2), jnp.int32)
    layer = jax.jit(on_mesh(scaling_layer(8), make_mesh()))
    got = layer(jnp.zeros((0, H)), none, jnp.zeros((0, 2)), jnp.ones((8, H)))
    assert got.shape == (0, H)


def test_c13_a_rank_without_tokens_receives_all_the_others():
    """https://github.com/sgl-project/sgl-kernel-npu/pull/735."""
    ids = np.broadcast_to(np.arange(6, dtype=np.int32), (R, 4, 6)).copy()
    valid = np.ones((R, 4), bool)
    valid[0] = False
    scale = integers((R * 6, H), seed=2)
    tokens = integers((R * 4, H), seed=1)
    _, sizes, *_ = run_dispatch(ids, R * 6, tokens=tokens, valid=valid.reshape(-1))
    np.testing.assert_array_equal(sizes[0], [(R - 1) * 4] * 6)
    assert not sizes[1:].any()
    weights = integers((R * 4, 6), seed=3)
    ids = jnp.asarray(np.where(valid[..., None], ids, -1).reshape(-1, 6))
    layer = jax.jit(on_mesh(scaling_layer(R * 6, schedule="packed"), make_mesh()))
    np.testing.assert_array_equal(
        layer(tokens, ids, weights, scale), dense(tokens, ids, weights, scale)
    )
    moe.reset_exchange_stats()
    jax.block_until_ready(layer(tokens, ids, weights, scale))
    (sent,) = [s for s in moe.exchange_stats() if s.op == "dispatch"]
    assert sent.total_bytes == (R - 1) * 4 * H * 4  # One copy for each token, not six.


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_c12_gradients_where_nobody_has_a_token(num_chunks):
    """Nothing but empty operands, too: XLA takes them for constants."""
    none = (jnp.zeros((0, H)), jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2)))

    def layer(tokens, ids, weights):
        options = {"num_experts": 8, "axis_name": "x", "recv_capacity": 4}
        if num_chunks:
            return moe.expert_parallel(
                lambda rows, _: jnp.sin(rows),
                tokens,
                ids,
                weights,
                num_chunks=num_chunks,
                **options,
            )
        rows, sizes, state = moe.dispatch(tokens, ids, weights, **options)
        return moe.combine(rows + sizes.sum(), state)

    def step(tokens, ids, weights):
        loss = lambda x, w: layer(x, ids, w).sum()  # noqa: E731
        return jax.grad(loss, (0, 1))(tokens, weights)

    outside = jax.grad(
        lambda x, w: on_mesh(layer, make_mesh())(x, none[1], w).sum(), (0, 1)
    )
    inside = on_mesh(step, make_mesh())
    for got in (jax.jit(inside)(*none), jax.jit(outside)(none[0], none[2])):
        assert [g.shape for g in got] == [(0, H), (0, 2)]
    rows, sizes, wanted, overflow = run_dispatch(
        np.zeros((R, 0, 2), np.int32), 8, recv_capacity=4
    )
    assert rows.shape == (R, 4, H)
    for x in (rows, sizes, wanted, overflow):
        assert not np.asarray(x).any()


def test_c15_gradient_where_a_rank_has_no_rows():
    """https://github.com/NVIDIA/Megatron-LM/pull/4851."""
    ids = jnp.asarray(routing("first_rank", R, 6, 2, 8).reshape(-1, 2))
    tokens, weights = integers((R * 6, H), seed=1), integers((R * 6, 2), seed=2)
    scale = integers((8, H), seed=3)

    def layer(tokens, ids, weights, scale):
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=8, axis_name="x"
        )

        def compute(rows):
            return rows * scale[expert_of_rows(sizes, rows.shape[0])]

        out = lax.cond(sizes.sum() == 0, lambda rows: rows * 0, compute, rows)
        return moe.combine(out, state)

    mapped = on_mesh(layer, make_mesh())
    got = jax.jit(jax.grad(lambda x, s: mapped(x, ids, weights, s).sum(), (0, 1)))(
        tokens, scale
    )
    want = jax.grad(lambda x, s: dense(x, ids, weights, s).sum(), (0, 1))(tokens, scale)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    assert not np.asarray(got[1])[2:].any()  # Exact zeros of the experts left idle.


@pytest.mark.parametrize("num_valid", [(16, 3, 0, 9), (0, 0, 0, 0)])
def test_c25_all_ranks_have_the_same_number_of_chunks(num_valid):
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/3411."""
    ids = routing("distinct", R, 16, 2, 8)
    valid = np.arange(16) < np.array(num_valid[:R])[:, None]
    tokens, weights = integers((R * 16, H), seed=1), integers((R * 16, 2), seed=2)
    scale = integers((8, H), seed=3)

    def layer(tokens, ids, weights, scale, valid):
        def experts(rows, sizes):
            return rows * scale[expert_of_rows(sizes, rows.shape[0])]

        return moe.expert_parallel(
            experts,
            tokens,
            ids,
            weights,
            num_experts=8,
            axis_name="x",
            num_chunks=4,
            valid=valid,
        )

    ids, valid = ids.reshape(-1, 2), valid.reshape(-1)
    moe.reset_exchange_stats()
    got = jax.jit(on_mesh(layer, make_mesh()))(tokens, ids, weights, scale, valid)
    masked = jnp.where(valid[:, None], ids, -1)
    np.testing.assert_array_equal(got, dense(tokens, masked, weights, scale))
    assert {s.num_calls for s in moe.exchange_stats()} == {4}


def test_c09_stages_of_a_pipeline_exchange_in_turn():
    """https://github.com/marin-community/marin/issues/7655.

    A group whose branch has an exchange runs beside one whose branch has none.
    """
    mesh = make_mesh((2, 4), ("stage", "expert"))
    ids = jnp.asarray(routing("distinct", 8, 6, 2, 8).reshape(-1, 2))
    tokens, weights = integers((48, H), seed=1), integers((48, 2), seed=2, most=1)
    scale = integers((8, H), seed=3, most=1)
    layer = scaling_layer(8, "expert")

    def step(tokens, ids, weights, scale):
        stage = lax.axis_index("stage")
        for turn in range(4):
            tokens = lax.cond(
                stage == turn % 2,
                lambda x: layer(x, ids, weights, scale),
                lambda x: x,
                tokens,
            )
            # What the stages hand on, and what they all share.
            tokens = lax.ppermute(tokens, "stage", [(0, 1), (1, 0)])
            tokens = tokens + 0 * lax.psum(tokens.sum(), ("stage", "expert"))
        return tokens

    spec = P(("stage", "expert"))
    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(spec, spec, spec, P("expert")), out_specs=spec
        )
    )
    halves = list(jnp.split(tokens, 2))
    parts = list(zip(jnp.split(ids, 2), jnp.split(weights, 2), strict=True))
    for turn in range(4):
        halves[turn % 2] = dense(halves[turn % 2], *parts[turn % 2], scale)
        halves = halves[::-1]
    want = jnp.concatenate(halves)
    for _ in range(30):
        np.testing.assert_array_equal(run(tokens, ids, weights, scale), want)
