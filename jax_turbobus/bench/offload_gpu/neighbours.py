"""Relays that strangers keep busy."""

import statistics
import time
from collections.abc import Callable, Iterator
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
    meanwhile,
    needs_engine,
    needs_gpus,
    percentile,
    speedup,
)

__all__ = ["busy_half"]


def busy_half(setup: Setup) -> Iterator[Row]:
    """A relay whose link is busy half the time with XLA's own copies."""
    case = "relay busy half the time"
    yield from needs_gpus(setup, case)
    if len(setup.devices) < 2:
        return
    if gpu.engine() is None:
        yield from needs_engine(case)
        return
    # On for as long as the copy takes, then off for as long. Blocks that have been
    # issued cannot be taken back: what the engine can learn depends on the period. On
    # average none may lose; that much is gained where there is something to learn.
    yield from _busy_half(setup, 256 * MIB, "5 ms on, 5 off", 4, ">= 1.3", ">= 0.98")
    yield from _busy_half(setup, 64 * MIB, "1 ms on, 1 off", 2, ">= 0.98", None)
    yield from _busy_half(setup, 2 * GIB, "40 ms on, 40 off", 2, ">= 0.98", None)


def _busy_half(
    setup: Setup,
    copied: int,
    period: str,
    turns: int,
    at_least_on_average: str,
    at_least_late: str | None,
) -> Iterator[Row]:
    own, (_, copy) = setup.host(copied, 1), incoming(setup, 1)
    h = setup.host(GIB)
    ours, _ = incoming(setup)

    def half_busy() -> Any:
        start = time.perf_counter()
        copied = copy(own).block_until_ready()
        time.sleep(time.perf_counter() - start)
        return copied

    def one() -> Any:
        return ours(h).block_until_ready()

    half_busy()
    times: dict[str, list[float]] = {}
    policies = {
        "finish-time": {},
        "even": {"split": "even"},
        "direct": {"split": "direct"},
    }
    with meanwhile(half_busy):
        for _ in range(turns):
            for name, settings in policies.items():
                with configured(**settings):
                    latencies(one, setup.count(3), 0.0)  # compiles; learns
                    times.setdefault(name, []).extend(
                        latencies(one, setup.count(30), 0.0)
                    )
    figures: dict[str, tuple[Callable[[list[float]], float], str | None]] = {
        "mean": (statistics.fmean, at_least_on_average),
        "median": (statistics.median, None),
        "slowest tenth": (lambda values: percentile(values, 0.9), at_least_late),
        "slowest single one": (max, None),
    }
    case = f"1 GiB, relay busy half the time ({period})"
    for name, (figure, required) in figures.items():
        yield speedup(
            f"{case}, {name}",
            figure(times["finish-time"]),
            figure(times["direct"]),
            required,
            "direct",
        )
    yield speedup(
        f"{case}, dynamic against static halves, mean",
        statistics.fmean(times["finish-time"]),
        statistics.fmean(times["even"]),
        None,
        "static halves",
    )
