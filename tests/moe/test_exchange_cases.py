"""Public bug reports of other expert-parallel code, each as a test of ours.

The names carry the ids under which the project keeps them; each test says where the
report is.
"""

import jax
import jax.numpy as jnp
import moe_reference as ref
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from moe_mesh import (
    expert_of_rows,
    integers,
    make_mesh,
    on_mesh,
    routing,
    scaling_layer,
)

from jax_turbobus import moe

R, H = 4, 160


def dense(scale):
    def layer(tokens, ids, weights):
        return ref.moe_layer(
            tokens, ids, weights, lambda e, x: x * scale[e], scale.shape[0]
        )

    return layer


def run_dispatch(ids, num_experts, *, tokens=None, valid=None, mesh=None, **options):
    """Returns rows, group sizes, wanted rows and overflow of each rank."""
    num_ranks, num_tokens, top_k = ids.shape
    if tokens is None:
        tokens = integers((num_ranks * num_tokens, H))

    def step(tokens, ids, valid):
        rows, sizes, state = moe.dispatch(
            tokens,
            ids,
            jnp.ones(ids.shape),
            num_experts=num_experts,
            axis_name="x",
            valid=valid,
            **options,
        )
        return rows[None], sizes[None], state.wanted[None], state.overflow[None]

    if valid is None:
        valid = np.ones(num_ranks * num_tokens, bool)
    mapped = jax.jit(on_mesh(step, mesh or make_mesh((num_ranks,))))
    return map(np.asarray, mapped(tokens, jnp.asarray(ids.reshape(-1, top_k)), valid))


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
    scale = integers((4 * 6, H), seed=2)
    tokens = integers((R * 4, H), seed=1)
    _, sizes, *_ = run_dispatch(ids, 24, tokens=tokens, valid=valid.reshape(-1))
    np.testing.assert_array_equal(sizes[0], [12] * 6)  # 72 rows
    assert not sizes[1:].any()
    weights = integers((R * 4, 6), seed=3)
    ids = jnp.asarray(np.where(valid[..., None], ids, -1).reshape(-1, 6))
    layer = jax.jit(on_mesh(scaling_layer(24, schedule="packed"), make_mesh()))
    np.testing.assert_array_equal(
        layer(tokens, ids, weights, scale), dense(scale)(tokens, ids, weights)
    )
    moe.reset_exchange_stats()
    jax.block_until_ready(layer(tokens, ids, weights, scale))
    (sent,) = [s for s in moe.exchange_stats() if s.op == "dispatch"]
    assert sent.total_bytes == 12 * H * 4  # One copy for each token, not six.


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
        halves[turn % 2] = dense(scale)(halves[turn % 2], *parts[turn % 2])
        halves = halves[::-1]
    want = jnp.concatenate(halves)
    for _ in range(30):
        np.testing.assert_array_equal(run(tokens, ids, weights, scale), want)


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
    want = jax.grad(lambda x, s: dense(s)(x, ids, weights).sum(), (0, 1))(tokens, scale)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    assert not np.asarray(got[1])[2:].any()  # Exact zeros of the experts left idle.


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
        dense(scale)(tokens, flat, weights),
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
            chose = (ids.reshape(-1, 4) == rank * 2 + e).any(-1)
            np.testing.assert_array_equal(sources, np.nonzero(chose)[0])
            begin += size


def test_c23_weights_are_applied_once():
    """https://github.com/deepseek-ai/DeepEP/issues/112."""
    ids = jnp.asarray(routing("distinct", R, 16, 2, 8).reshape(-1, 2))
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(R * 16, H)), jnp.float32)
    weights = jnp.tile(jnp.array([0.25, 0.75]), (R * 16, 1))
    mapped = on_mesh(scaling_layer(8), make_mesh())
    got = jax.jit(mapped)(tokens, ids, weights, jnp.ones((8, H)))
    np.testing.assert_array_equal(got, tokens)


