"""Halves of exchanges in programs for GPUs, whatever JAX has made of the layer.

A start has one finish, which gets its results and keeps all that it reads: the same
buffers, through nothing that copies.
"""

import jax
import jax.numpy as jnp
import pytest
from cuda_layers import compiled, gradients, in_chunks, in_loop
from hlo_buffers import computations


def in_branch(tokens, ids, weights, params):
    is_on = jax.lax.psum(weights.sum(), "x") > 0
    return jax.lax.cond(is_on, in_chunks, lambda x, *_: x, tokens, ids, weights, params)


def twice(tokens, ids, weights, params):
    once = in_chunks(tokens, ids, weights, params)
    return once + 2 * in_chunks(tokens, ids, weights, params)


def second_derivatives(tokens, ids, weights, params):
    def slope(tokens, weights, params):
        grads = gradients(in_chunks)(tokens, ids, weights, params)
        return sum((g**2).sum() for g in grads)

    return jax.grad(slope, (0, 1, 2))(tokens, weights, params)


def mapped(tokens, ids, weights, params):
    stack = jnp.stack([tokens, 2 * tokens], 1)
    layers = jax.vmap(in_chunks, (1, None, None, None))
    return layers(stack, ids, weights, params).sum(0)


def num_exchanges_kept(hlo):
    """Returns how many exchanges are in halves, all of them as they must be."""
    count = 0
    for one in computations(hlo):
        starts = one.calls(r"turbobus_moe_\w+_start")
        finishes = one.calls("turbobus_moe_finish")
        if starts:
            assert one.touching(starts) == set(finishes)
        finished = []
        for finish in finishes:
            held = one.buffers(finish)
            start = held[0][0]
            assert start in starts, f"{one.definitions[start]} is no start"
            lost = set(one.buffers(start)) - set(held)
            assert not lost, [one.definitions[name] for name, _ in lost]
            finished.append(start)
        assert sorted(finished) == sorted(starts)
        count += len(starts)
    return count


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (gradients(in_loop(in_chunks)), 8),
        (gradients(in_branch), 8),
        (twice, 8),
        (second_derivatives, 12),
        # What `vmap` maps otherwise is copied, and nobody could keep the copies.
        (mapped, 0),
    ],
    ids=["loop", "branch", "twice", "second", "vmap"],
)
def test_what_a_start_reads_and_writes_stays_until_its_finish(cuda, f, expected):
    assert num_exchanges_kept(compiled(cuda, f)) == expected
