"""Whole programs: an optimizer step, transfers beside compute, streamed layers."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_turbobus as tb
from jax_turbobus.bench._report import Row, alternate
from jax_turbobus.bench.offload_gpu._setup import (
    DEVICE,
    GIB,
    HOST,
    MIB,
    Setup,
    check,
    in_a_row,
    incoming,
    rate,
    speedup,
)

__all__ = ["adam", "beside_matmuls", "layers"]


def adam(setup: Setup) -> Iterator[Row]:
    """4 GiB of Adam state in and out, leaf by leaf."""
    leaves, size = 16, 128 * MIB
    state = [
        [setup.host(size) for _ in range(leaves)] for _ in range(2)
    ]  # first and second moments
    grads = [setup.device(size) for _ in range(leaves)]

    def update(m: Any, v: Any, g: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return m, v, g * 1e-3 + m / (jnp.sqrt(v) + 1e-8)

    def ours(state: Any, grads: Any) -> Any:
        (ms, vs), steps = state, []
        out_m, out_v = [], []
        here = [tb.to_device(ms[0]), tb.to_device(vs[0])]
        leaving: Any = ()
        room: Any = ()
        for i in range(leaves):
            following = [ms[i + 1], vs[i + 1]] if i + 1 < leaves else []
            (m, v, step), came, gone = tb.overlap(
                update, *here, grads[i], fetch=following, offload=leaving, out=room
            )
            if i:
                out_m.append(gone[0])
                out_v.append(gone[1])
            steps.append(step)
            here, leaving, room = came, (m, v), (ms[i], vs[i])
        out_m.append(tb.to_host(leaving[0], out=room[0]))
        out_v.append(tb.to_host(leaving[1], out=room[1]))
        return [out_m, out_v], steps

    def peer(state: Any, grads: Any) -> Any:
        (ms, vs), steps = state, []
        out: Any = ([], [])
        for m, v, g in zip(ms, vs, grads, strict=True):
            m, v, step = update(jax.device_put(m, DEVICE), jax.device_put(v, DEVICE), g)
            out[0].append(jax.device_put(m, HOST))
            out[1].append(jax.device_put(v, HOST))
            steps.append(step)
        return [out[0], out[1]], steps

    where = (setup.sharding(0, "pinned_host"), setup.sharding(0, "device"))
    programs = {
        name: jax.jit(f, donate_argnums=0, out_shardings=where)
        for name, f in (("ours", ours), ("peer", peer))
    }
    states = {
        name: jax.tree.map(lambda x: jax.device_put(np.asarray(x), where[0]), state)
        for name in programs
    }
    del state

    def step(name: str) -> None:
        states[name], _ = jax.block_until_ready(programs[name](states[name], grads))

    for name in programs:
        step(name)
    for a, b in zip(*map(jax.tree.leaves, states.values()), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    times = alternate(
        {name: functools.partial(step, name) for name in programs},
        rounds=max(setup.rounds // 2, 3),
    )
    yield rate("Adam state, 4 GiB in and out", 4 * leaves * size, times, ">= 1.7")


def beside_matmuls(setup: Setup) -> Iterator[Row]:
    """A 1 GiB fetch beside matmuls."""
    n = 16384 if setup.shrink == 1 else 256
    a = jax.device_put(
        (np.random.default_rng(1).random((n, n), np.float32) * 0.01).astype(
            jnp.bfloat16
        ),
        setup.sharding(0, "device"),
    )
    h = setup.host(GIB)
    square = jax.jit(lambda a: a @ a)
    alone_in, _ = incoming(setup)
    ours = jax.jit(lambda a, h: tb.overlap(lambda a: a @ a, a, fetch=h)[:2])
    peer = jax.jit(lambda a, h: (a @ a, jax.device_put(h, DEVICE)))
    check(ours(a, h)[1], h)
    for count, name in ((8, "8 calls in a row"), (1, "a single call")):
        times = alternate(
            {
                "matmul": in_a_row(lambda: square(a), count),
                "fetch": in_a_row(lambda: alone_in(h), count),
                "ours": in_a_row(lambda: ours(a, h), count),
                "peer": in_a_row(lambda: peer(a, h), count),
            },
            rounds=setup.rounds,
        )
        longer = max(times["matmul"].median, times["fetch"].median)
        yield Row.make(
            f"1 GiB fetch in overlap beside a matmul, {name}",
            "ms a call",
            times["ours"].median * 1e3 / count,
            peer=longer * 1e3 / count,
            peer_name="the longer of the two alone",
            required="<= 1.05" if count > 1 else None,
        )
        yield speedup(
            f"1 GiB fetch in overlap beside a matmul, {name}, program",
            times["ours"].median / count,
            times["peer"].median / count,
            ">= 1.7" if count > 1 else None,
        )


def layers(setup: Setup) -> Iterator[Row]:
    """scan_layers with compute of half the plain fetch time."""
    layers = 16 if setup.shrink == 1 else 4
    d, batch = (16384, 6144) if setup.shrink == 1 else (128, 64)
    row = (np.random.default_rng(2).random((d, d), np.float32) * 2 - 1) / np.sqrt(d)
    w = np.broadcast_to(row.astype(jnp.bfloat16), (layers, d, d))
    stack = jax.device_put(w, setup.sharding(0, "pinned_host"))
    x = jax.device_put(
        np.ones((batch, d), np.float32).astype(jnp.bfloat16),
        setup.sharding(0, "device"),
    )
    size = layers * d * d * 2

    def f(layer: Any, x: Any) -> Any:
        return x @ layer

    def plain(stack: Any, x: Any) -> Any:
        def body(x: Any, i: Any) -> Any:
            row = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
            return f(jax.device_put(row, DEVICE), x), None

        return jax.lax.scan(body, x, jnp.arange(layers, dtype=jnp.int32))[0]

    ours = jax.jit(lambda s, x: tb.scan_layers(f, s, x))
    peer = jax.jit(plain)
    np.testing.assert_allclose(
        np.asarray(ours(stack, x), np.float32),
        np.asarray(peer(stack, x), np.float32),
        rtol=2e-2,
        atol=1e-3,
    )
    times = alternate(
        {
            "ours": lambda: ours(stack, x).block_until_ready(),
            "peer": lambda: peer(stack, x).block_until_ready(),
        },
        rounds=max(setup.rounds // 2, 3),
    )
    yield rate("scan_layers forward, 16 x 512 MiB", size, times, ">= 1.8")

    def train(run: Callable[..., Any]) -> Any:
        def loss(stack: Any, x: Any) -> Any:
            return jnp.sum(run(stack, x).astype(jnp.float32)) * 1e-3

        return jax.jit(
            jax.grad(loss),
            out_shardings=setup.sharding(0, "pinned_host"),
        )

    def plain_xs(stack: Any, x: Any) -> Any:
        def body(x: Any, layer: Any) -> Any:
            return f(jax.device_put(layer, DEVICE), x), None

        return jax.lax.scan(jax.checkpoint(body), x, stack)[0]

    ours, peer = train(lambda s, x: tb.scan_layers(f, s, x)), train(plain_xs)
    np.testing.assert_allclose(
        np.asarray(ours(stack, x)[0], np.float32),
        np.asarray(peer(stack, x)[0], np.float32),
        rtol=5e-2,
        atol=1e-2,
    )
    times = alternate(
        {
            "ours": lambda: ours(stack, x).block_until_ready(),
            "peer": lambda: peer(stack, x).block_until_ready(),
        },
        rounds=3,
    )
    yield rate("scan_layers training step, 16 x 512 MiB", 3 * size, times, ">= 1.6")
