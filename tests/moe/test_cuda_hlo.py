"""Exchanges compiled for GPUs, without one: what XLA makes of them."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cuda_layers import compiled, in_chunks


def layer(num_chunks):
    def linear(rows, params):
        return jnp.einsum("ech,eho->eco", rows, params)

    return functools.partial(in_chunks, num_chunks=num_chunks, experts=linear)


MATMUL = re.compile(r"calls=%\S*gemm_fusion|custom_call_target=\"__cublas")


def order(hlo):
    """The exchange halves and matmuls of each computation, as they are scheduled."""
    found = []
    for line in hlo.splitlines():
        target = re.search(r'custom_call_target="turbobus_moe_(\w+)"', line)
        if target:
            found.append(target[1])
        elif MATMUL.search(line):
            found.append("experts")
    return found


def operands_in(text):
    return re.sub(r"/\*.*?\*/", "", text).split(", ")


def assert_untouched_between(hlo):
    """What a start returned gets to its finish through nothing that copies."""
    definitions = dict(re.findall(r"^\s*(?:ROOT )?(%\S+) = (.*)$", hlo, re.M))

    def source(name):
        text = definitions[name]
        match = re.search(r" get-tuple-element\((%\S+)\), index=(\d+)", text)
        if match is None:
            return text
        of = definitions[match[1]]
        ties = re.search(r" (?:tuple|opt-barrier)\((.*?)\)", of)
        if ties is None:
            return of
        operands = operands_in(ties[1])
        if " opt-barrier(" in of:
            return source_of_tuple(operands[0], int(match[2]))
        return source(operands[int(match[2])])

    def source_of_tuple(name, index):
        operands = operands_in(re.search(r" tuple\((.*?)\)", definitions[name])[1])
        return source(operands[index])

    calls = hlo.calls("turbobus_moe_finish")
    for call in calls:
        first = re.search(r"custom-call\((%[^,)]+)", call)[1]
        assert '_start"' in source(first), f"{source(first)} is no start"
    return len(calls)


def test_exchanges_run_beside_the_experts_of_other_chunks(cuda):
    hlo = compiled(cuda, layer(num_chunks=3))
    assert order(hlo)[:3] == ["dispatch", "dispatch_start", "experts"]
    assert sorted(order_between(hlo, 1)) == [
        "combine_start",
        "dispatch_start",
        "finish",
    ]
    assert sorted(order_between(hlo, 2)) == ["combine_start", "finish", "finish"]
    assert sorted(order_between(hlo, 3)) == ["combine", "finish"]
    assert "partition-id" not in hlo
    assert assert_untouched_between(hlo) == 4


def order_between(hlo, after):
    """What stands between the experts of two chunks."""
    found = order(hlo)
    at = [i for i, name in enumerate(found) if name == "experts"] + [len(found)]
    return found[at[after - 1] + 1 : at[after]]


def test_one_chunk_is_two_whole_exchanges(cuda):
    hlo = compiled(cuda, layer(num_chunks=1))
    assert order(hlo) == ["dispatch", "experts", "combine"]
    # No kernels for keys and ranks, which GPUs know without.
    assert "partition-id" not in hlo
    (call,) = hlo.calls("turbobus_moe_dispatch")
    operands = re.search(r"custom-call\(([^)]*)\)", call)[1].split(", ")
    assert len(operands) == 2


def test_a_loop_calls_each_exchange_once(cuda):
    """XLA would take calls into fusions with slices, and call them outside, too."""
    one = layer(num_chunks=1)

    def gradients(tokens, ids, weights, params):
        def body(x, params):
            return x + one(x, ids, weights, params), None

        def loss(tokens, params):
            return (jax.lax.scan(body, tokens, params)[0] ** 2).sum()

        return jax.grad(loss, (0, 1))(tokens, params)

    hlo = compiled(cuda, gradients, depth=3)
    targets = ("dispatch", "combine", "combine_grad", "dispatch_grad")
    assert hlo.counts() == {f"turbobus_moe_{name}": 1 for name in targets}
    for body in hlo.split("\n}"):
        is_fused = "%dynamic-slice-fusion" in body.split("{")[0]
        assert not (is_fused and "turbobus" in body)


@pytest.mark.parametrize("depth", [None, 3])
def test_gradients_run_beside_the_experts_too(cuda, depth):
    one = layer(num_chunks=3)

    def loss(tokens, ids, weights, params):
        if depth is None:
            return (one(tokens, ids, weights, params) ** 2).sum()

        def body(x, params):
            # The tokens are the same in every step: a start must not leave the loop.
            return x + one(tokens, ids, weights, params), None

        return (jax.lax.scan(body, tokens, params)[0] ** 2).sum()

    def gradients(*args):
        tokens, weights, params = jax.grad(loss, (0, 2, 3))(*args)
        return tokens, weights, params

    hlo = compiled(cuda, gradients, depth=depth)
    found = order(hlo)
    for name in ("dispatch_grad_start", "combine_grad_start"):
        assert found.count(name) == 2
    if depth is None:  # Of the experts; their parameters' gradients come last.
        assert under_way(found)[:6] == [1, 2, 1, 1, 2, 1]
    else:
        loops = [order(text) for text in hlo.split("\n}")]
        (forward,) = (names for names in loops if "combine" in names)
        assert under_way(forward) == [1, 2, 1]
        # Here parameters' gradients are anywhere.
        (back,) = (names for names in loops if "combine_grad" in names)
        assert max(under_way(back)) == 2
    assert assert_untouched_between(hlo) == found.count("finish") == 8


def under_way(found):
    """How many exchanges have been started and not finished at each of the experts."""
    counts, count = [], 0
    for name in found:
        count += name.endswith("_start")
        count -= name == "finish"
        if name == "experts":
            counts.append(count)
    return counts
