"""Halves of exchanges in programs for GPUs, whatever JAX has made of the layer.

A start has one finish, which gets its results and keeps all that it reads: the same
buffers, through nothing that copies.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_buffers import computations
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe

R, T, H, E, K = 2, 256, 512, 8, 2
CAPACITY = 64


def layer(tokens, ids, weights, params):
    return moe.expert_parallel(
        lambda rows, _: jnp.tanh(jnp.einsum("ech,eho->eco", rows, params)),
        tokens,
        ids,
        weights,
        num_experts=E,
        axis_name="x",
        expert_capacity=CAPACITY,
        num_chunks=3,
    )


def in_loop(tokens, ids, weights, params):
    def body(x, _):
        return x + layer(x, ids, weights, params), None

    return jax.lax.scan(body, tokens, length=3)[0]


def in_branch(tokens, ids, weights, params):
    is_on = jax.lax.psum(weights.sum(), "x") > 0
    return jax.lax.cond(is_on, layer, lambda x, *_: x, tokens, ids, weights, params)


def twice(tokens, ids, weights, params):
    once = layer(tokens, ids, weights, params)
    return once + 2 * layer(tokens, ids, weights, params)


def gradients(f):
    def run(tokens, ids, weights, params):
        def loss(tokens, weights, params):
            return (f(tokens, ids, weights, params) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(tokens, weights, params)

    return run


def second_derivatives(tokens, ids, weights, params):
    def slope(tokens, weights, params):
        grads = gradients(layer)(tokens, ids, weights, params)
        return sum((g**2).sum() for g in grads)

    return jax.grad(slope, (0, 1, 2))(tokens, weights, params)


def mapped(tokens, ids, weights, params):
    stack = jnp.stack([tokens, 2 * tokens], 1)
    return jax.vmap(layer, (1, None, None, None))(stack, ids, weights, params).sum(0)


def compiled(cuda, f):
    split = P("x")
    on_mesh = jax.shard_map(
        f, mesh=cuda.mesh_of(R), in_specs=(split,) * 4, out_specs=split
    )
    arguments = (
        cuda.device((R * T, H), spec=split),
        cuda.device((R * T, K), np.int32, spec=split),
        cuda.device((R * T, K), spec=split),
        cuda.device((E, H, H), spec=split),
    )
    return cuda.compile(on_mesh, *arguments, num_devices=R)


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
        (gradients(in_loop), 8),
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
