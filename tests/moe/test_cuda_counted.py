"""Exchanges whose host knows from a dispatch how many rows there are.

The program must say of which exchanges that is so: of those, and of no others. And
XLA must give them the very slots that the dispatch wrote, or they know nothing.
"""

import dataclasses
import re

import jax
import pytest
from cuda_layers import (
    CAPACITY,
    E,
    compiled,
    experts,
    gradients,
    in_chunks,
    in_loop,
    on_mesh_of,
)
from hlo_buffers import computations

from jax_turbobus import moe
from jax_turbobus.moe import _devices

# Of an exchange's operands: its slots.
SLOTS = {"combine": 2, "combine_grad": 3, "dispatch_grad": 2}
# What counted a dispatch early.
EARLY = 2


def dispatch(tokens, ids, weights):
    return moe.dispatch(
        tokens, ids, weights, num_experts=E, axis_name="x", expert_capacity=CAPACITY
    )


def layer(tokens, ids, weights, params):
    rows, _, state = dispatch(tokens, ids, weights)
    return moe.combine(experts(rows, params), state)


def in_remat(*args):
    return jax.checkpoint(layer)(*args)


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
                    assert_known(one, call, name)
    return found


def assert_known(one, call, name):
    """An earlier call has counted these slots, which are in the very same buffer."""
    made_by, result = written_by(one, call, SLOTS[name])
    if made_by in one.calls(r"turbobus_moe_dispatch(?:_start)?"):
        assert result == 3, one.definitions[made_by]
        return
    (other,) = one.calls("turbobus_moe_combine_grad")
    assert written_by(one, other, SLOTS["combine_grad"]) == (made_by, result)
    order = list(one.definitions)
    assert order.index(other) < order.index(call)


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
        (in_loop(layer), {"combine": (1, 1)}),
        (gradients(in_loop(in_remat)), {**ALL, "combine": (1, 1)}),
        (in_chunks, {"combine": (3, 3)}),
        (gradients(in_chunks), dict.fromkeys(ALL, (3, 3))),
        # What was counted in one loop is not known in another: it is counted once more.
        (
            gradients(in_loop(layer)),
            {"combine": (1, 1), "combine_grad": (0, 1), "dispatch_grad": (1, 1)},
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


def test_gradients_of_a_mapped_layer_count_once(cuda):
    hlo = compiled(cuda, gradients(on_mesh_of(cuda, layer)), is_mapped=True)
    expected = {"combine": (1, 1), "combine_grad": (0, 1), "dispatch_grad": (1, 1)}
    assert counted(hlo) == expected


@pytest.fixture
def apart(cuda, monkeypatch):
    """A compiler for GPUs that do not reach each other's memory."""
    monkeypatch.setattr(_devices, "why_through_host", lambda ctx: "a test says so")
    return cuda


def starts(hlo):
    """How many dispatches are started, and of those how many were counted early."""
    known, total = 0, 0
    for one in computations(hlo):
        for call, text in one.calls("turbobus_moe_dispatch_start").items():
            total += 1
            if "is_counted = true" in text:
                known += 1
                maker, index = one.source(one.operands(call)[EARLY])
                assert maker in one.calls("turbobus_moe_count")
                # By the same ids, in the very buffer.
                ids = one.operands(maker)[index]
                assert one.source(ids) == one.source(one.operands(call)[1])
    return known, total


@pytest.mark.parametrize(
    "f",
    [
        in_chunks,
        gradients(in_chunks),
        in_loop(in_chunks),
        gradients(in_loop(in_chunks)),
        lambda *args: jax.checkpoint(in_chunks)(*args),
    ],
    ids=["layer", "gradients", "loop", "gradients of a loop", "remat"],
)
def test_chunks_are_counted_before_the_first_experts(apart, f):
    hlo = compiled(apart, f)
    assert starts(hlo) == (2, 2)
    assert hlo.counts()["turbobus_moe_count"] == 2
    (called,) = (
        re.findall(r'custom_call_target="turbobus_moe_(\w+)"', text)
        for text in hlo.split("\n}")
        if "turbobus_moe_count" in text
    )
    # The second chunk's count is what the first dispatch would have to wait for.
    assert called[:4] == ["count", "dispatch", "count", "dispatch_start"]


def test_two_layers_of_the_same_ids_are_counted_each(apart):
    def twice(*args):
        return in_chunks(*args) + 2 * in_chunks(*args)

    assert starts(compiled(apart, twice)) == (4, 4)


def test_nothing_is_counted_early_where_no_host_waits(cuda):
    hlo = compiled(cuda, in_chunks)
    assert "turbobus_moe_count" not in hlo.counts()
    assert starts(hlo) == (0, 2)
