"""The engine's own figures: host time, block sizes, modes, sums of links."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax

from jax_turbobus import gpu
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.offload_gpu._setup import (
    GIB,
    MIB,
    Outgoing,
    Setup,
    configured,
    in_a_row,
    incoming,
    latencies,
    needs_engine,
    size_name,
)

__all__ = ["host_time", "sweep"]

_CALLS = 8


def host_time(setup: Setup) -> Iterator[Row]:
    """What handlers cost the host, and an idle engine."""
    engine = gpu.engine()
    if engine is None:
        yield from needs_engine("host time in the handler")
        return
    for size in (16 * MIB, 256 * MIB, GIB):
        h = setup.host(size)
        ours, _ = incoming(setup)
        out = Outgoing(setup, ours(h))
        for direction, one in (
            ("h2d", lambda h=h, ours=ours: ours(h)),
            ("d2h", out.start_ours),
        ):
            jax.block_until_ready(one())
            before = _relayed_blocks(engine)
            for _ in range(20):
                jax.block_until_ready(one())
            raw = engine.raw()
            blocks = (_relayed_blocks(engine) - before) / 20
            yield Row.make(
                f"host time in the handler, {direction} {size_name(size)}, "
                f"{blocks:.0f} relayed blocks",
                "p50, us",
                statistics.median(raw["handler_ns"][-20:]) / 1e3,
                required=f"<= {60 + 10 * blocks:.0f}",
            )
    cpu = time.process_time()
    setup.pause(1.0)
    yield Row.make(
        "CPU use when idle", "cores", time.process_time() - cpu, required="<= 0.01"
    )


def _relayed_blocks(engine: gpu.Engine) -> int:
    return sum(p["num_blocks"] for p in engine.raw()["paths"] if p["relay"] is not None)


def sweep(setup: Setup) -> Iterator[Row]:
    """Block sizes, ways to drive lanes, and what all links carry together."""
    engine = gpu.engine()
    if engine is None:
        yield from needs_engine("block sizes and sums of links")
        return
    default = engine.library.settings()["block_bytes"]
    variants: dict[str, dict[str, Any]] = {
        f"blocks of {size_name(n * MIB)}": {"block_bytes": n * MIB}
        for n in (1, 2, 4, 8, 16)
        if n * MIB <= default
    }
    variants |= {
        "free-running lanes": {"is_lock_step": False},
        "lock-step slots": {"is_lock_step": True},
        "a stream a leg": {"relay_streams": "leg"},
        "a stream a slot": {"relay_streams": "slot"},
        "a stream a slot, not waiting for each other": {"relay_streams": "loose-slot"},
        "direct lane only": {"split": "direct"},
    }
    h = setup.host(GIB)
    ours, _ = incoming(setup)
    out = Outgoing(setup, ours(h))
    for direction, one in (("h2d", lambda: ours(h)), ("d2h", out.start_ours)):
        run = in_a_row(one, _CALLS)
        run()
        for name, settings in variants.items():
            with configured(**settings):
                time_s = statistics.median(latencies(run, 3, 0.0))
            yield Row.make(
                f"{direction} 1 GiB, {name}", "GB/s", _CALLS * GIB / time_s / 1e9
            )
        yield from _against_links(setup, engine, direction, one, GIB, _CALLS)
    del h, out
    h = setup.host(4 * GIB)
    yield from _against_links(setup, engine, "h2d", lambda: ours(h), 4 * GIB, 2)
    out = Outgoing(setup, ours(h))
    yield from _against_links(setup, engine, "d2h", out.start_ours, 4 * GIB, 2)
    every = [i for g in range(len(setup.devices)) for i in engine.links(g)]
    yield Row.make(
        "host memory, both directions of all links",
        "GB/s",
        _sum_of_links(setup, engine, every) / 1e9,
    )


def _against_links(
    setup: Setup, engine: gpu.Engine, direction: str, one: Any, size: int, calls: int
) -> Iterator[Row]:
    links = [i for g in range(len(setup.devices)) for i in engine.links(g, direction)]
    run = in_a_row(one, calls)
    run()
    yield Row.make(
        f"{direction} {size_name(size)} against the sum of links",
        "GB/s",
        calls * size / statistics.median(latencies(run, 3, 0.0)) / 1e9,
        peer=_sum_of_links(setup, engine, links) / 1e9,
        peer_name="plain copies over all links at once",
        required=">= 0.97",
    )


def _sum_of_links(setup: Setup, engine: gpu.Engine, links: list[int]) -> float:
    block, size = engine.library.settings()["block_bytes"], GIB // setup.shrink
    # All copy the same number of bytes: the slowest one says when all is over.
    return len(links) * float(
        max(min(engine.library.measure(links, size, block)) for _ in range(2))
    )
