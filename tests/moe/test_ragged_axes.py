"""`ragged_all_to_all` over groups, several axes, and axes of others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moe_mesh import make_mesh
from ragged_mesh import RANKS, call, mapped
from ragged_reference import plan, slow, slow_gradients, values

from jax_turbobus.moe import ragged_all_to_all


@pytest.mark.parametrize(
    "groups", [[[0, 1], [2, 3]], [[3, 0], [2, 1]], [[0], [1], [2], [3]]]
)
def test_axis_index_groups(groups):
    size = len(groups[0])
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)
    fields = [np.zeros((RANKS, size), np.int32) for _ in range(4)]
    want, bars = np.zeros_like(output), np.zeros_like(operand)
    for g, group in enumerate(groups):
        part = plan(20 + g, ranks=size)
        for f, p in zip(fields, part, strict=True):
            f[group] = p
        want[group] = slow(operand[group], output[group], part)
        bars[group] = slow_gradients(want[group], 96, part)[0]
    f = functools.partial(ragged_all_to_all, axis_name="x", axis_index_groups=groups)
    np.testing.assert_array_equal(mapped(f)(operand, output, *fields), want)

    def loss(*args):
        return (f(*args) ** 2).sum() / 2

    got = mapped(jax.grad(loss))(operand, output, *fields)
    np.testing.assert_array_equal(got, bars)


def test_two_axes_taken_together_and_a_sub_axis():
    both = make_mesh((2, 4), ("a", "b"))
    operand, output = values(0, 8, 96, 24), values(1, 8, 160, 24)
    fields = plan(30, ranks=8)
    f = functools.partial(ragged_all_to_all, axis_name=("a", "b"))
    np.testing.assert_array_equal(
        mapped(f, both)(operand, output, *fields), slow(operand, output, fields)
    )
    swapped = functools.partial(ragged_all_to_all, axis_name=("b", "a"))
    order = np.arange(8).reshape(2, 4).T.reshape(-1)  # device of each rank
    got = np.asarray(
        mapped(swapped, both)(
            *(x[np.argsort(order)] for x in (operand, output, *fields))
        )
    )
    np.testing.assert_array_equal(got[order], slow(operand, output, fields))

    halves = [plan(31), plan(32)]
    fields = [np.concatenate(f) for f in zip(*halves, strict=True)]
    sub = functools.partial(ragged_all_to_all, axis_name="b")
    got = mapped(sub, both)(operand, output, *fields)
    for i, part in enumerate(halves):
        rows = slice(i * 4, i * 4 + 4)
        np.testing.assert_array_equal(
            got[rows], slow(operand[rows], output[rows], part)
        )


def test_devices_in_another_order_than_their_ids():
    reversed_ = make_mesh(is_reversed=True)
    fields = plan(33)
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)
    got = mapped(call, reversed_)(operand, output, *fields)
    np.testing.assert_array_equal(got, slow(operand, output, fields))


def test_an_axis_of_vmap_takes_plain_collectives():
    fields = plan(34)
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)
    result = jax.vmap(call, axis_name="x")(operand, output, *fields)
    np.testing.assert_array_equal(result, slow(operand, output, fields))


def test_a_mesh_axis_left_to_the_compiler_takes_plain_collectives():
    both = make_mesh((4, 2), ("x", "auto"))
    fields = plan(35)
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)

    def per_rank(*args):
        return call(*(a[0] for a in args))[None]

    f = jax.shard_map(
        per_rank, mesh=both, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    got = jax.jit(f)(operand, output, *fields)
    np.testing.assert_array_equal(got, slow(operand, output, fields))


def test_replicated_arguments_and_constant_offsets():
    # Nothing but the operand varies over the mesh: check_vma must not object.
    operand = values(0, RANKS, 8, 64)
    sizes = jnp.full(RANKS, 2)

    def per_rank(operand):
        me = lax.axis_index("x")
        offsets = jnp.arange(RANKS) * 2
        out = jnp.zeros((8, 64))
        return call(operand, out, offsets, sizes, jnp.repeat(me * 2, RANKS), sizes)

    got = mapped(per_rank)(operand)
    want = operand.reshape(4, 4, 2, 64).transpose(1, 0, 2, 3).reshape(4, 8, 64)
    np.testing.assert_array_equal(got, want)


def test_the_compiled_program_holds_no_hidden_gather_of_rows():
    fields = plan(36)
    shapes = [(RANKS, 96, 640), (RANKS, 160, 640)]
    args = [np.zeros(s, np.float32) for s in shapes] + fields
    spec = NamedSharding(make_mesh(), P("x"))
    f = jax.shard_map(
        lambda *a: call(*(x[0] for x in a))[None],
        mesh=make_mesh(),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    text = (
        jax.jit(f).lower(*(jax.device_put(a, spec) for a in args)).compile().as_text()
    )
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(gathers) == 1
    assert "s32" in gathers[0]
    assert text.count('custom_call_target="turbobus_ragged_all_to_all"') == 1
