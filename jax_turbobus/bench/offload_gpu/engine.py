"""The engine's own figures: host time, block sizes, modes, sums of links."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from jax_turbobus import gpu
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.offload_gpu._setup import (
    GIB,
    MIB,
    Setup,
    configured,
    incoming,
    latencies,
    size_name,
)

__all__ = ["host_time", "sweep"]


def host_time(setup: Setup) -> Iterator[Row]:
    """What handlers cost the host, and an idle engine."""
    engine = gpu.engine()
    if engine is None:
        return
    for size in (16 * MIB, 256 * MIB, GIB):
        h = setup.host(size)
        ours, _ = incoming(setup)
        ours(h).block_until_ready()
        before = _relayed_blocks(engine)
        for _ in range(20):
            ours(h).block_until_ready()
        raw = engine.raw()
        blocks = (_relayed_blocks(engine) - before) / 20
        yield Row.make(
            f"host time in the handler, {size_name(size)}, {blocks:.0f} relayed blocks",
            "p50, us",
            statistics.median(raw["handler_ns"][-20:]) / 1e3,
            required=f"<= {60 + 10 * blocks:.0f}",
        )
    cpu = time.process_time()
    time.sleep(1.0)
    yield Row.make(
        "CPU use when idle", "cores", time.process_time() - cpu, required="<= 0.01"
    )


def _relayed_blocks(engine: gpu.Engine) -> int:
    return sum(p["num_blocks"] for p in engine.raw()["paths"] if p["relay"] is not None)


def sweep(setup: Setup) -> Iterator[Row]:
    """Block sizes, and both ways to drive lanes."""
    engine = gpu.engine()
    if engine is None:
        return
    h = setup.host(GIB)
    ours, _ = incoming(setup)
    default = engine.library.settings()["block_bytes"]
    variants: dict[str, dict[str, Any]] = {
        f"blocks of {size_name(n * MIB)}": {"block_bytes": n * MIB}
        for n in (1, 2, 4, 8, 16)
        if n * MIB <= default
    }
    variants["lock-step slots"] = {"is_lock_step": True}
    variants["free-running lanes"] = {}
    variants["direct lane only"] = {"split": "direct"}

    def timed(settings: dict[str, Any]) -> float:
        with configured(**settings):
            return statistics.median(
                latencies(lambda: ours(h).block_until_ready(), 5, 0.0)
            )

    timed({})
    for name, settings in variants.items():
        yield Row.make(f"h2d 1 GiB, {name}", "GB/s", GIB / timed(settings) / 1e9)
    rates = engine.library.measure
    paths = engine.raw()["paths"]
    links = [
        next(
            i
            for i, path in enumerate(paths)
            if (path["gpu"], path["relay"], path["direction"]) == (g, None, "h2d")
        )
        for g in range(len(setup.devices))
    ]
    total = sum(rates(links, 256 * MIB, default))
    yield Row.make(
        "h2d 1 GiB against the sum of links",
        "GB/s",
        GIB / timed({}) / 1e9,
        peer=total / 1e9,
        peer_name="all links at once",
        required=">= 0.97",
    )
    four_ways = [i for i, path in enumerate(paths) if path["relay"] is None]
    yield Row.make(
        "host memory, both directions of all links",
        "GB/s",
        sum(rates(four_ways, 256 * MIB, default)) / 1e9,
    )
