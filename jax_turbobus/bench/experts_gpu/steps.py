"""One MoE layer's training step: what the exchange adds to the experts' own time.

All sides run the same batched matmuls on rows padded to the same capacity, and every
peer gathers or scatters its rows straight into that layout. What stands for the experts
alone is their forward and backward pass on the very rows that ours dispatches, given
the gradient of what they return. The exchange is what a step takes longer than that:
routing, movement, sums, the loss, and their gradients.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus import moe
from jax_turbobus.bench import peers, routing
from jax_turbobus.bench._experts_race import largest_error
from jax_turbobus.bench._report import Row, Timing
from jax_turbobus.bench.experts_gpu._kernels import kernel_seconds, matmul_seconds
from jax_turbobus.bench.experts_gpu._setup import AXIS, Setup, expert_capacity, over
from jax_turbobus.moe._counts import ExchangeShape

__all__ = ["steps"]

# name -> tokens a rank, hidden, width, experts, top-k.
_MODELS = {
    "Mixtral-like": (4096, 4096, 14336, 8, 2),
    "Qwen3-30B-like": (4096, 2048, 768, 128, 8),
}
# The fastest exact ones, and the one that most users write; its capacity drops nothing
# here.
_PEERS = ("allgather_filter", "one_copy_padded", "capacity_scatter")
# Without peer access the exchange is long enough to be worth cutting.
_CHUNKS = 4
_ALONE = "experts alone"
_MOST_ERROR = 0.03
# Asked of our exchange beside the best JAX way's.
_OF_BEST = "<= 0.5"

Layer = Callable[..., jax.Array]


def _experts(rows: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Returns what the experts make of ``[num_local_experts, capacity, hidden]``."""
    inner = jax.nn.silu(jnp.einsum("ech,ehf->ecf", rows, up))
    return jnp.einsum("ecf,efh->ech", inner, down)


def _experts_and_back(
    rows: jax.Array, gradient: jax.Array, up: jax.Array, down: jax.Array
) -> Any:
    """Returns what the experts return, and all gradients."""
    result, pull = jax.vjp(_experts, rows, up, down)
    return result, pull(gradient)


def _ours(shape: ExchangeShape, capacity: int, num_chunks: int = 1) -> Layer:
    def run(tokens: Any, ids: Any, weights: Any, up: Any, down: Any) -> jax.Array:
        result: jax.Array = moe.expert_parallel(
            lambda rows, _: _experts(rows, up, down),
            tokens,
            ids,
            weights,
            num_experts=shape.num_experts,
            axis_name=AXIS,
            expert_capacity=capacity,
            num_chunks=num_chunks,
        )
        return result

    return run


def _theirs(peer: peers.Peer, shape: ExchangeShape, capacity: int) -> Layer:
    def run(tokens: Any, ids: Any, weights: Any, up: Any, down: Any) -> jax.Array:
        case = peers.Case(
            shape=shape,
            recv_capacity=shape.num_local_experts * capacity,
            axis_name=AXIS,
            experts=lambda rows: _experts(rows, up, down),
            expert_capacity=capacity,
        )
        return peer(case, tokens, ids, weights, up[:, 0])

    return run


def _training_step(setup: Setup, layer: Layer) -> Any:
    mapped = setup.on_mesh(layer, 5)

    def loss(tokens: Any, weights: Any, up: Any, down: Any, ids: Any) -> Any:
        y = mapped(tokens, ids, weights, up, down).astype(jnp.float32)
        return (y * y).mean()

    return jax.jit(
        lambda t, i, w, u, d: jax.value_and_grad(loss, (0, 1, 2, 3))(t, w, u, d, i)
    )


