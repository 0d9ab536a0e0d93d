"""Our exchange beside each of its peers: is each right, and how long does it take.

Every peer takes turns with ours (`_report.alternate`), and a ratio is of two medians of
one pair. Of programs with several layers a figure is of one layer.
"""

import concurrent.futures
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_turbobus.bench import peers
from jax_turbobus.bench._layer import METRICS, Layer
from jax_turbobus.bench._report import Row, Timing, alternate

__all__ = ["OURS", "Race", "largest_error"]

OURS = "ours"
_FLOAT32_BYTES = 4
_MOST_COMPILERS = 8

Programs = Mapping[str, Callable[[], Any]]
Bound = Callable[[str, str | None], str | None]


class Race:
    """All schemes over one layer's data, or several layers'.

    Attributes:
      layer: the data.
      case: what rows are called.
      metrics: of `METRICS`.
      schemes: by name, ours included; those that can run here.
      wrong: (scheme, metric) whose result is not the dense reference's, and how far
        off it is.
    """

    def __init__(
        self,
        layer: Layer,
        case: str,
        schemes: Mapping[str, peers.Peer],
        *,
        has_backward: bool,
    ) -> None:
        """Compiles every scheme.

        Args:
          layer: the data.
          case: what rows are called.
          schemes: by name, ours included.
          has_backward: whether gradients are compared, too.

        Raises:
          JaxRuntimeError: a scheme does not compile, and not because XLA lacks it here.
        """
        self.layer = layer
        self.case = case
        self.metrics = METRICS if has_backward else METRICS[:1]
        self.schemes = dict(schemes)
        self.wrong: dict[tuple[str, str], float] = {}
        self._compile()

    def _compile(self) -> None:
        # XLA takes seconds for some peers, and compiles several programs at once.
        num_threads = min(_MOST_COMPILERS, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
            started = {
                (name, metric): pool.submit(self.layer.program, metric, scheme)
                for name, scheme in self.schemes.items()
                for metric in self.metrics
            }
        for (name, _), compiled in started.items():
            error = compiled.exception()
            if error is None:
                continue
            is_lacking = isinstance(error, jax.errors.JaxRuntimeError)
            if name == OURS or not is_lacking or "UNIMPLEMENTED" not in str(error):
                raise error
            if self.schemes.pop(name, None):
                _progress(f"{name}: not implemented on {jax.default_backend()}")

    def check(self, most: float | None = None) -> Iterator[Row]:
        """Yields how far each scheme is from the dense reference.

        Ours has to be right. A peer that is not, or does not fit into the memory, is
        out of the race.

        Args:
          most: the largest error over the largest value; None: what rounding makes of
            random values. 0 is for values of which sums are exact.

        Raises:
          JaxRuntimeError: a scheme does not run for another reason.
        """
        want, want_grads = self.layer.reference()
        wants = {"forward": [want], "forward + backward": want_grads}
        is_wide = self.layer.case.shape.dtype.itemsize >= _FLOAT32_BYTES
        if most is None:
            most = (1e-5 if is_wide else 3e-2) * self.layer.num_layers**0.5
        for name, scheme in list(self.schemes.items()):
            for metric in self.metrics:
                is_exact = name not in peers.DROPPING
                if not is_exact and metric != "forward":
                    continue
                try:
                    got = jax.tree.leaves(self.layer.program(metric, scheme)())
                    pairs = zip(got, wants[metric], strict=True)
                    error = max(largest_error(*pair) for pair in pairs)
                except jax.errors.JaxRuntimeError as failure:
                    if name == OURS or "RESOURCE_EXHAUSTED" not in str(failure):
                        raise
                    del self.schemes[name]
                    lacking = "left out: not enough memory"
                    yield self._row(f"{name}: {metric}: failed", 0.0, note=lacking)
                    break
                note = None
                if is_exact and not error <= most:
                    self.wrong[name, metric] = error
                    note = f"wrong: above {most:.3g}, so not among the exact peers"
                yield self._row(
                    f"{name}: {metric}: largest error over largest value",
                    error,
                    required=f"<= {most:.3g}" if name == OURS else None,
                    note=None if name == OURS else note,
                )

    def run(
        self, *, rounds: int, limit_s: float, in_a_row: int, bound: Bound
    ) -> Iterator[Row]:
        """Yields times beside each peer's, and beside the best exact one's.

        `check` comes first.

        Args:
          rounds: measurements of each.
          limit_s: of one pair, if it is to take less than `rounds`.
          in_a_row: more than 1: the best exact peer also by so many calls in a row.
          bound: what is asked of the ratio in (metric, peer); None: the best one.
        """
        for metric in self.metrics:
            timings: dict[str, dict[str, Timing]] = {}
            for name in self.schemes:
                if name == OURS:
                    continue
                _progress(f"{self.case}: {metric}: {name}")
                # All have run once: they have been checked.
                timings[name] = alternate(
                    self._programs(metric, name),
                    rounds=rounds,
                    warmup=1,
                    limit_s=limit_s,
                )
                yield self._pair(
                    f"{metric}, {self._unit('ms')}",
                    timings[name],
                    name,
                    required=bound(metric, name),
                    note=self.reservation(name, metric),
                )
            exact = {
                name: timing
                for name, timing in timings.items()
                if name in peers.EXACT and (name, metric) not in self.wrong
            }
            if exact:
                best = min(exact, key=lambda name: exact[name][name].median)
                yield self._pair(
                    f"{metric}, {self._unit('ms')}, best exact peer",
                    exact[best],
                    best,
                    required=bound(metric, None),
                )
                yield from self._beside_best(
                    metric, best, rounds=rounds, in_a_row=in_a_row
                )
            elif bound(metric, None):
                yield Row.failure(
                    self.case,
                    f"{metric}: no exact peer",
                    "all that ran were wrong",
                    required=bound(metric, None),
                )

    def reservation(self, peer: str, metric: str) -> str | None:
        """Returns what has to be said beside a ratio to this peer, if anything has."""
        error = self.wrong.get((peer, metric))
        if error is None:
            return None
        return (
            f"the peer's result is wrong (largest error {error:.3g} of the largest"
            " value): the ratio is to the time of something that nobody can use"
        )

    def _beside_best(
        self, metric: str, best: str, *, rounds: int, in_a_row: int
    ) -> Iterator[Row]:
        starts = {
            name: self.layer.program(metric, self.schemes[name])
            for name in (OURS, best)
        }
        yield self._pair(
            f"{metric}, host time until a call returns, {self._unit('us')}",
            _until_they_return(starts, rounds),
            best,
            scale=1e6,
        )
        if in_a_row > 1:
            timing = alternate(self._programs(metric, best, in_a_row), rounds=rounds)
            yield self._pair(
                f"{metric}, {self._unit('ms')}, best exact peer, {in_a_row} in a row",
                timing,
                best,
                scale=1e3 / in_a_row,
            )

    def _programs(self, metric: str, peer: str, calls: int = 1) -> Programs:
        program = Layer.forward if metric == "forward" else Layer.forward_backward
        return {
            name: program(self.layer, self.schemes[name], calls)
            for name in (OURS, peer)
        }

    def _unit(self, unit: str) -> str:
        return unit if self.layer.num_layers == 1 else f"{unit} a layer"

    def _pair(
        self,
        metric: str,
        timing: Mapping[str, Timing],
        peer: str,
        *,
        scale: float = 1e3,
        required: str | None = None,
        note: str | None = None,
    ) -> Row:
        scale /= self.layer.num_layers
        return self._row(
            metric,
            timing[OURS].median * scale,
            peer=timing[peer].median * scale,
            peer_name=peer,
            required=required,
            note=note,
        )

    def _row(self, metric: str, ours: float, **values: Any) -> Row:
        program = {"layers": self.layer.num_layers}
        return Row.make(self.case, metric, ours, program=program, **values)


@jax.jit
def _error(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.abs(got - want).max() / jnp.abs(want).max()


def largest_error(got: jax.Array, want: jax.Array) -> float:
    """Returns the largest difference over the largest value; NaN where one is."""
    return float(_error(got, jax.device_put(want, got.sharding)))


def _until_they_return(starts: Programs, rounds: int) -> dict[str, Timing]:
    """Returns how long calls keep Python; they are waited for behind the clock."""
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    order = list(starts.items())
    for i in range(1 + rounds):
        for name, start in order if i % 2 == 0 else reversed(order):
            began = time.perf_counter()
            result = start()
            duration = time.perf_counter() - began
            jax.block_until_ready(result)
            if i:
                seconds[name].append(duration)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
