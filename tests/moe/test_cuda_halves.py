"""Halves of exchanges in programs for GPUs, whatever JAX has made of the layer.

A start has one finish, which gets its results and keeps all that it reads: the same
buffers, through nothing that copies.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


class Computation:
    """The definitions of a computation, and which buffer a value of it is."""

    def __init__(self, text):
        found = re.findall(r"^\s*(ROOT )?(%\S+) = (.*)$", text, re.M)
        self.definitions = {name: definition for _, name, definition in found}
        self.roots = [name for root, name, _ in found if root]

    def calls(self, target):
        pattern = rf'custom_call_target="{target}"'
        return {n: d for n, d in self.definitions.items() if re.search(pattern, d)}

    def operands(self, name):
        (text,) = re.findall(r" [\w-]+\((%.*?)\)(?:,|$)", self.definitions[name])[:1]
        return re.sub(r"/\*.*?\*/", "", text).split(", ")

    def source(self, name):
        """What makes a buffer: an instruction, and which of its results."""
        text = self.definitions[name]
        part = re.search(r" get-tuple-element\((%\S+)\), index=(\d+)", text)
        if part:
            return self._part(part[1], int(part[2]))
        if re.search(r" (opt-barrier|bitcast)\(", text):
            return self.source(self.operands(name)[0])
        return name, 0

    def _part(self, of, index):
        text = self.definitions[of]
        if " opt-barrier(" in text:
            return self._part(self.operands(of)[0], index)
        if " tuple(" in text:
            return self.source(self.operands(of)[index])
        return of, index

    def buffers(self, name):
        """The buffers that an instruction reads, those of its tuples too."""
        found = []
        for x in self.operands(name):
            is_tuple = " tuple(" in self.definitions[x]
            found += self.buffers(x) if is_tuple else [self.source(x)]
        return found

    def touching(self, made):
        """What reads a buffer of instructions `made`, or returns it."""
        names = [
            name
            for name, text in self.definitions.items()
            if re.search(r" [\w-]+\(%", text)
            and not re.search(r" (tuple|get-tuple-element|opt-barrier)\(", text)
        ]
        return {
            name
            for name in {*names, *self.roots}
            if any(of in made for of, _ in self.buffers(name))
        }


def num_exchanges_kept(hlo):
    """Returns how many exchanges are in halves, all of them as they must be."""
    count = 0
    for text in re.split(r"^}", hlo, flags=re.M):
        one = Computation(text)
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
