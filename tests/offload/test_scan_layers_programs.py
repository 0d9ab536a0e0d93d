"""Programs around scan_layers: meshes, remat, no jit, and what one compiles to."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_stacks import (
    OFFLOAD_INPUTS,
    WIDTH,
    assert_close,
    layer,
    layers,
    reference,
    squared,
    values,
)

import jax_turbobus as tb


@OFFLOAD_INPUTS
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_layers(axis_type, offload_inputs):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    stack, x = values(5, WIDTH, WIDTH, scale=1 / 6), values(8, WIDTH, seed=9)
    sharding = NamedSharding(mesh, P(None, None, "y"))

    def f(w, x):
        y = jnp.dot(x, w, out_sharding=P("x", "y") if explicit else None)
        y = jnp.tanh(y)
        return jax.sharding.reshard(y, P("x", None)) if explicit else y

    explicit = axis_type == AxisType.Explicit

    def run(scan, f, stack, x):
        return (scan(f, stack, x) ** 2).sum()

    with jax.set_mesh(mesh):
        host = tb.to_host(jax.device_put(stack, sharding))
        xs = jax.device_put(x, NamedSharding(mesh, P("x", None)))
        scan = functools.partial(tb.scan_layers, offload_inputs=offload_inputs)
        grad = jax.jit(jax.grad(functools.partial(run, scan, f), argnums=(0, 1)))
        compiled = grad.lower(host, xs).compile()
        dstack, dx = compiled(host, xs)
    # Nowhere is there a whole stack, or one that is split otherwise.
    shapes = set(re.findall(r"f32\[5,\d+,\d+\]", compiled.as_text()))
    assert shapes == {f"f32[5,{WIDTH},{WIDTH // 4}]"}
    assert dstack.sharding.is_equivalent_to(host.sharding, 3)
    plain = functools.partial(run, reference, lambda w, x: jnp.tanh(x @ w))
    assert_close((dstack, dx), jax.grad(plain, argnums=(0, 1))(stack, x))


@pytest.mark.parametrize(
    ("kind", "offload_inputs"),
    [("pinned_host", False), ("pinned_host", True), ("device", True)],
)
def test_inside_shard_map(kind, offload_inputs):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    stack, x = values(5, WIDTH, WIDTH, scale=1 / 6), values(16, WIDTH, seed=9)
    placed = jax.device_put(stack, NamedSharding(mesh, P(), memory_kind=kind))

    def f(w, x):
        y = jnp.tanh(x @ w)
        return y + jax.lax.pmean(y, "x")

    mapped = jax.shard_map(
        functools.partial(tb.scan_layers, f, offload_inputs=offload_inputs),
        mesh=mesh,
        in_specs=(P(), P("x")),
        out_specs=P("x"),
        check_vma=True,
    )

    def theirs(w, x):
        y = jnp.tanh(x @ w)
        return y + jnp.tile(y.reshape(8, 2, WIDTH).mean(0), (8, 1))

    ours = jax.jit(jax.grad(lambda s, x: (mapped(s, x) ** 2).sum(), argnums=(0, 1)))
    plain = jax.grad(lambda s, x: (reference(theirs, s, x) ** 2).sum(), argnums=(0, 1))
    dstack, dx = ours(placed, jax.device_put(x, NamedSharding(mesh, P("x"))))
    assert dstack.sharding.memory_kind == kind
    assert_close((dstack, dx), plain(stack, x))


def test_a_layer_may_itself_be_rematerialized():
    stack, x = layers(4), values(8, WIDTH, seed=9)
    ours = jax.grad(
        lambda x: (tb.scan_layers(jax.checkpoint(layer), tb.to_host(stack), x)).sum()
    )(x)
    assert_close(ours, jax.grad(lambda x: reference(layer, stack, x).sum())(x))


def test_without_compilation():
    stack, xs = values(3, 8, 8, scale=1 / 3), values(2, 3, 8, seed=9)
    host = tb.to_host(stack)
    with jax.disable_jit():
        result = tb.scan_layers(lambda w, x: jnp.tanh(x @ w), host, xs[0])
        grads = jax.vmap(jax.grad(functools.partial(squared, tb.scan_layers), (0, 1)))
        grads = grads(tb.to_host(jnp.stack([stack, stack])), xs)
        both = tb.overlap(
            jnp.sin,
            xs,
            fetch=host,
            offload=(xs, xs),
            out=(tb.to_host(jnp.zeros_like(xs)), tb.to_host(jnp.zeros_like(xs))),
        )
    assert_close(result, reference(lambda w, x: jnp.tanh(x @ w), stack, xs[0]))
    plain = jax.vmap(jax.grad(functools.partial(squared, reference), (0, 1)), (None, 0))
    assert_close(grads, plain(stack, xs))
    assert_close(both, (jnp.sin(xs), stack, (xs, xs)))
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(both)]
    assert kinds == ["device", "device", "pinned_host", "pinned_host"]


def test_second_call_with_other_shapes():
    def f(w, x):
        return jnp.tanh(x @ w)

    for width in (16, 24):
        stack, x = values(3, width, width, scale=0.2), values(8, width, seed=9)
        assert_close(tb.scan_layers(f, tb.to_host(stack), x), reference(f, stack, x))


def sends(w, x):
    """A layer that is at work where no core is: on the links' other direction."""
    return jnp.tanh(tb.to_device(tb.to_host(x)) @ w)


def test_each_row_is_fetched_once_forward_and_beside_a_layer():
    """On emulated links: the bytes that moved, and which of them at the same time."""
    num_layers, width = 6, 256
    stack = values(num_layers, width, width, scale=1 / 16)  # 256 KiB a layer
    host, x = tb.to_host(stack), values(width, width, seed=9)
    run = jax.jit(functools.partial(tb.scan_layers, sends))
    # 256 KiB take 20 ms.
    scale = (256 << 10) / 0.02 / 55e9
    with tb.configured(topology="2xh200", pooled=False, emulate=True, rate_scale=scale):
        result = run(host, x)
        assert_close(result, reference(lambda w, x: jnp.tanh(x @ w), stack, x))
        stats = tb.stats()
    assert stats.num_completed_bytes == 3 * stack.nbytes
    fetches, sent = [], []
    for one in stats.recent_transfers:
        (sent if one.direction == "d2h" else fetches).append(one)
    # Each layer sends x first of all, while the next layer comes in.
    num_beside = sum(
        any(
            f.submitted_ns < s.ended_ns and s.submitted_ns < f.ended_ns for f in fetches
        )
        for s in sent
    )
    assert len(sent) == num_layers
    assert num_beside == num_layers - 1


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "backward"])
def test_the_loop_starts_computes_and_ends_in_this_order(differentiated):
    """As XLA:CPU orders it and gives out memory: what its concurrency rests on."""
    host, x = tb.to_host(values(4, WIDTH, WIDTH)), values(8, WIDTH, seed=9)

    def run(stack, x):
        return tb.scan_layers(sends, stack, x).sum()

    run = jax.grad(run, argnums=(0, 1)) if differentiated else run
    hlo = jax.jit(run).lower(host, x).compile().as_text()
    assert "is_scheduled=true" in hlo
    bodies = [
        body
        for body in hlo[: hlo.index("\nENTRY")].split("\n}")
        if '_start"' in body and '_done"' in body
    ]
    assert len(bodies) == 1 + differentiated
    for body in bodies:
        start, compute, done = (
            [match.start() for match in re.finditer(target, body)]
            for target in ('_start"', 'turbobus_d2h_new"', '_done"')
        )
        assert max(start) < min(compute)
        assert max(compute) < min(done)