def test_c24_one_rank_gives_what_any_number_gives():
    """https://github.com/deepspeedai/DeepSpeed/pull/8213."""
    ids = jnp.asarray(routing("distinct", 1, 24, 2, 4).reshape(-1, 2))
    tokens, weights = integers((24, H), seed=1), integers((24, 2), seed=2)
    scale = integers((4, H), seed=3)
    got = jax.jit(on_mesh(scaling_layer(4), make_mesh((1,))))(
        tokens, ids, weights, scale
    )
    assert got.shape == (24, H)
    np.testing.assert_array_equal(got, dense(scale)(tokens, ids, weights))
    got = jax.jit(on_mesh(scaling_layer(4), make_mesh((4,))))(
        tokens, ids, weights, scale
    )
    np.testing.assert_array_equal(got, dense(scale)(tokens, ids, weights))


@pytest.mark.parametrize("num_valid", [(16, 3, 0, 9), (0, 0, 0, 0)])
def test_c25_all_ranks_have_the_same_number_of_chunks(num_valid):
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/3411."""
    ids = routing("distinct", R, 16, 2, 8)
    valid = np.arange(16) < np.array(num_valid)[:, None]
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
    np.testing.assert_array_equal(got, dense(scale)(tokens, masked, weights))
    assert {s.num_calls for s in moe.exchange_stats()} == {4}


@pytest.mark.parametrize("is_dropping", [True, False])
def test_c28_the_wanted_count_includes_dropped_rows(is_dropping):
    """https://github.com/NVIDIA/TransformerEngine/pull/3277."""
    ids = routing("distinct", R, 32, 2, 8)
    demand = [len(pairs) for pairs in ref.rows_wanted(ids, 8)]
    by_rank = np.reshape(demand, (R, 2)).sum(-1)
    capacity = int(by_rank.max()) // 2 if is_dropping else int(by_rank.max())
    _, sizes, wanted, overflow = run_dispatch(ids, 8, recv_capacity=capacity)
    np.testing.assert_array_equal(wanted.reshape(-1), demand)
    assert (sizes.sum(-1) == np.minimum(by_rank, capacity)).all()
    np.testing.assert_array_equal(overflow, by_rank if is_dropping else [0] * R)


def test_c30_two_layers_of_one_function_share_no_routing():
    """https://github.com/NVIDIA/TransformerEngine/pull/3036."""
    scale = integers((8, H), seed=3, most=2)
    tokens = integers((R * 8, H), seed=1)
    weights = integers((R * 8, 2), seed=2, most=2)
    ids = [
        jnp.asarray(routing("distinct", R, 8, 2, 8, s).reshape(-1, 2)) for s in (1, 2)
    ]

    def two(layer):
        def run(tokens, ids_a, ids_b, weights, scale):
            # Both dispatched before either is combined.
            return layer(layer(tokens, ids_a, weights, scale), ids_b, weights, scale)

        return run

    mapped = on_mesh(two(scaling_layer(8)), make_mesh())
    one = lambda x, i, w, s: dense(s)(x, i, w)  # noqa: E731
    args = (tokens, *ids, weights, scale)
    np.testing.assert_array_equal(jax.jit(mapped)(*args), two(one)(*args))

    def interleaved(tokens, ids_a, ids_b, weights):
        options = {"num_experts": 8, "axis_name": "x"}
        rows_a, _, state_a = moe.dispatch(tokens, ids_a, weights, **options)
        rows_b, _, state_b = moe.dispatch(tokens * 2, ids_b, weights, **options)
        return moe.combine(rows_b, state_b), moe.combine(rows_a, state_a)

    b, a = jax.jit(on_mesh(interleaved, make_mesh()))(tokens, *ids, weights)
    ones = jnp.ones((8, H))
    np.testing.assert_array_equal(a, dense(ones)(tokens, ids[0], weights))
    np.testing.assert_array_equal(b, dense(ones)(tokens * 2, ids[1], weights))


def test_c32_outside_shard_map_is_an_error_not_a_hidden_all_gather():
    """https://github.com/jax-ml/jax/issues/32098."""
    args = (
        jnp.ones((R * 4, H)),
        jnp.zeros((R * 4, 2), jnp.int32),
        jnp.ones((R * 4, 2)),
    )
    with pytest.raises(ValueError, match=r"outside jax\.shard_map"):
        jax.jit(lambda *a: moe.dispatch(*a, num_experts=8, axis_name="x")[0])(*args)


