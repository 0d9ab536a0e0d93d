"""Small transfers behind a large one on the same GPU."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    needs_engine,
)

__all__ = ["COUNT", "RUNS", "small_behind_large"]

# Small transfers of a run, and runs that are looked at.
COUNT, RUNS = 12, 5

Record = Mapping[str, Any]


def small_behind_large(setup: Setup) -> Iterator[Row]:
    """Small transfers of a program while its 4 GiB are on their way.

    The engine's own times. The first small one is called when the large one has been
    issued: what counts is how long after its call it ends, less the same where it is
    alone. Of the others a start cannot be had: the copy engine looks at a stream, and
    takes the time, when it is its turn. But each may begin when the one before has
    ended, and what counts is how much later than that it ends.
    """
    engine = gpu.engine()
    if engine is None:
        yield from needs_engine("4 MiB behind 4 GiB")
        return
    programs = _Programs(setup, engine)
    with configured(has_yields=True):
        alone = programs.alone()
        with_yields = programs.beside()
        large_alone = programs.large_alone()
        cost = programs.seconds_of_large()
    with configured(has_yields=False):
        without_yields = programs.beside()
        cost_without = programs.seconds_of_large()
    yield from _late("with yields", with_yields, alone, is_bound=True)
    yield from _late("without yields", without_yields, alone, is_bound=False)
    yield Row.make(
        "what yields cost the 4 GiB",
        "ms",
        cost * 1e3,
        peer=cost_without * 1e3,
        peer_name="without yields",
        required="<= 1.04",
    )
    _check_is_behind(with_yields)
    yield Row.make(
        f"4 GiB with {COUNT} times 4 MiB in between",
        "ms",
        statistics.median(run.large_ms for run in with_yields),
        peer=large_alone,
        peer_name="alone",
        required="<= 1.04",
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """What the engine has of one run: small transfers, behind a large one or alone."""

    small: Sequence[Record]
    large: Record | None = None

    @property
    def first_ms(self) -> float:
        """From the call of the first small one until its bytes are there."""
        first = self.small[0]
        return float(first["ended_ns"] - first["submitted_ns"]) / 1e6

    @property
    def periods_ms(self) -> list[float]:
        """From the end of each small one to that of the next."""
        ends = [one["ended_ns"] / 1e6 for one in self.small]
        return [b - a for a, b in itertools.pairwise(ends)]

    @property
    def large_ms(self) -> float:
        """Of the large one."""
        assert self.large is not None
        return float(self.large["ended_ns"] - self.large["started_ns"]) / 1e6


class _Programs:
    """The large transfer and the small ones, alone and together, and their records."""

    def __init__(self, setup: Setup, engine: gpu.Engine) -> None:
        self._engine = engine
        self._h = setup.host(4 * GIB)
        self._smalls = [setup.host(4 * MIB) for _ in range(COUNT)]
        here = setup.sharding(0, "device")

        def chain(smalls: Any) -> Any:
            total = jnp.zeros_like(smalls[0], device=here)
            for small in smalls:
                small, total = jax.lax.optimization_barrier((small, total))
                # A started transfer: those are the engine's own, whose times it has.
                total, came, _ = tb.overlap(jnp.negative, total, fetch=small)
                total = total + came
            return total

        self._chain = jax.jit(chain)
        self._both = jax.jit(lambda h, smalls: tb.overlap(chain, smalls, fetch=h)[:2])
        self._large, _ = incoming(setup)

    def alone(self) -> list[_Run]:
        """Returns runs of the small ones alone."""
        size = self._smalls[0].nbytes
        found = self._records(lambda: self._chain(self._smalls), [size] * COUNT)
        return [_Run(small) for small in found]

    def beside(self) -> list[_Run]:
        """Returns runs of the small ones behind the large one."""
        sizes = [self._h.nbytes] + [self._smalls[0].nbytes] * COUNT
        found = self._records(lambda: self._both(self._h, self._smalls), sizes)
        return [_Run(small, large) for large, *small in found]

    def large_alone(self) -> float:
        """Returns the milliseconds of the large one, by the engine's times."""
        found = self._records(lambda: self._large(self._h), [self._h.nbytes])
        return statistics.median(_Run((), large).large_ms for (large,) in found)

    def seconds_of_large(self) -> float:
        """Returns how long a call of the large one takes."""

        def call() -> Any:
            return jax.block_until_ready(self._large(self._h))

        call()
        return statistics.median(latencies(call, 5, 0.0))

    def _records(
        self, run: Callable[[], Any], sizes: Sequence[int]
    ) -> list[list[Record]]:
        """Returns the transfers of these sizes of each run, as they were called.

        Raises:
          ValueError: the engine has lost sight of a transfer, or has seen others.
        """
        jax.block_until_ready(run())
        seen = max(one["id"] for one in self._recent())
        for _ in range(RUNS):
            jax.block_until_ready(run())
        found: list[Record] = sorted(
            (
                one
                for one in self._recent()
                if one["id"] > seen and one["size_bytes"] in sizes
            ),
            key=lambda one: one["id"],
        )
        if [one["size_bytes"] for one in found] != [*sizes] * RUNS:
            raise ValueError(
                f"expected {RUNS} times {len(sizes)} transfers, the large one first,"
                f" found {len(found)}: {[one['size_bytes'] for one in found]}"
            )
        return [found[i : i + len(sizes)] for i in range(0, len(found), len(sizes))]

    def _recent(self) -> list[dict[str, Any]]:
        recent: list[dict[str, Any]] = self._engine.raw()["recent_transfers"]
        return recent


def _late(
    name: str, runs: Sequence[_Run], alone: Sequence[_Run], *, is_bound: bool
) -> Iterator[Row]:
    """Yields how much later small ones end than alone: the first one, and the others.

    Without yields the first one waits for the whole queue, and those after it find the
    link free: only the first one's row shows what yields are for.
    """
    first = statistics.median(run.first_ms for run in runs)
    periods = [period for run in runs for period in run.periods_ms]
    first_alone = statistics.median(run.first_ms for run in alone)
    period_alone = statistics.median(p for run in alone for p in run.periods_ms)
    bound = "<= 0.5" if is_bound else None
    for figure, value, required in (
        ("the first one behind the queue", first - first_alone, bound),
        ("p50", statistics.median(periods) - period_alone, bound),
        ("slowest", max(periods) - period_alone, None),
    ):
        yield Row.make(
            f"4 MiB behind 4 GiB, {name}",
            f"{figure}, ms more than alone",
            value,
            required=required,
        )


def _check_is_behind(runs: Sequence[_Run]) -> None:
    """Refuses figures of small transfers that were not beside the large one.

    Raises:
      ValueError: a run's last small one ended after its large one.
    """
    for run in runs:
        assert run.large is not None
        over_ns = run.small[-1]["ended_ns"] - run.large["ended_ns"]
        if over_ns > 0:
            raise ValueError(
                f"4 MiB behind 4 GiB: the last of {COUNT} small transfers ended"
                f" {over_ns / 1e6:.3g} ms after the large one: not all were beside it"
            )