def steps(setup: Setup) -> Iterator[Row]:
    """Yields, for each model, both sides' exchange and step times."""
    profiled: list[Callable[[], Iterator[Row]]] = []
    for name, (tokens, hidden, width, num_experts, top_k) in _MODELS.items():
        shape = setup.shape(tokens, hidden, num_experts, top_k)
        yield from _step(
            setup, name, shape, max(width // setup.shrink, 64), profiled.append
        )
    # Last of all, so that no time is taken behind the profiler.
    for rows in profiled:
        yield from rows()


def _step(
    setup: Setup,
    name: str,
    shape: ExchangeShape,
    width: int,
    profile: Callable[[Callable[[], Iterator[Row]]], None],
) -> Iterator[Row]:
    ids = routing.expert_ids("uniform", shape, seed=0)
    capacity_of = functools.partial(
        expert_capacity, ids, num_experts=shape.num_experts, num_ranks=setup.num_ranks
    )
    capacity = capacity_of(is_by_source=True)
    hidden = shape.hidden
    weights = np.random.default_rng(1).random(ids.shape, np.float32)
    tokens, gradient = (
        setup.normal((len(ids), hidden), jnp.bfloat16, seed) for seed in (0, 4)
    )
    up = setup.normal((shape.num_experts, hidden, width), jnp.bfloat16, 2)
    down = setup.normal((shape.num_experts, width, hidden), jnp.bfloat16, 3)
    matrices = up / hidden**0.5, down / width**0.5
    del up, down
    routed = setup.put(ids, weights / weights.sum(1, keepdims=True))

    layers = {"ours": _ours(shape, capacity)}
    if not setup.has_peers:
        in_chunks = _ours(shape, capacity_of(num_chunks=_CHUNKS), _CHUNKS)
        layers[f"ours, {_CHUNKS} chunks"] = in_chunks
    own = [*layers]
    layers |= {peer: _theirs(peers.EVERYONE[peer], shape, capacity) for peer in _PEERS}
    programs = {
        key: functools.partial(_training_step(setup, layer), tokens, *routed, *matrices)
        for key, layer in layers.items()
    }
    case = (
        f"{setup.access}: {name} step, {shape.num_ranks} x {shape.tokens_per_rank}"
        f" tokens, hidden {hidden}, {shape.num_experts} experts of {width},"
        f" top-{shape.top_k}, {capacity} rows each"
    )
    yield from _errors(case, programs)
    rows = [
        setup.dispatched(x, *routed, num_experts=shape.num_experts, capacity=capacity)
        for x in (tokens, gradient)
    ]
    programs[_ALONE] = functools.partial(
        setup.on_mesh(_experts_and_back, 4), *rows, *matrices
    )
    timings = setup.timings(programs)
    best = min(_PEERS, key=lambda peer: timings[peer].median)
    mine = min(own, key=lambda key: timings[key].median)
    yield from _times(case, timings, mine, best)
    of_these = {key: programs[key] for key in (mine, best, _ALONE)}
    profile(functools.partial(_matmuls, case, of_these, mine, best))


def _errors(case: str, programs: Mapping[str, Callable[[], Any]]) -> Iterator[Row]:
    """Yields how far losses and gradients are from ours."""
    loss, gradients = programs["ours"]()
    for name, program in programs.items():
        if name == "ours":
            continue
        other_loss, others = program()
        error = abs(float(other_loss) - float(loss)) / abs(float(loss))
        yield Row.make(
            case, f"loss, off from that of {name}", error, required="<= 0.01"
        )
        error = max(map(largest_error, gradients, others))
        yield Row.make(
            case,
            f"gradients, off from those of {name}",
            error,
            required=f"<= {_MOST_ERROR}",
        )
        del others


def _times(
    case: str, timings: Mapping[str, Timing], mine: str, best: str
) -> Iterator[Row]:
    alone = timings[_ALONE]
    yield Row.make(case, "experts alone, ms", alone.median * 1e3)
    for name, timing in timings.items():
        if name not in (mine, best, _ALONE):
            yield Row.make(case, f"whole step, ms: {name}", timing.median * 1e3)
    whole = timings[mine].median, timings[best].median
    yield Row.make(
        case,
        f"whole step, ms: {mine}",
        whole[0] * 1e3,
        peer=whole[1] * 1e3,
        peer_name=best,
    )
    exchange = over(timings[mine], alone), over(timings[best], alone)
    figures = {
        "exchange in the step, ms": (exchange[0] * 1e3, exchange[1] * 1e3),
        "exchange's share of the step": (
            exchange[0] / whole[0],
            exchange[1] / whole[1],
        ),
    }
    for metric, (own, theirs) in figures.items():
        if min(own, theirs) <= 0:
            note = f"no longer than the experts alone ({own:.3g}, {theirs:.3g})"
            yield Row.failure(case, metric, note, ours=own, required=_OF_BEST)
        else:
            yield Row.make(
                case, metric, own, peer=theirs, peer_name=best, required=_OF_BEST
            )


def _matmuls(
    case: str, programs: Mapping[str, Callable[[], Any]], mine: str, best: str
) -> Iterator[Row]:
    """Yields how long matmuls take within each step: whether the experts are alike."""
    spent = {
        name: matmul_seconds(kernel_seconds(program, calls=3))
        for name, program in programs.items()
    }
    for other in (best, _ALONE):
        if not all(spent.values()):
            note = "the profiler saw no matmul"
            yield Row.make(case, f"matmuls beside {other}: not measured", 0, note=note)
            continue
        yield Row.make(
            case,
            f"matmuls in the step, ms: {mine}",
            spent[mine] * 1e3,
            peer=spent[other] * 1e3,
            peer_name=other,
            note="by the profiler; experts are alike where the ratio is near 1",
        )
