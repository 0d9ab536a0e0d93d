"""`expert_parallel` in chunks: how much of the exchange the experts hide.

With T(n) the time of the layer in n chunks and E that of the experts alone, on the very
rows that are dispatched, the exchange takes X = T(1) - E: what the layer takes longer
than its experts where nothing is beside anything. Chunks hide T(1) - T(n) of it, so the
share hidden is (T(1) - T(n)) / X: nothing at T(n) = T(1), all at T(n) = E. What chunks
cost (smaller matmuls, more calls) counts against it.

Not all can be hidden: nothing is beside the first chunk's dispatch and the last one's
combine, and nothing hides longer than it lasts (`_can_hide`). Both shares are reported.
The experts are made about as long as the exchange by their width.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_turbobus import moe
from jax_turbobus.bench._experts_race import largest_error
from jax_turbobus.bench._report import Row, Timing
from jax_turbobus.bench.experts_gpu._kernels import kernel_seconds, matmul_seconds
from jax_turbobus.bench.experts_gpu._setup import AXIS, Setup, expert_capacity, over

__all__ = ["overlap"]

_TOKENS, _HIDDEN, _EXPERTS, _TOP_K = 8192, 4096, 8, 2
_CHUNKS = (2, 4, 8)
# Over NVLink nothing is asked: one number of chunks shows how it goes.
_CHUNKS_OVER_NVLINK = (4,)
_FIRST_WIDTHS = (512, 2048)
_MOST_WIDTH = 16384
_MOST_ERROR = 0.03


def overlap(setup: Setup) -> Iterator[Row]:
    """Yields the share of the exchange that is hidden, experts about as long as it."""
    layer = _Layer(setup)
    width = layer.width_as_long_as_the_exchange()
    chunks = _CHUNKS_OVER_NVLINK if setup.has_peers else _CHUNKS
    case = (
        f"{setup.access}: expert_parallel, {layer.num_tokens} tokens, hidden"
        f" {layer.hidden}, width {width}"
    )
    matrices = layer.matrices(width)
    programs = {n: layer.program(n, matrices) for n in (1, *chunks)}
    yield from _errors(case, "forward", programs)
    timings = setup.timings(
        {"exchange": layer.exchange(), "experts": layer.experts(matrices)}
        | {str(n): program for n, program in programs.items()}
    )
    yield Row.make(case, "exchange alone, ms", timings["exchange"].median * 1e3)
    best, rows = _shares(case, "forward", timings, chunks)
    yield from rows
    required = None if setup.has_peers else ">= 0.6"
    share = _hidden(timings, best)
    yield Row.make(
        case,
        f"share of the exchange hidden, {best} chunks",
        share,
        required=required,
        note="(T(1) - T(n)) / (T(1) - experts alone), the best number of chunks",
    )
    if not setup.has_peers:
        yield from _backward(case, setup, layer, best, matrices)
    yield from _slowdown(case, layer, programs[best], best, matrices)


class _Layer:
    """One layer's programs: whole, in chunks, and its parts alone."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.num_tokens = setup.small(_TOKENS)
        self.hidden = max(_HIDDEN // setup.shrink, 64)
        rng = np.random.default_rng(0)
        num_rows = setup.num_ranks * self.num_tokens
        self.ids = np.argsort(rng.random((num_rows, _EXPERTS)), -1)[:, :_TOP_K]
        self.tokens, self.gradient = (
            setup.normal((num_rows, self.hidden), jnp.bfloat16, seed) for seed in (0, 3)
        )
        self.routed = setup.put(
            self.ids.astype(np.int32), rng.random((num_rows, _TOP_K), np.float32)
        )
        self.most_width = max(_MOST_WIDTH // setup.shrink, 64)
        shape = (_EXPERTS, self.hidden, self.most_width)
        self.up = setup.normal(shape, jnp.bfloat16, 1) / self.hidden**0.5
        self.down = setup.normal(shape, jnp.bfloat16, 2)

    def capacity(self, num_chunks: int) -> int:
        return expert_capacity(
            self.ids,
            num_experts=_EXPERTS,
            num_ranks=self.setup.num_ranks,
            num_chunks=num_chunks,
        )

    def matrices(self, width: int) -> tuple[jax.Array, jax.Array]:
        """Returns the first columns of what has been made once."""
        down = self.down[:, :, :width].swapaxes(1, 2) / width**0.5
        return self.up[:, :, :width], down.astype(jnp.bfloat16)

    def width_as_long_as_the_exchange(self) -> int:
        """Returns how wide experts are that take as long as the exchange."""
        widths = [min(width, self.most_width) for width in _FIRST_WIDTHS]
        times = self.setup.times(
            {"exchange": self.exchange()}
            | {str(width): self.experts(self.matrices(width)) for width in widths}
        )
        few, many = (times[str(width)] for width in widths)
        each = max(many - few, 1e-9) / max(widths[1] - widths[0], 1)
        width = widths[0] + (times["exchange"] - few) / each
        return min(max(64, int(width) // 64 * 64), self.most_width)

    def program(
        self, num_chunks: int, matrices: tuple[jax.Array, jax.Array]
    ) -> Callable[[], jax.Array]:
        """Returns a call of the layer in so many chunks."""
        mapped = self.setup.on_mesh(self._mapped(num_chunks), 5)
        return functools.partial(mapped, self.tokens, *self.routed, *matrices)

    def program_and_back(
        self, num_chunks: int, matrices: tuple[jax.Array, jax.Array]
    ) -> Callable[[], Any]:
        """Returns a call of the layer and of its gradients."""
        mapped = self.setup.on_mesh(self._mapped(num_chunks), 5)

        def run(t: Any, i: Any, w: Any, up: Any, down: Any, dy: Any) -> Any:
            y, pull = jax.vjp(lambda t, w, u, d: mapped(t, i, w, u, d), t, w, up, down)
            return y, pull(dy)

        arguments = (self.tokens, *self.routed, *matrices, self.gradient)
        return functools.partial(jax.jit(run), *arguments)

    def _mapped(self, num_chunks: int) -> Callable[..., jax.Array]:
        def run(t: Any, ids: Any, w: Any, up: Any, down: Any) -> jax.Array:
            return self._layer(num_chunks, t, ids, w, lambda x, _: _dense(x, up, down))

        return run

    def _layer(
        self, num_chunks: int, tokens: Any, ids: Any, weights: Any, experts: Any
    ) -> jax.Array:
        result: jax.Array = moe.expert_parallel(
            experts,
            tokens,
            ids,
            weights,
            num_experts=_EXPERTS,
            axis_name=AXIS,
            expert_capacity=self.capacity(num_chunks),
            num_chunks=num_chunks,
        )
        return result

    def exchange(self) -> Callable[[], jax.Array]:
        """Returns a call of dispatch and combine with nothing between them."""
        mapped = self.setup.on_mesh(
            lambda t, i, w: self._layer(1, t, i, w, lambda rows, _: rows), 3
        )
        return functools.partial(mapped, self.tokens, *self.routed)

    @functools.cached_property
    def rows(self) -> tuple[jax.Array, jax.Array]:
        """What is dispatched to the experts, and the gradient that comes back."""

        def of(values: jax.Array) -> jax.Array:
            return self.setup.dispatched(
                values, *self.routed, num_experts=_EXPERTS, capacity=self.capacity(1)
            )

        return of(self.tokens), of(self.gradient)

    def experts(self, matrices: tuple[jax.Array, jax.Array]) -> Callable[[], jax.Array]:
        """Returns a call of the experts alone."""
        mapped = self.setup.on_mesh(_dense, 3)
        return functools.partial(mapped, self.rows[0], *matrices)

    def experts_and_back(
        self, matrices: tuple[jax.Array, jax.Array]
    ) -> Callable[[], Any]:
        """Returns a call of the experts and their gradients alone."""

        def run(rows: Any, dy: Any, up: Any, down: Any) -> Any:
            result, pull = jax.vjp(_dense, rows, up, down)
            return result, pull(dy)

        return functools.partial(self.setup.on_mesh(run, 4), *self.rows, *matrices)

    def experts_in_chunks(
        self, num_chunks: int, matrices: tuple[jax.Array, jax.Array]
    ) -> Callable[[], Any]:
        """Returns a call of the experts alone, chunk after chunk."""
        capacity = self.capacity(num_chunks)
        shape = (num_chunks, _EXPERTS // self.setup.num_ranks, capacity, self.hidden)

        def run(rows: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            results: list[jax.Array] = []
            for i in range(num_chunks):
                # One after the other, and no two of them one matmul.
                chunk = lax.optimization_barrier((rows[0, i], *results))[0]
                results.append(_dense(chunk, up, down))
            return jnp.stack(results)[None]

        rows = self.setup.normal((self.setup.num_ranks, *shape), jnp.bfloat16, 4)
        return functools.partial(self.setup.on_mesh(run, 3), rows, *matrices)


def _dense(rows: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    inner = jax.nn.relu(jnp.einsum("ech,ehf->ecf", rows, up))
    return jnp.einsum("ecf,efh->ech", inner, down)


def _can_hide(num_chunks: int, exchange: float, experts: float) -> float:
    """Returns the seconds of the exchange that chunks can hide at most.

    Beside the first chunk's experts is the second one's dispatch, beside the last
    one's the combine before, beside the others one of each. Dispatch and combine are
    taken to be alike.
    """
    if num_chunks == 1:
        return 0.0
    half, of_experts = exchange / 2 / num_chunks, experts / num_chunks
    beside = [half] + [2 * half] * (num_chunks - 2) + [half]
    return sum(min(of_experts, part) for part in beside)


def _hidden(timings: dict[str, Timing], num_chunks: int) -> float:
    """Returns the share of the exchange that so many chunks hide."""
    exchange = over(timings["1"], timings["experts"])
    return over(timings["1"], timings[str(num_chunks)]) / max(exchange, 1e-9)


def _shares(
    case: str, metric: str, timings: dict[str, Timing], chunks: tuple[int, ...]
) -> tuple[int, list[Row]]:
    """Returns the best number of chunks, and rows of all."""
    experts = timings["experts"].median
    exchange = over(timings["1"], timings["experts"])
    rows = [
        Row.make(case, f"{metric}: experts alone, ms", experts * 1e3),
        Row.make(case, f"{metric}: 1 chunk, ms", timings["1"].median * 1e3),
        Row.make(
            case,
            f"{metric}: exchange in it, ms",
            exchange * 1e3,
            note="1 chunk less the experts alone",
        ),
    ]
    for n in chunks:
        hidden = _hidden(timings, n)
        most = _can_hide(n, exchange, experts) / max(exchange, 1e-9)
        rows += [
            Row.make(case, f"{metric}: {n} chunks, ms", timings[str(n)].median * 1e3),
            Row.make(
                case,
                f"{metric}: {n} chunks: hidden share of the exchange",
                hidden,
                peer=most if most > 0 else None,
                peer_name="what so many chunks can hide" if most > 0 else None,
            ),
        ]
    return max(chunks, key=lambda n: _hidden(timings, n)), rows


def _errors(
    case: str, metric: str, programs: dict[int, Callable[[], Any]]
) -> Iterator[Row]:
    want = jax.tree.leaves(programs[1]())
    for n, program in programs.items():
        if n > 1:
            error = max(map(largest_error, jax.tree.leaves(program()), want))
            yield Row.make(
                case,
                f"{metric}: {n} chunks: largest error over largest value of 1 chunk",
                error,
                required=f"<= {_MOST_ERROR}",
            )


def _slowdown(
    case: str,
    layer: _Layer,
    program: Callable[[], Any],
    num_chunks: int,
    matrices: tuple[jax.Array, jax.Array],
) -> Iterator[Row]:
    """Yields how much longer the experts' kernels run beside an exchange."""
    alone = layer.experts_in_chunks(num_chunks, matrices)
    took = layer.setup.times({"alone": alone})["alone"]
    yield Row.make(case, f"experts alone in {num_chunks} chunks, ms", took * 1e3)
    beside, by_itself = (
        matmul_seconds(kernel_seconds(run, calls=5)) for run in (program, alone)
    )
    name = f"the experts' matmuls in {num_chunks} chunks beside exchanges, us"
    if beside and by_itself:
        yield Row.make(
            case,
            name,
            beside * 1e6,
            peer=by_itself * 1e6,
            peer_name="the same without exchanges",
            note="what exchanges take of the experts' SMs: their occupancy itself is in"
            " counters that JAX's profiler does not read",
        )
    else:
        yield Row.make(
            case, f"{name}: not measured", 0.0, note="the profiler saw no matmul"
        )


def _backward(
    case: str,
    setup: Setup,
    layer: _Layer,
    best: int,
    matrices: tuple[jax.Array, jax.Array],
) -> Iterator[Row]:
    programs = {n: layer.program_and_back(n, matrices) for n in (1, best)}
    metric = "forward + backward"
    yield from _errors(case, metric, programs)
    timings = setup.timings(
        {"experts": layer.experts_and_back(matrices)}
        | {str(n): program for n, program in programs.items()}
    )
    yield from _shares(case, metric, timings, (best,))[1]
