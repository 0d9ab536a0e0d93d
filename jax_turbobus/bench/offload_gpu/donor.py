"""What a GPU's own programs and transfers feel while it lends its link."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus import gpu
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.offload_gpu._setup import (
    GIB,
    MIB,
    PEER,
    Outgoing,
    Setup,
    configured,
    incoming,
    latencies,
    meanwhile,
    needs_gpus,
    percentile,
    size_name,
)

__all__ = ["donor"]

# Transfers of GPU 0 that are under way at any time while GPU 1 lends.
_QUEUED = 3
# Of the donor's own transfers.
_SIZES = (1 * MIB, 16 * MIB, 256 * MIB)
# Each takes a third of the samples of every state.
_TURNS = 3
# A link of PCIe 5.0 x16, measured.
_LINK_BYTES_PER_S = 54e9


def donor(setup: Setup) -> Iterator[Row]:
    """GPU 1's programs and transfers while it lends to GPU 0 without a pause.

    It lends the direction that its own transfers take.
    """
    yield from needs_gpus(setup, "donor")
    if len(setup.devices) < 2:
        return
    h = setup.host(GIB)
    lend, _ = incoming(setup)
    x = lend(h).block_until_ready()
    yield from _programs(setup, lambda: lend(h))
    for size in _SIZES:
        own = setup.host(size, 1)
        come = [functools.partial(program, own) for program in incoming(setup, 1)]
        yield from _transfers(setup, "", size, lambda: lend(h), come)
    # A buffer for each transfer that is under way.
    out = Outgoing(setup, x, count=_QUEUED)
    for size in _SIZES:
        own_out = Outgoing(setup, setup.device(size, 1), 1)
        go = [own_out.start_ours, own_out.start_peer]
        yield from _transfers(setup, " d2h", size, out.start_ours, go)


def _programs(setup: Setup, lend: Callable[[], Any]) -> Iterator[Row]:
    n = 8192 if setup.shrink == 1 else 128
    a = jax.device_put(
        np.full((n, n), 1e-2, np.float32).astype(jnp.bfloat16),
        setup.sharding(1, "device"),
    )

    def matmuls(a: Any) -> Any:
        for _ in range(20):
            a = (a @ a) * jnp.bfloat16(0.01)
        return a

    def adds(x: Any) -> Any:
        for i in range(10):
            x = jax.lax.optimization_barrier(x + i)
        return x

    for name, program, x, required in (
        ("matmul loop", jax.jit(matmuls), a, "<= 1.01"),
        ("memory-bound loop", jax.jit(adds), setup.device(2 * GIB, 1), None),
    ):

        def once(program: Any = program, x: Any = x) -> Any:
            return program(x).block_until_ready()

        once()
        alone: list[float] = []
        lending: list[float] = []
        for _ in range(4):
            alone += latencies(once, setup.count(12), 0.0)
            with meanwhile(lend, _QUEUED):
                lending += latencies(once, setup.count(12), 0.0)
        yield Row.make(
            f"donor: {name} while it lends",
            "ms",
            statistics.median(lending) * 1e3,
            peer=statistics.median(alone) * 1e3,
            peer_name="alone",
            required=required,
        )


@dataclasses.dataclass(frozen=True)
class _Times:
    """Of a transfer of the donor's own.

    Attributes:
      alone: nothing else is going on.
      control: GPU 0 transfers as well, over its own link only. Nothing is lent: what
        this adds is the host's doing (two threads that start calls, its memory).
      lending: GPU 0 transfers over both links.
    """

    alone: list[float]
    control: list[float]
    lending: list[float]


def _transfers(
    setup: Setup,
    direction: str,
    size: int,
    lend: Callable[[], Any],
    programs: Sequence[Callable[[], Any]],
) -> Iterator[Row]:
    """Yields what transfers of one size take, through us and through JAX."""
    engine = gpu.engine()
    block = engine.library.settings()["block_bytes"] if engine else 16 * MIB
    for name, program in zip(("through us", PEER), programs, strict=True):

        def move(program: Callable[[], Any] = program) -> Any:
            return program().block_until_ready()

        move()
        case = f"donor's own {size_name(size)}{direction} {name}"
        if size > 100 * MIB:
            yield from _long(case, _measure(setup, lend, move, setup.count(60)))
        else:
            times = _measure(setup, lend, move, setup.count(600))
            yield from _short(case, times, block)


def _measure(
    setup: Setup, lend: Callable[[], Any], move: Callable[[], Any], count: int
) -> _Times:
    """Returns so many samples of each, taken in turns: what drifts hits all alike."""
    times = _Times([], [], [])
    for _ in range(_TURNS):

        def sample(into: list[float]) -> None:
            latencies(move, 2, 1e-4)  # What changes is felt by these.
            into.extend(latencies(move, -(-count // _TURNS), 1e-4))

        # On its own link, when nobody else is about as well: what lending costs.
        with configured(split="direct"):
            sample(times.alone)
            with meanwhile(lend, _QUEUED):
                sample(times.control)
        with meanwhile(lend, _QUEUED):
            sample(times.lending)
    return times


def _long(case: str, times: _Times) -> Iterator[Row]:
    alone = statistics.median(times.alone)
    for name, values, required in (
        ("while it lends", times.lending, "<= 1.06"),
        ("while GPU 0 uses its own link only", times.control, None),
    ):
        yield Row.make(
            f"{case} {name}",
            "p50, ms",
            statistics.median(values) * 1e3,
            peer=alone * 1e3,
            peer_name="alone",
            required=required,
        )


def _short(case: str, times: _Times, block_bytes: int) -> Iterator[Row]:
    bound = percentile(times.alone, 0.99) + block_bytes / _LINK_BYTES_PER_S
    for name, values, required in (
        ("while it lends", times.lending, "<= 1.0"),
        ("while GPU 0 uses its own link only", times.control, None),
    ):
        yield Row.make(
            f"{case} {name}",
            "p99, ms",
            percentile(values, 0.99) * 1e3,
            peer=bound * 1e3,
            peer_name=f"alone and a block of {size_name(block_bytes)}",
            required=required,
        )
    yield Row.make(
        f"{case} while it lends",
        "p50, ms",
        statistics.median(times.lending) * 1e3,
        peer=statistics.median(times.alone) * 1e3,
        peer_name="alone",
    )
