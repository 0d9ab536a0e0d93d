"""What others feel: donors, small transfers behind large ones, busy relays."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_turbobus as tb
from jax_turbobus import gpu
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.offload_gpu._setup import (
    GIB,
    MIB,
    PEER,
    Setup,
    configured,
    incoming,
    latencies,
    meanwhile,
    percentile,
    size_name,
    speedup,
)

__all__ = ["busy_half", "donor", "small_behind_large"]


def donor(setup: Setup) -> Iterator[Row]:
    """What lending its link costs the lender's own programs."""
    if len(setup.devices) < 2:
        return
    h = setup.host(GIB)
    lend_in, _ = incoming(setup)

    def lend() -> Any:
        return lend_in(h).block_until_ready()

    n = 8192 if setup.shrink == 1 else 128
    a = jax.device_put(
        np.full((n, n), 1e-2, np.float32).astype(jnp.bfloat16),
        setup.sharding(1, "device"),
    )
    big = setup.device(2 * GIB, 1)

    def matmuls(a: Any) -> Any:
        for _ in range(20):
            a = (a @ a) * jnp.bfloat16(0.01)
        return a

    def adds(x: Any) -> Any:
        for i in range(10):
            x = jax.lax.optimization_barrier(x + i)
        return x

    programs = {
        "matmul loop": (jax.jit(matmuls), a, "<= 1.01"),
        "memory-bound loop": (jax.jit(adds), big, None),
    }
    for name, (program, x, required) in programs.items():

        def once(program: Any = program, x: Any = x) -> Any:
            return program(x).block_until_ready()

        once()
        alone: list[float] = []
        lending: list[float] = []
        for _ in range(4):
            alone += latencies(once, 8, 0.0)
            with meanwhile(lend):
                lending += latencies(once, 8, 0.0)
        yield Row.make(
            f"donor: {name} while it lends",
            "ms",
            statistics.median(lending) * 1e3,
            peer=statistics.median(alone) * 1e3,
            peer_name="alone",
            required=required,
        )

    settings = engine.library.settings() if (engine := gpu.engine()) else {}
    block = settings.get("block_bytes", 16 * MIB)
    block_ms = block / 54e9 * 1e3
    for size in (1 * MIB, 16 * MIB, 256 * MIB):
        own = setup.host(size, 1)
        for name, program in zip(("through us", PEER), incoming(setup, 1), strict=True):

            def move(program: Any = program, own: Any = own) -> Any:
                return program(own).block_until_ready()

            move()
            count = 60 if size < 100 * MIB else 20
            # Alone on its own link: the other one is taken while it lends.
            with configured(split="direct"):
                alone = latencies(move, count, 1e-4)
            with meanwhile(lend):
                lending = latencies(move, count, 1e-4)
            case = f"donor's own {size_name(size)} {name} while it lends"
            if size > 100 * MIB:
                yield Row.make(
                    case,
                    "p50, ms",
                    statistics.median(lending) * 1e3,
                    peer=statistics.median(alone) * 1e3,
                    peer_name="alone",
                    required="<= 1.06",
                )
            else:
                bound = percentile(alone, 0.99) * 1e3 + block_ms
                yield Row.make(
                    case,
                    "p99, ms",
                    percentile(lending, 0.99) * 1e3,
                    peer=bound,
                    peer_name=f"alone and a block of {size_name(block)}",
                    required="<= 1.0",
                )


def small_behind_large(setup: Setup) -> Iterator[Row]:
    """Small transfers of a program while its 4 GiB are on their way.

    The device's own times: from the moment when the small one may begin to its end.
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
            total = total + tb.to_device(small)
        return total

    beside = jax.jit(lambda h, smalls: tb.overlap(chain, smalls, fetch=h)[:2])
    alone = jax.jit(chain)
    whole, _ = incoming(setup)

    def spans_ms(run: Callable[[], Any]) -> list[float]:
        jax.block_until_ready(run())
        seen = max(one["id"] for one in engine.raw()["recent_transfers"])
        for _ in range(3):
            jax.block_until_ready(run())
        return [
            (one["ended_ns"] - one["started_ns"]) / 1e6
            for one in engine.raw()["recent_transfers"]
            if one["id"] > seen and one["size_bytes"] == smalls[0].nbytes
        ]

    large: dict[str, float] = {}
    base = 0.0
    for name, has_yields in (("with yields", True), ("without yields", False)):
        # So that the small ones are transfers of the engine's, whose times it has.
        with configured(has_yields=has_yields, min_pooled_bytes=smalls[0].nbytes):
            base = base or statistics.median(spans_ms(lambda: alone(smalls)))
            behind = spans_ms(lambda: beside(h, smalls))
            jax.block_until_ready(whole(h))
            large[name] = statistics.median(
                latencies(lambda: jax.block_until_ready(whole(h)), 5, 0.0)
            )
        yield Row.make(
            f"4 MiB behind 4 GiB, {name}",
            "p50, ms more than alone",
            statistics.median(behind) - base,
            required="<= 0.5" if has_yields else None,
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
    if len(setup.devices) < 2 or gpu.engine() is None:
        return
    own, (_, copy) = setup.host(256 * MIB, 1), incoming(setup, 1)
    copy(own).block_until_ready()

    def half_busy() -> None:
        start = time.perf_counter()
        copy(own).block_until_ready()
        time.sleep(time.perf_counter() - start)

    h = setup.host(GIB)
    ours, _ = incoming(setup)
    times: dict[str, list[float]] = {}
    policies = {
        "finish-time": {},
        "even": {"split": "even"},
        "direct": {"split": "direct"},
    }
    with meanwhile(half_busy):
        for _ in range(4):
            for name, settings in policies.items():
                with configured(**settings):
                    times.setdefault(name, []).extend(
                        latencies(lambda: ours(h).block_until_ready(), 20, 0.0)
                    )
    mean = {name: statistics.fmean(values) for name, values in times.items()}
    yield speedup(
        "1 GiB, relay busy half the time, mean",
        mean["finish-time"],
        mean["direct"],
        ">= 1.3",
        "direct",
    )
    yield speedup(
        "1 GiB, relay busy half the time, slowest tenth",
        percentile(times["finish-time"], 0.9),
        percentile(times["direct"], 0.9),
        ">= 0.98",
        "direct",
    )
    yield speedup(
        "1 GiB, relay busy half the time, dynamic against static halves",
        mean["finish-time"],
        mean["even"],
        None,
        "static halves",
    )
