"""Small transfers behind large ones, and relays that strangers keep busy."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_turbobus as tb
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
    needs_gpus,
    percentile,
    speedup,
)

__all__ = ["busy_half", "small_behind_large"]


def small_behind_large(setup: Setup) -> Iterator[Row]:
    """Small transfers of a program while its 4 GiB are on their way.

    The device's own times. A small one's start cannot be had: the copy engine looks at
    its stream, and takes the time, when it is its turn. So each may begin when the one
    before has ended, and what counts is how much later than that it ends.

    Raises:
      ValueError: the engine has lost sight of a transfer.
    """
    engine = gpu.engine()
    if engine is None:
        return
    size, count = 4 * MIB, 12
    h, smalls = setup.host(4 * GIB), [setup.host(size) for _ in range(count)]

    def chain(smalls: Any) -> Any:
        total = jnp.zeros_like(smalls[0], device=setup.sharding(0, "device"))
        for small in smalls:
            small, total = jax.lax.optimization_barrier((small, total))
            # A started transfer: those are the engine's own, whose times it has.
            total, came, _ = tb.overlap(jnp.negative, total, fetch=small)
            total = total + came
        return total

    beside = jax.jit(lambda h, smalls: tb.overlap(chain, smalls, fetch=h)[:2])
    alone = jax.jit(chain)
    whole, _ = incoming(setup)

    def records(run: Callable[[], Any], nbytes: int, most: int) -> list[dict[str, Any]]:
        # The transfers of so many bytes of three runs.
        jax.block_until_ready(run())
        seen = max(one["id"] for one in engine.raw()["recent_transfers"])
        for _ in range(3):
            jax.block_until_ready(run())
        found = [
            one
            for one in engine.raw()["recent_transfers"]
            if one["id"] > seen and one["size_bytes"] == nbytes
        ]
        if len(found) != 3 * most:
            raise ValueError(f"expected {3 * most} transfers, found {len(found)}")
        return sorted(found, key=lambda one: one["id"])

    def periods_ms(run: Callable[[], Any]) -> list[float]:
        ends = [one["ended_ns"] / 1e6 for one in records(run, smalls[0].nbytes, count)]
        pairs = enumerate(itertools.pairwise(ends), 1)
        # Not from the last one of a run to the first one of the next.
        return [b - a for i, (a, b) in pairs if i % count]

    def large_ms(run: Callable[[], Any]) -> float:
        ones = records(run, h.nbytes, 1)
        times = [(one["ended_ns"] - one["started_ns"]) / 1e6 for one in ones]
        return float(statistics.median(times))

    def start_both() -> Any:
        return beside(h, smalls)

    large: dict[str, float] = {}
    base = 0.0
    for name, has_yields in (("with yields", True), ("without yields", False)):
        with configured(has_yields=has_yields):
            base = base or statistics.median(periods_ms(lambda: alone(smalls)))
            behind = periods_ms(start_both)
            jax.block_until_ready(whole(h))
            large[name] = statistics.median(
                latencies(lambda: jax.block_until_ready(whole(h)), 5, 0.0)
            )
            if has_yields:
                large["alone"] = large_ms(lambda: whole(h))
                large["beside"] = large_ms(start_both)
        for figure, value in (
            ("p50", statistics.median(behind)),
            ("slowest", max(behind)),
        ):
            yield Row.make(
                f"4 MiB behind 4 GiB, {name}",
                f"{figure}, ms more than alone",
                value - base,
                required="<= 0.5" if has_yields and figure == "p50" else None,
            )
    yield Row.make(
        f"4 GiB with {count} times 4 MiB in between",
        "ms",
        large["beside"],
        peer=large["alone"],
        peer_name="alone",
        required="<= 1.04",
    )
    yield Row.make(
        "what yields cost the 4 GiB",
        "ms",
        large["with yields"] * 1e3,
        peer=large["without yields"] * 1e3,
        peer_name="without yields",
        required="<= 1.04",
    )


def busy_half(setup: Setup) -> Iterator[Row]:
    """A relay whose link is busy half the time with XLA's own copies."""
    yield from needs_gpus(setup, "relay busy half the time")
    if len(setup.devices) < 2 or gpu.engine() is None:
        return
    # On for as long as the copy takes, then off for as long. Blocks that have been
    # issued cannot be taken back: what the engine can learn depends on the period.
    yield from _busy_half(setup, 256 * MIB, "5 ms on, 5 off", 4, ">= 1.3", ">= 0.98")
    yield from _busy_half(setup, 64 * MIB, "1 ms on, 1 off", 2, None, None)
    yield from _busy_half(setup, 2 * GIB, "40 ms on, 40 off", 2, None, None)


def _busy_half(
    setup: Setup,
    copied: int,
    period: str,
    turns: int,
    at_least_on_average: str | None,
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