def test_c33_results_are_typed_varying_for_scan_grad_and_remat():
    """https://github.com/NVIDIA/warp/issues/1851."""
    ids = jnp.asarray(routing("distinct", R, 6, 2, 8).reshape(-1, 2))
    tokens, weights = integers((R * 6, H), seed=1), jnp.ones((R * 6, 2))
    scale = integers((8, H), seed=3, most=1)

    @jax.checkpoint
    def body(x, scale):
        rows, sizes, state = moe.dispatch(
            x, ids_, weights_, num_experts=8, axis_name="x"
        )
        assert "x" in jax.typeof(rows).manual_axis_type.varying
        assert "x" in jax.typeof(sizes).manual_axis_type.varying
        out = rows * scale[expert_of_rows(sizes, rows.shape[0])]
        return moe.combine(out, state), None

    def step(tokens, ids, weights, scales):
        nonlocal ids_, weights_
        ids_, weights_ = ids, weights
        return lax.scan(body, tokens, scales)[0]

    ids_ = weights_ = None
    mapped = jax.shard_map(
        step,
        mesh=make_mesh(),
        in_specs=(P("x"), P("x"), P("x"), P(None, "x")),
        out_specs=P("x"),
        check_vma=True,
    )
    scales = jnp.stack([scale, scale])
    grad = jax.jit(jax.grad(lambda x: mapped(x, ids, weights, scales).sum()))(tokens)
    want = jax.grad(
        lambda x: dense(scale)(dense(scale)(x, ids, weights), ids, weights).sum()
    )(tokens)
    np.testing.assert_array_equal(grad, want)


