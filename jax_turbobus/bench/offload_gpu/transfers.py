"""Plain transfers: one way, both ways, several GPUs, rows in a scan."""

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
    KIB,
    MIB,
    Outgoing,
    Setup,
    check,
    incoming,
    rate,
    size_name,
)

__all__ = ["both_ways", "fetch", "one_way", "two_gpus"]


_SIZES = (
    (4 * KIB, 1.0),
    (64 * KIB, 1.0),
    (1 * MIB, 1.0),
    (4 * MIB, 1.0),
    (8 * MIB, 1.0),
    (16 * MIB, 1.3),
    (32 * MIB, 1.5),
    (64 * MIB, 1.7),
    (256 * MIB, 1.85),
    (1 * GIB, 1.95),
    (4 * GIB, 1.95),
)


def one_way(setup: Setup) -> Iterator[Row]:
    """H2D and D2H of one GPU, the others idle.

    From 32 MiB to 1 GiB, four calls are made in a row and waited for once, as a program
    that does not look at every result would: a host thread that sleeps through a
    long transfer wakes up to a millisecond late, whoever's transfer it is. The time
    of a single call is there as well.
    """
    for size, least in _SIZES:
        h = setup.host(size)
        ours, peer = incoming(setup)
        check(ours(h), h)
        yield from _rates(setup, f"h2d {size_name(size)}", size, least, ours, peer, h)
        x = ours(h)
        del h
        out = Outgoing(setup, x)
        check(out.ours(), x)
        yield from _rates(
            setup,
            f"d2h {size_name(size)}",
            size,
            least,
            lambda _, out=out: out.start_ours(),  # type: ignore[misc]
            lambda _, out=out: out.start_peer(),  # type: ignore[misc]
            x,
        )


def _rates(
    setup: Setup,
    case: str,
    size: int,
    least: float,
    ours: Callable[[Any], Any],
    peer: Callable[[Any], Any],
    x: Any,
) -> Iterator[Row]:
    def calls(program: Callable[[Any], Any], count: int) -> Callable[[], Any]:
        def run() -> Any:
            results = [program(x) for _ in range(count)]
            return results[-1].block_until_ready()

        return run

    in_a_row = 4 if 32 * MIB <= size <= GIB else 1
    for count in sorted({in_a_row, 1}, reverse=True):
        times = alternate(
            {"ours": calls(ours, count), "peer": calls(peer, count)},
            rounds=setup.rounds_for(size),
        )
        yield rate(
            case if count == in_a_row else f"{case}, a single call",
            count * size,
            times,
            f">= {least}" if count == in_a_row else None,
        )


def both_ways(setup: Setup) -> Iterator[Row]:
    """H2D and D2H of one GPU at once."""
    h, x = setup.host(GIB), setup.device(GIB)
    outs = [
        jax.device_put(np.zeros(x.shape, x.dtype), setup.sharding(0, "pinned_host"))
    ]
    token = jnp.zeros(8)

    @functools.partial(
        jax.jit,
        donate_argnums=2,
        out_shardings=(setup.sharding(0, "pinned_host"), setup.sharding(0, "device")),
    )
    def ours(h: Any, x: Any, out: Any) -> Any:
        _, came, went = tb.overlap(lambda t: t + 1, token, fetch=h, offload=x, out=out)
        # What `out` becomes comes first: JAX gives a donated buffer to the first
        # result of its shape, whatever memory that is in.
        return went, came

    peer = jax.jit(
        lambda h, x: (jax.device_put(h, DEVICE), jax.device_put(x, HOST)),
        out_shardings=(setup.sharding(0, "device"), setup.sharding(0, "pinned_host")),
    )

    def run_ours() -> Any:
        outs[0], came = jax.block_until_ready(ours(h, x, outs[0]))
        return came

    check(run_ours(), h)
    check(outs[0], x)
    times = alternate(
        {"ours": run_ours, "peer": lambda: jax.block_until_ready(peer(h, x))},
        rounds=setup.rounds,
    )
    yield rate("h2d + d2h of one GPU at once, 1 GiB each", 2 * GIB, times, ">= 1.8")


def two_gpus(setup: Setup) -> Iterator[Row]:
    """Both GPUs at once: nothing to gain, and nothing may be lost."""
    if len(setup.devices) < 2:
        return
    hosts = [setup.host(GIB, i) for i in range(2)]
    programs = [incoming(setup, i) for i in range(2)]
    out = Outgoing(setup, setup.device(GIB, 1), 1)

    def same(which: int) -> Any:
        return jax.block_until_ready([programs[i][which](hosts[i]) for i in range(2)])

    times = alternate(
        {"ours": lambda: same(0), "peer": lambda: same(1)}, rounds=setup.rounds
    )
    yield rate("both GPUs h2d at once, 1 GiB each", 2 * GIB, times, ">= 0.98")
    times = alternate(
        {
            "ours": lambda: jax.block_until_ready(
                [programs[0][0](hosts[0]), out.start_ours()]
            ),
            "peer": lambda: jax.block_until_ready(
                [programs[0][1](hosts[0]), out.start_peer()]
            ),
        },
        rounds=setup.rounds,
    )
    yield rate("GPU 0 h2d, GPU 1 d2h at once, 1 GiB each", 2 * GIB, times, ">= 0.98")


def fetch(setup: Setup) -> Iterator[Row]:
    """Rows of a host stack in a scan."""
    layers, size = 8, 256 * MIB
    flat = setup.numbers(layers * size)
    stack = jax.device_put(flat.reshape(layers, -1), setup.sharding(0, "pinned_host"))

    def total(fetch: Callable[..., Any]) -> Any:
        def body(carry: Any, i: Any) -> Any:
            return carry + fetch(stack_of[0], i), None

        stack_of: list[Any] = [None]

        def program(stack: Any) -> Any:
            stack_of[0] = stack
            zeros = jnp.zeros(stack.shape[1:], stack.dtype)
            return jax.lax.scan(body, zeros, jnp.arange(layers, dtype=jnp.int32))[0]

        return jax.jit(program, out_shardings=setup.sharding(0, "device"))

    def slice_in_xla(stack: Any, i: Any) -> Any:
        row = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
        return jax.device_put(row, DEVICE)

    ours, peer = total(tb.fetch), total(slice_in_xla)
    check(ours(stack), peer(stack))
    times = alternate(
        {
            "ours": lambda: ours(stack).block_until_ready(),
            "peer": lambda: peer(stack).block_until_ready(),
        },
        rounds=setup.rounds,
    )
    yield rate("fetch of 8 x 256 MiB in a scan", layers * size, times, ">= 1.7")
