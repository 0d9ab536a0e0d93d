"""`expert_parallel` in chunks: how much of the exchange the experts hide."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus import moe
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._setup import AXIS, Setup

__all__ = ["overlap"]

_TOKENS, _HIDDEN, _EXPERTS, _TOP_K = 8192, 4096, 8, 2
_CHUNKS = (2, 4, 8)
_FIRST_WIDTH = 256


def overlap(setup: Setup) -> Iterator[Row]:
    """Yields the share of the exchange that is hidden, experts about as long as it."""
    num_tokens = setup.small(_TOKENS)
    hidden = max(_HIDDEN // setup.shrink, 64)
    rows = setup.num_ranks * num_tokens
    rng = np.random.default_rng(0)
    choices = np.argsort(rng.random((rows, _EXPERTS)), -1)[:, :_TOP_K]
    tokens = setup.normal((rows, hidden), jnp.bfloat16, 0)
    ids, weights = setup.put(
        choices.astype(np.int32), rng.random((rows, _TOP_K), np.float32)
    )

    def timed(width: int, functions: dict[str, Any]) -> dict[str, float]:
        up = setup.normal((_EXPERTS, hidden, width), jnp.bfloat16, 1) / hidden**0.5
        down = setup.normal((_EXPERTS, width, hidden), jnp.bfloat16, 2) / width**0.5
        args = (tokens, ids, weights, up, down)
        return setup.times(
            {
                name: functools.partial(setup.on_mesh(f, 5), *args)
                for name, f in functions.items()
            }
        )

    parts = {"exchange": _layer(setup, 1, None), "experts": _experts(setup)}
    # Experts take about as long as the exchange if their width is right.
    times = timed(_FIRST_WIDTH, parts)
    width = _FIRST_WIDTH * times["exchange"] / times["experts"]
    width = max(64, int(width) // 64 * 64)
    for _ in range(2):
        times = timed(width, parts)
        scale = times["exchange"] / times["experts"]
        width = max(64, int(width * scale) // 64 * 64)
    layers = {f"{n} chunks": _layer(setup, n, _dense) for n in (1, *_CHUNKS)}
    times = timed(width, parts | layers)
    exchange, experts = times["exchange"], times["experts"]
    case = (
        f"{setup.access}: expert_parallel, {num_tokens} tokens, hidden {hidden},"
        f" width {width}"
    )
    yield Row.make(case, "exchange alone, ms", exchange * 1e3)
    yield Row.make(case, "experts alone, ms", experts * 1e3)
    shares = {}
    for name in layers:
        yield Row.make(case, f"{name}, ms", times[name] * 1e3)
        # Against one chunk, of which nothing is hidden: what stands alone also has its
        # own way to the GPUs and back.
        shares[name] = (times["1 chunks"] - times[name]) / exchange
    del shares["1 chunks"]
    best = max(shares, key=lambda name: shares[name])
    yield Row.make(
        case,
        f"share of the exchange hidden, {best}",
        shares[best],
        required=None if setup.has_peers else ">= 0.6",
    )


def _capacity(num_tokens: int, num_ranks: int, num_chunks: int) -> int:
    rows = num_ranks * num_tokens * _TOP_K / _EXPERTS * 1.25 / num_chunks
    return -(-int(rows) // 8) * 8


def _dense(rows: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    inner = jax.nn.relu(jnp.einsum("ech,ehf->ecf", rows, up))
    return jnp.einsum("ecf,efh->ech", inner, down)


def _layer(setup: Setup, num_chunks: int, experts: Any) -> Callable[..., jax.Array]:
    def run(
        tokens: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        up: jax.Array,
        down: jax.Array,
    ) -> jax.Array:
        result: jax.Array = moe.expert_parallel(
            lambda rows, _: rows if experts is None else experts(rows, up, down),
            tokens,
            ids,
            weights,
            num_experts=_EXPERTS,
            axis_name=AXIS,
            expert_capacity=_capacity(len(tokens), setup.num_ranks, num_chunks),
            num_chunks=num_chunks,
        )
        return result

    return run


def _experts(setup: Setup) -> Callable[..., jax.Array]:
    """Returns the experts alone, on as many rows."""

    def run(
        tokens: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        up: jax.Array,
        down: jax.Array,
    ) -> jax.Array:
        del ids, weights
        capacity = _capacity(len(tokens), setup.num_ranks, 1)
        place = jnp.arange(capacity) % len(tokens)
        rows = jnp.broadcast_to(tokens[place], (up.shape[0], *tokens[place].shape))
        return _dense(rows, up, down)

    return run