def test_c41_gradient_of_weights_includes_remote_experts():
    """https://github.com/huggingface/transformers/issues/48687."""
    ids = jnp.asarray(routing("distinct", R, 16, 3, 12).reshape(-1, 3))
    rng = np.random.default_rng(0)
    tokens, weights, dy = (
        jnp.asarray(rng.normal(size=s), jnp.float32)
        for s in ((R * 16, H), (R * 16, 3), (R * 16, H))
    )
    scale = jnp.asarray(rng.normal(size=(12, H)), jnp.float32)
    mapped = on_mesh(scaling_layer(12), make_mesh())
    got = jax.jit(jax.grad(lambda w: (mapped(tokens, ids, w, scale) * dy).sum()))(
        weights
    )
    out = tokens[:, None] * scale[ids]  # [token, choice, hidden]
    np.testing.assert_allclose(got, (out * dy[:, None]).sum(-1), rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("top_k", [1, 2])
def test_c44_all_tokens_to_one_expert_fit_the_dropless_capacity(top_k):
    """https://github.com/NVIDIA/TransformerEngine/pull/3116."""
    num_tokens = 32
    ids = np.broadcast_to(np.arange(top_k, dtype=np.int32), (R, num_tokens, top_k))
    rows, sizes, _, overflow = run_dispatch(ids.copy(), 8)
    assert rows.shape[1] == R * num_tokens * min(top_k, 2)
    np.testing.assert_array_equal(
        sizes[0], [R * num_tokens] * top_k + [0] * (2 - top_k)
    )
    assert not overflow.any()


@pytest.mark.parametrize("options", [{}, {"expert_capacity": 40}])
def test_c45_nan_in_padding_never_gets_out(options):
    """A comment in https://github.com/NVIDIA/TransformerEngine (jax/moe.py)."""
    ids = jnp.asarray(routing("last_expert_or_none", R, 8, 2, 8).reshape(-1, 2))
    tokens, weights = integers((R * 8, H), seed=1), integers((R * 8, 2), seed=2)
    scale = integers((8, H), seed=3)
    # `scaling_layer` writes NaN into every padding row.
    mapped = on_mesh(scaling_layer(8, **options), make_mesh())
    value, grads = jax.jit(
        jax.value_and_grad(lambda x, w, s: (mapped(x, ids, w, s) ** 2).sum(), (0, 1, 2))
    )(tokens, weights, scale)
    want, grads_want = jax.value_and_grad(
        lambda x, w, s: (dense(s)(x, ids, w) ** 2).sum(), (0, 1, 2)
    )(tokens, weights, scale)
    assert value == want
    for g, w in zip(grads, grads_want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("options", [{}, {"expert_capacity": 40}])
def test_c45_an_expert_that_is_not_finite_on_padding(options):
    """No mask in the expert: NaN on padding in its results and in its cotangents."""
    ids = jnp.asarray(routing("last_expert_or_none", R, 8, 2, 8).reshape(-1, 2))
    tokens, weights = integers((R * 8, H), seed=1) + 0.5, integers((R * 8, 2), seed=2)

    def normed(x):
        return x / jnp.abs(x).sum(-1, keepdims=True)  # 0 / 0 on padding

    def layer(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=8, axis_name="x", **options
        )
        rows = normed(rows)
        return moe.combine(rows, state), jnp.isnan(rows).any()[None]

    mapped = on_mesh(layer, make_mesh())

    def loss(x, w):
        y, has_nan = mapped(x, ids, w)
        return (y**2).sum(), has_nan

    def want(x, w):
        y = ref.moe_layer(x, ids, w, lambda _, x: normed(x), 8)
        return (y**2).sum()

    got = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(tokens, weights)
    (value, has_nan), grads = got
    assert has_nan.all()
    value_want, grads_want = jax.value_and_grad(want, (0, 1))(tokens, weights)
    np.testing.assert_allclose(value, value_want, rtol=1e-5)
    for g, w in zip(grads, grads_want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"expert_capacity": 40}, {"recv_capacity": 30}]
)
def test_c45_padding_is_zero_in_memory_that_held_something_else(options):
    """Out of dispatch, and out of combine's gradient; docs/moe.md, "Padding"."""
    ids = jnp.asarray(routing("last_expert_or_none", R, 8, 2, 8).reshape(-1, 2))

    def step(tokens, ids, weights, junk):
        # Freed before the exchange: its memory is what the rows may get.
        spent = jnp.sin(junk * jnp.nan).sum() * 0
        tokens = jnp.where(jnp.isnan(spent), tokens, tokens + 1)
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=8, axis_name="x", **options
        )
        _, pull = jax.vjp(lambda rows: moe.combine(rows, state), rows * jnp.nan)
        grads = pull(tokens * 3)[0].reshape(-1, H)
        rows = rows.reshape(-1, H)
        expert = expert_of_rows(sizes, rows.shape[0], options.get("expert_capacity"))
        padding = (expert < 0)[:, None]

        def num_dirty(x):
            return (jnp.where(padding, x, 0) != 0).sum()[None]

        return (
            padding.sum()[None],
            num_dirty(rows) + num_dirty(grads),
            (grads[:, 0] > 0).sum()[None],
            sizes.sum()[None],
        )

    run = jax.jit(on_mesh(step, make_mesh()))
    args = (jnp.ones((R * 8, H)), ids, jnp.ones((R * 8, 2)))
    for _ in range(20):
        junk = jnp.full((R * 64, H), jnp.nan)
        padding, dirty, has_grad, sizes = map(np.asarray, run(*args, junk))
        assert padding.sum() > 0
        assert not dirty.any()
        np.testing.assert_array_equal(has_grad, sizes)


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
    ids = np.full((R, 8, 3), 2, np.int32)
    rows, sizes, _, overflow = run_dispatch(ids, R)
    assert rows.shape[1] == R * 8
    np.testing.assert_array_equal(sizes.reshape(-1), [0, 0, R * 8, 0])
    assert not overflow.any()


def test_c51_tokens_that_no_number_divides():
    """Constructed: 7 tokens a rank in chunks of 4; 10 experts on 4 ranks."""
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
    np.testing.assert_array_equal(got, dense(scale)(tokens, ids, weights))
    with pytest.raises(ValueError, match=r"multiple of the 4 ranks.*pad to 12 experts"):
        run_dispatch(routing("distinct", R, 7, 2, 10), 10)
