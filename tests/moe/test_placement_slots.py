"""A placement: experts in slots, ids and parameters in their order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_turbobus.moe import Placement


def test_experts_in_order_are_what_ids_mean_without_a_plan():
    plan = Placement.contiguous(8, 4)
    ids = jnp.arange(8).reshape(4, 2)
    np.testing.assert_array_equal(plan.route(ids), ids)
    params = {"w": np.arange(24.0).reshape(8, 3)}
    np.testing.assert_array_equal(plan.permute(params)["w"], params["w"])
    assert plan.num_slots == 8
    assert str(plan).splitlines()[1] == "rank 1: 2 3"


def test_ten_experts_on_four_ranks_get_empty_slots():
    plan = Placement.contiguous(10, 4)
    assert plan.num_slots == 12
    assert plan.slots == (0, 1, 2, 3, 4, 5, 6, 7, -1, 8, 9, -1)
    moved = plan.permute(np.ones((10, 2)))
    np.testing.assert_array_equal(moved[jnp.array([8, 11])], 0)
    np.testing.assert_array_equal(plan.restore(moved), np.ones((10, 2)))


def test_tokens_take_the_copies_of_an_expert_in_turn():
    plan = Placement(3, 2, (0, 1, 2, 0))
    ids = jnp.array([[0, 1], [0, 2], [2, 0], [0, 0], [-1, 7]])
    np.testing.assert_array_equal(
        plan.route(ids), [[0, 1], [3, 2], [2, 0], [3, 3], [-1, -1]]
    )
    batched = jnp.stack([ids, ids])
    np.testing.assert_array_equal(plan.route(batched)[1], plan.route(ids))
    assert plan.copies == ((0, 3), (1,), (2,))


def test_gradients_of_copies_add_up():
    plan = Placement(3, 2, (0, 1, 2, 0))
    grad = jax.grad(lambda p: (plan.permute(p) * jnp.arange(4.0)[:, None]).sum())
    np.testing.assert_array_equal(grad(jnp.ones((3, 2)))[:, 0], [3, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 2, (0, 1, 2)), "slots: expected a multiple of num_ranks=2 entries, got 3"),
        ((4, 2, (0, 1, 2, 2)), r"missing: \[3\]"),
        ((4, 2, (0, 1, 2, 3, 4, -1)), r"not experts: \[4\]"),
        ((0, 2, ()), "num_experts: expected an integer from 1"),
        ((4, 0, ()), "num_ranks: expected an integer from 1"),
        ((True, 1, (0,)), "num_experts: expected a Python integer"),
        ((2, 1, (0.0, 1.0)), "slots: expected an integer for each slot"),
        ((2, 1, None), "slots: expected an integer for each slot"),
    ],
)
def test_impossible_placements_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Placement(*arguments)


def test_slots_in_a_list_are_as_good_as_in_a_tuple():
    plan = Placement(8, 4, list(range(8)))
    assert plan == Placement.contiguous(8, 4)
    assert hash(plan) == hash(Placement.contiguous(8, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 4, 1), "slots_per_rank: expected at least 2 for 8 experts on 4 ranks"),
        ((8, 4, 0), "slots_per_rank: expected an integer from 1"),
        ((10, 4, 2), "slots_per_rank: expected at least 3"),
        ((8, 0), "num_ranks: expected an integer from 1"),
        ((8.0, 4), "num_experts: expected a Python integer"),
    ],
)
def test_too_few_slots_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Placement.contiguous(*arguments)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint64])
def test_ids_are_masked_before_they_are_cut_to_32_bits(dtype):
    limits = np.iinfo(dtype)
    ids = np.array([[3, limits.min], [limits.max, 5]], dtype)
    want = [[3, 0 if limits.min == 0 else -1], [-1, 5]]
    plan = Placement.contiguous(8, 4)
    np.testing.assert_array_equal(plan.route(ids), want)
    if limits.bits > 32:
        ids[0, 1] = 2**32 + 3
        np.testing.assert_array_equal(plan.route(ids), [[3, -1], [-1, 5]])
    else:
        many = Placement.contiguous(300, 4)
        np.testing.assert_array_equal(many.route(jnp.asarray(ids)), [[3, -1], [127, 5]])


def test_bad_arguments_of_a_placement_are_named():
    plan = Placement.contiguous(8, 4)
    with pytest.raises(TypeError, match="route: expert_ids: expected integers"):
        plan.route(jnp.ones((4, 2)))
    with pytest.raises(ValueError, match=r"route: .*\[\.\.\., num_tokens, top_k\]"):
        plan.route(jnp.arange(4))
    with pytest.raises(ValueError, match=r"permute: .*first axis of 8"):
        plan.permute({"w": jnp.ones((4, 2))})
    with pytest.raises(ValueError, match=r"restore: .*first axis of 8"):
        plan.restore(jnp.ones(()))
