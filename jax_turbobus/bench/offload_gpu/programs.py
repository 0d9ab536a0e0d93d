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
    check_close,
    in_a_row,
    incoming,
    rate,
    speedup,
)

__all__ = ["adam", "beside_matmuls", "layers"]

_LAYERS = 16
# Of the largest value: both sides multiply the same numbers of bfloat16, but perhaps
# in another order.
_MOST_ERROR = 0.03


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
    product, came = ours(a, h)
    check(came, h)
    # Sums of 16384 products, which differ by a few hundredths from place to place.
    check_close(product, square(a), 0.01)
    del product, came
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
    stack, layer, x = _stack(setup)
    size = stack.nbytes

    def f(layer: Any, x: Any) -> Any:
        return x @ layer

    def plain(stack: Any, x: Any) -> Any:
        def body(x: Any, i: Any) -> Any:
            row = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
            return f(jax.device_put(row, DEVICE), x), None

        return jax.lax.scan(body, x, jnp.arange(_LAYERS, dtype=jnp.int32))[0]

    yield from _compute_and_fetch(setup, stack, layer, x, f)
    del layer
    ours = jax.jit(lambda s, x: tb.scan_layers(f, s, x))
    peer = jax.jit(plain)
    check_close(ours(stack, x), peer(stack, x), _MOST_ERROR)
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
    for a, b in zip(
        _some_rows(ours(stack, x)), _some_rows(peer(stack, x)), strict=True
    ):
        check_close(a, b, _MOST_ERROR)
    times = alternate(
        {
            "ours": lambda: ours(stack, x).block_until_ready(),
            "peer": lambda: peer(stack, x).block_until_ready(),
        },
        rounds=3,
    )
    yield rate("scan_layers training step, 16 x 512 MiB", 3 * size, times, ">= 1.6")


def _stack(setup: Setup) -> tuple[Any, Any, Any]:
    """Returns layers on the host, one on the device, and what goes into the first one.

    Every layer is another one, and values keep their size from layer to layer: sums of
    d products of numbers of variance 1 and 1 / d.
    """
    d, batch = (16384, 6144) if setup.shrink == 1 else (128, 64)
    rng = np.random.default_rng(2)
    row = (rng.random((d, d), np.float32) * 2 - 1) * np.sqrt(np.float32(3 / d))
    first = row.astype(jnp.bfloat16)
    del row
    stack = np.empty((_LAYERS, d, d), jnp.bfloat16)
    for i in range(_LAYERS):
        # Rows go round: what `np.roll` does, without a copy of its own.
        stack[i, i:], stack[i, :i] = first[: d - i], first[d - i :]
    x = (rng.random((batch, d), np.float32) * 2 - 1) * np.sqrt(np.float32(3))
    return (
        jax.device_put(stack, setup.sharding(0, "pinned_host")),
        jax.device_put(first, setup.sharding(0, "device")),
        jax.device_put(x.astype(jnp.bfloat16), setup.sharding(0, "device")),
    )


def _some_rows(stack: Any) -> list[Any]:
    """Returns the first row of a stack, the last one, and one in the middle.

    By way of numpy: nobody says what XLA makes of slices of host memory.
    """
    rows = np.asarray(stack)
    return [jax.device_put(rows[i]) for i in (0, len(rows) // 2, len(rows) - 1)]


def _compute_and_fetch(
    setup: Setup, stack: Any, layer: Any, x: Any, f: Callable[..., Any]
) -> Iterator[Row]:
    """Yields how long the layers' compute takes beside JAX's fetch of them, alone."""

    def compute(layer: Any, x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return f(layer, x), None

        return jax.lax.scan(body, x, length=_LAYERS)[0]

    def fetch(stack: Any) -> Any:
        def body(carry: Any, i: Any) -> Any:
            row = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
            return carry + jax.device_put(row, DEVICE), None

        zeros = jnp.zeros(stack.shape[1:], stack.dtype)
        return jax.lax.scan(body, zeros, jnp.arange(_LAYERS, dtype=jnp.int32))[0]

    run, come = (
        jax.jit(g, out_shardings=setup.sharding(0, "device")) for g in (compute, fetch)
    )
    times = alternate(
        {
            "compute": lambda: run(layer, x).block_until_ready(),
            "fetch": lambda: come(stack).block_until_ready(),
        },
        rounds=3,
        warmup=1,
    )
    yield Row.make(
        "scan_layers, 16 x 512 MiB: compute alone",
        "ms",
        times["compute"].median * 1e3,
        peer=times["fetch"].median * 1e3,
        peer_name="plain fetch alone",
        note="the case is about compute of half the plain fetch time",
    )
