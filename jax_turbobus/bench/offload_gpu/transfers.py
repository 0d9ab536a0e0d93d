"""Plain transfers: one way, both ways, several GPUs, rows in a scan."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_turbobus as tb
from jax_turbobus import gpu
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
    in_a_row,
    incoming,
    needs_engine,
    needs_gpus,
    noise,
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


# What starts a transfer of ours, and one of JAX's.
_Pair = tuple[Callable[[], Any], Callable[[], Any]]
# Of these, ours is also made without host memory to write into.
_WITHOUT_OUT = (256 * MIB,)
_IN_A_ROW = 8
# Of what D2H calls write into in turn: more than any cache holds.
_MOST_OUT_BYTES = 2 * GIB


def one_way(setup: Setup) -> Iterator[Row]:
    """H2D and D2H of one GPU, the others idle.

    From 32 MiB to 1 GiB, eight calls are made in a row and waited for once, as a
    program that does not look at every result would: a host thread that sleeps through
    a long transfer wakes up to a millisecond late, whoever's transfer it is. The time
    of a single call is there as well. D2H calls in a row write into as many buffers in
    turn, as JAX's do: one of some MiB would stay in the CPU's cache.

    Where no gain is asked for, JAX's own transfer is measured twice, and ours may be
    slower by as much as the two differ.
    """
    for size, least in _SIZES:
        if not setup.least_bytes <= size <= setup.most_bytes:
            continue
        h = setup.host(size)
        ours, peer = incoming(setup)
        check(ours(h), h)

        def come(count: int, h: Any = h, ours: Any = ours, peer: Any = peer) -> _Pair:
            del count
            return lambda: ours(h), lambda: peer(h)

        yield from _rates(setup, f"h2d {size_name(size)}", size, least, come)
        x = ours(h)
        del h, come

        def go(count: int, x: Any = x, size: int = size) -> _Pair:
            count = max(1, min(count, _MOST_OUT_BYTES // size))
            out = Outgoing(setup, x, count=count)
            for _ in range(count):
                check(out.start_ours(), x)
            return out.start_ours, out.start_peer

        yield from _rates(setup, f"d2h {size_name(size)}", size, least, go)
        if size in _WITHOUT_OUT:
            yield from _without_out(setup, size, x)


def _rates(
    setup: Setup,
    case: str,
    size: int,
    least: float,
    programs: Callable[[int], _Pair],
) -> Iterator[Row]:
    """Yields rates of calls in a row and of single ones.

    Args:
      setup: what every case gets.
      case: what rows are called.
      size: bytes.
      least: what is asked of the ratio.
      programs: returns what starts ours and JAX's, of so many calls in a row.
    """
    most = _IN_A_ROW if 32 * MIB <= size <= GIB else 1
    for count in sorted({most, 1}, reverse=True):
        ours, peer = programs(count)
        functions = {"ours": in_a_row(ours, count), "peer": in_a_row(peer, count)}
        if least <= 1:
            functions["peer again"] = in_a_row(peer, count)
        times = alternate(functions, rounds=setup.rounds_for(count * size))
        if least <= 1:
            least = 1 - noise(times["peer"], times["peer again"])
        yield rate(
            f"{case}, {_calls(count)}",
            count * size,
            times,
            f">= {least:.4g}" if count == most else None,
        )


def _without_out(setup: Setup, size: int, x: Any) -> Iterator[Row]:
    """Yields the rate of D2H into host memory that is made in the program."""
    out = Outgoing(setup, x)
    check(out.start_without_out(), x)
    times = alternate(
        {
            "ours": in_a_row(out.start_without_out, _IN_A_ROW),
            "peer": in_a_row(out.start_peer, _IN_A_ROW),
        },
        rounds=setup.rounds_for(_IN_A_ROW * size),
    )
    yield rate(
        f"d2h {size_name(size)} without out, {_calls(_IN_A_ROW)}",
        _IN_A_ROW * size,
        times,
        None,
    )


def _calls(count: int) -> str:
    return "a single call" if count == 1 else f"{count} calls in a row"


def _both(
    case: str,
    size: int,
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    rounds: int,
    required: str,
) -> Iterator[Row]:
    """Several calls in a row, of which something is asked, and a single one."""
    for count in (4, 1):
        times = alternate(
            {"ours": in_a_row(ours, count), "peer": in_a_row(peer, count)},
            rounds=rounds,
        )
        yield rate(
            f"{case}, {_calls(count)}",
            count * size,
            times,
            required if count > 1 else None,
        )


def both_ways(setup: Setup) -> Iterator[Row]:
    """H2D and D2H of one GPU at once, and what the machine carries both ways."""
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

    def start_ours() -> Any:
        outs[0], came = ours(h, x, outs[0])
        return outs[0], came

    check(start_ours()[1], h)
    check(outs[0], x)
    yield from _both(
        "h2d + d2h of one GPU at once, 1 GiB each",
        2 * GIB,
        start_ours,
        lambda: peer(h, x),
        setup.rounds,
        ">= 1.8",
    )
    engine = gpu.engine()
    if engine is None:
        yield from needs_engine("bound of h2d + d2h")
        return
    own = engine.links(0)
    every = [i for g in range(len(setup.devices)) for i in engine.links(g)]
    block = engine.library.settings()["block_bytes"]

    def best(links: list[int]) -> float:
        # All copy the same number of bytes: the slowest one says when all is over.
        size = 512 * MIB // setup.shrink
        return len(links) * float(
            max(min(engine.library.measure(links, size, block)) for _ in range(3))
        )

    yield Row.make(
        "bound of h2d + d2h: plain copies both ways over all links, each GPU's own",
        "GB/s",
        best(every) / 1e9,
        peer=best(own) / 1e9,
        peer_name="over one GPU's link",
    )


def two_gpus(setup: Setup) -> Iterator[Row]:
    """Both GPUs at once: nothing to gain, and nothing may be lost."""
    yield from needs_gpus(setup, "both GPUs at once")
    if len(setup.devices) < 2:
        return
    hosts = [setup.host(GIB, i) for i in range(2)]
    programs = [incoming(setup, i) for i in range(2)]
    xs = [setup.device(GIB, i) for i in range(2)]
    outs = [Outgoing(setup, x, i) for i, x in enumerate(xs)]

    def h2d(which: int) -> Any:
        return [programs[i][which](hosts[i]) for i in range(2)]

    def d2h(which: int) -> Any:
        return [out.start_peer() if which else out.start_ours() for out in outs]

    def opposite(which: int) -> Any:
        return [programs[0][which](hosts[0]), d2h_of_1(which)]

    def d2h_of_1(which: int) -> Any:
        return outs[1].start_peer() if which else outs[1].start_ours()

    for name, start, expected in (
        ("both GPUs h2d at once, 1 GiB each", h2d, hosts),
        ("both GPUs d2h at once, 1 GiB each", d2h, xs),
        ("GPU 0 h2d, GPU 1 d2h at once, 1 GiB each", opposite, [hosts[0], xs[1]]),
    ):
        for got, want in zip(start(0), expected, strict=True):
            check(got, want)
        yield from _both(
            name,
            2 * GIB,
            functools.partial(start, 0),
            functools.partial(start, 1),
            setup.rounds,
            ">= 0.98",
        )


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
