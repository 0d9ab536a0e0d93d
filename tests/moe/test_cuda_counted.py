"""Exchanges whose host knows from a dispatch how many rows there are.

The program must say of which exchanges that is so: of those, and of no others. And
XLA must give them the very slots that the dispatch wrote, or they know nothing.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_buffers import computations
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe

R, T, H, E, K = 2, 256, 512, 8, 2
CAPACITY = 64
# Of an exchange's operands: its slots.
SLOTS = {"combine": 2, "combine_grad": 3, "dispatch_grad": 2}


def experts(rows, params):
    return jnp.tanh(jnp.einsum("ech,eho->eco", rows, params))


def dispatch(tokens, ids, weights):
    return moe.dispatch(
        tokens, ids, weights, num_experts=E, axis_name="x", expert_capacity=CAPACITY
    )


def layer(tokens, ids, weights, params):
    rows, _, state = dispatch(tokens, ids, weights)
    return moe.combine(experts(rows, params), state)


def in_chunks(tokens, ids, weights, params):
    return moe.expert_parallel(
        lambda rows, _: experts(rows, params),
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


def in_remat(*args):
    return jax.checkpoint(layer)(*args)


def in_remat_loop(tokens, ids, weights, params):
    def body(x, _):
        return x + jax.checkpoint(layer)(x, ids, weights, params), None

    return jax.lax.scan(body, tokens, length=3)[0]


def of_other_ids(tokens, ids, weights, params):
    rows, _, state = dispatch(tokens, ids, weights)
    state = dataclasses.replace(state, expert_ids=(ids + 1) % E)
    return moe.combine(experts(rows, params), state)


def of_an_argument(tokens, ids, weights, params):
    rows, _, state = dispatch(tokens, ids, weights)
    # The same function, elsewhere, may get another state.
    return jax.jit(moe.combine)(experts(rows, params), state)


def around_a_loop(tokens, ids, weights, params):
    rows, _, state = dispatch(tokens, ids, weights)

    def body(carry, _):
        rows, state = carry
        sums = moe.combine(experts(rows, params), state)
        rows, _, state = dispatch(sums, ids, weights)
        return (rows, state), sums

    return jax.lax.scan(body, (rows, state), length=3)[1].sum(0)


def gradients(f):
    def run(tokens, ids, weights, params):
        def loss(tokens, weights, params):
            return (f(tokens, ids, weights, params) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(tokens, weights, params)

    return run


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


def counted(hlo):
    """How many exchanges of each name know their dispatch, and how many there are."""
    found = {}
    for one in computations(hlo):
        for name in SLOTS:
            for call, text in one.calls(rf"turbobus_moe_{name}(?:_start)?").items():
                (is_known,) = re.findall(r"is_counted = (true|false)", text)
                known, total = found.get(name, (0, 0))
                found[name] = (known + (is_known == "true"), total + 1)
                if is_known == "true":
                    made_by, result = written_by(one, call, SLOTS[name])
                    assert result == 3, one.definitions[made_by]
                    assert made_by in one.calls(r"turbobus_moe_dispatch(?:_start)?")
    return found


def written_by(one, call, index):
    """The exchange that wrote an operand: a finish hands on what its start wrote."""
    name, result = one.source(one.operands(call)[index])
    if name in one.calls("turbobus_moe_finish"):
        return written_by(one, name, result)
    return name, result


ALL = {"combine": (1, 1), "combine_grad": (1, 1), "dispatch_grad": (1, 1)}


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (layer, {"combine": (1, 1)}),
        (gradients(layer), ALL),
        (gradients(in_remat), ALL),
        (in_loop, {"combine": (1, 1)}),
        (gradients(in_remat_loop), {**ALL, "combine": (1, 1)}),
        (in_chunks, {"combine": (3, 3)}),
        (gradients(in_chunks), dict.fromkeys(ALL, (3, 3))),
        # What was counted in one loop is not known in another.
        (
            gradients(in_loop),
            {"combine": (1, 1), "combine_grad": (0, 1), "dispatch_grad": (0, 1)},
        ),
        (of_other_ids, {"combine": (0, 1)}),
        (of_an_argument, {"combine": (0, 1)}),
        (around_a_loop, {"combine": (0, 1)}),
    ],
    ids=[
        "layer",
        "gradients",
        "remat",
        "loop",
        "remat in a loop",
        "chunks",
        "gradients of chunks",
        "gradients of a loop",
        "other ids",
        "argument",
        "around a loop",
    ],
)
def test_what_follows_its_dispatch_is_counted(cuda, f, expected):
    assert counted(compiled(cuda, f)) == expected
