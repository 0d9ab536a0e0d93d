"""Public bug reports: which rows there are, how many, and how many fit.

Names carry the ids under which the project keeps the reports; each test says where
its own is.
"""

import jax
import jax.numpy as jnp
import moe_reference as ref
import numpy as np
import pytest
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
LOCAL = 8 // R  # experts on a rank


def test_c18_ids_of_minus_one_carry_no_row_and_no_weight():
    """https://github.com/NVIDIA/TransformerEngine/issues/2908 (b); (a) is in C++."""
    rng = np.random.default_rng(0)
    ids = routing("distinct", R, 64, 4, 16)
    ids[rng.random(ids.shape) < 0.3] = -1
    flat = jnp.asarray(ids.reshape(-1, 4))
    tokens, weights = integers((R * 64, H), seed=1), integers((R * 64, 4), seed=2)
    scale = integers((16, H), seed=3)
    mapped = on_mesh(scaling_layer(16), make_mesh())
    np.testing.assert_array_equal(
        jax.jit(mapped)(tokens, flat, weights, scale),
        dense(tokens, flat, weights, scale),
    )
    grad = jax.jit(jax.grad(lambda w: (mapped(tokens, flat, w, scale) ** 2).sum()))
    assert not np.asarray(grad(weights))[np.asarray(flat) == -1].any()
    _, sizes, *_ = run_dispatch(ids, 16)
    assert sizes.sum() == (ids >= 0).sum()


def test_c21_sizes_agree_with_the_experts_of_the_rows():
    """https://github.com/InternLM/xtuner/pull/2053."""
    ids = routing("distinct", R, 32, 4, 8)  # Several experts of a token on a rank.
    token = np.arange(R * 32, dtype=np.float32)
    tokens = jnp.asarray(np.repeat(token[:, None], H, 1))
    rows, sizes, *_ = run_dispatch(ids, 8, tokens=tokens)
    for rank in range(R):
        begin = 0
        for e, size in enumerate(sizes[rank]):
            sources = rows[rank, begin : begin + size, 0].astype(int)
            chose = (ids.reshape(-1, 4) == rank * LOCAL + e).any(-1)
            np.testing.assert_array_equal(sources, np.nonzero(chose)[0])
            begin += size


@pytest.mark.parametrize("is_dropping", [True, False])
def test_c28_the_wanted_count_includes_dropped_rows(is_dropping):
    """https://github.com/NVIDIA/TransformerEngine/pull/3277."""
    ids = routing("distinct", R, 32, 2, 8)
    demand = [len(pairs) for pairs in ref.rows_wanted(ids, 8)]
    by_rank = np.reshape(demand, (R, LOCAL)).sum(-1)
    capacity = int(by_rank.max()) // 2 if is_dropping else int(by_rank.max())
    _, sizes, wanted, overflow = run_dispatch(ids, 8, recv_capacity=capacity)
    np.testing.assert_array_equal(wanted.reshape(-1), demand)
    assert (sizes.sum(-1) == np.minimum(by_rank, capacity)).all()
    np.testing.assert_array_equal(overflow, by_rank if is_dropping else [0] * R)


@pytest.mark.parametrize("top_k", [1, 2])
def test_c44_all_tokens_to_one_expert_fit_the_dropless_capacity(top_k):
    """https://github.com/NVIDIA/TransformerEngine/pull/3116."""
    num_tokens = 32
    ids = np.broadcast_to(np.arange(top_k, dtype=np.int32), (R, num_tokens, top_k))
    rows, sizes, _, overflow = run_dispatch(ids.copy(), 8)
    assert rows.shape[1] == R * num_tokens * min(top_k, LOCAL)
    np.testing.assert_array_equal(
        sizes[0], [R * num_tokens] * top_k + [0] * (LOCAL - top_k)
    )
    assert not overflow.any()


def test_c49_duplicate_ids_add_up():
    """No public report: other libraries assume distinct ids."""
    ids = jnp.full((R * 8, 2), 3, jnp.int32)
    tokens = integers((R * 8, H), seed=1)
    weights = jnp.tile(jnp.array([0.25, 0.75]), (R * 8, 1))
    scale = integers((8, H), seed=3)
    mapped = on_mesh(scaling_layer(8), make_mesh())
    np.testing.assert_array_equal(
        jax.jit(mapped)(tokens, ids, weights, scale), tokens * scale[3]
    )
    _, sizes, _, overflow = run_dispatch(np.asarray(ids).reshape(R, 8, 2), 8)
    np.testing.assert_array_equal(sizes.reshape(-1), [0, 0, 0, R * 8, 0, 0, 0, 0])
    assert not overflow.any()
    grad = jax.jit(jax.grad(lambda w: mapped(tokens, ids, w, scale).sum()))(weights)
    want = (tokens * scale[3]).sum(-1, keepdims=True)
    np.testing.assert_array_equal(grad, jnp.broadcast_to(want, grad.shape))


def test_c49_duplicates_do_not_need_more_than_the_dropless_capacity():
    """One expert a rank: the capacity counts a token once, however often it asks."""
    ids = np.full((R, 8, 2), R // 2, np.int32)
    rows, sizes, _, overflow = run_dispatch(ids, R)
    assert rows.shape[1] == R * 8
    np.testing.assert_array_equal(
        sizes.reshape(-1), np.where(np.arange(R) == R // 2, R * 8, 0)
    )
    assert not overflow.any()


def test_c51_tokens_that_no_number_divides():
    """Constructed: 7 tokens a rank in chunks of 4; a number of experts, too."""
    ids = jnp.asarray(routing("distinct", R, 7, 2, 8).reshape(-1, 2))
    tokens, weights = integers((R * 7, H), seed=1), integers((R * 7, 2), seed=2)
    scale = integers((8, H), seed=3)

    def layer(tokens, ids, weights, scale):
        def experts(rows, sizes):
            return rows * scale[expert_of_rows(sizes, rows.shape[0])]

        return moe.expert_parallel(
            experts, tokens, ids, weights, num_experts=8, axis_name="x", num_chunks=2
        )

    got = jax.jit(on_mesh(layer, make_mesh()))(tokens, ids, weights, scale)
    np.testing.assert_array_equal(got, dense(tokens, ids, weights, scale))
    odd = 2 * R + 1
    with pytest.raises(
        ValueError, match=rf"multiple of the {R} ranks.*pad to {3 * R} experts"
    ):
        run_dispatch(routing("distinct", R, 7, 2, odd), odd)
