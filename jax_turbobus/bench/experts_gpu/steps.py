"""One MoE layer's training step: what the exchange adds to the experts' own time.

Both sides run the same batched matmuls on rows padded to the same capacity. The best
JAX way keeps its exchange and puts the rows into that layout by itself, as a user must.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus import moe
from jax_turbobus.bench import peers, routing
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._setup import AXIS, Setup
from jax_turbobus.moe._traffic import ExchangeShape

__all__ = ["steps"]

# name -> tokens a rank, hidden, width, experts, top-k.
_MODELS = {
    "Mixtral-like": (4096, 4096, 14336, 8, 2),
    "Qwen3-30B-like": (4096, 2048, 768, 128, 8),
}
_SLACK = 1.25
_PEERS = ("allgather_filter", "one_copy_padded")


def _expert_mlp(rows: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Returns what the experts make of ``[num_local_experts, capacity, hidden]``."""
    inner = jax.nn.silu(jnp.einsum("ech,ehf->ecf", rows, up))
    return jnp.einsum("ecf,efh->ech", inner, down)


def _ours(shape: ExchangeShape, capacity: int) -> Callable[..., jax.Array]:
    def run(tokens: Any, ids: Any, weights: Any, up: Any, down: Any) -> jax.Array:
        rows, _, state = moe.dispatch(
            tokens,
            ids,
            weights,
            num_experts=shape.num_experts,
            axis_name=AXIS,
            expert_capacity=capacity,
        )
        return moe.combine(_expert_mlp(rows, up, down), state)

    return run


def _theirs(
    peer: Any, shape: ExchangeShape, recv_capacity: int, capacity: int
) -> Callable[..., jax.Array]:
    local = shape.num_local_experts

    def run(tokens: Any, ids: Any, weights: Any, up: Any, down: Any) -> jax.Array:
        def experts(rows: jax.Array, expert: jax.Array, _: Any) -> jax.Array:
            hot = jax.nn.one_hot(expert, local, dtype=jnp.int32)
            place = jnp.take_along_axis(
                jnp.cumsum(hot, 0), jnp.minimum(expert, local - 1)[:, None], 1
            )[:, 0]
            index = jnp.where(
                (expert < local) & (place <= capacity),
                expert * capacity + place - 1,
                local * capacity,
            )
            padded = jnp.zeros((local * capacity, rows.shape[1]), rows.dtype)
            padded = padded.at[index].set(rows, mode="drop")
            out = _expert_mlp(padded.reshape(local, capacity, -1), up, down)
            flat = out.reshape(local * capacity, -1)
            return flat.at[index].get(mode="fill", fill_value=0)

        case = peers.Case(
            shape=shape, recv_capacity=recv_capacity, axis_name=AXIS, experts=experts
        )
        result: jax.Array = peer(case, tokens, ids, weights, up[:, 0])
        return result

    return run


def _alone(
    rows: jax.Array, ids: Any, weights: Any, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Returns what the experts make of as many rows, which are there already."""
    del ids, weights
    return _expert_mlp(rows, up, down)


def steps(setup: Setup) -> Iterator[Row]:
    """Yields, for each model, both sides' exchange and step times."""
    for name, (tokens, hidden, width, num_experts, top_k) in _MODELS.items():
        shape = ExchangeShape(
            tokens_per_rank=setup.small(tokens),
            hidden=max(hidden // setup.shrink, 64),
            num_experts=num_experts,
            top_k=top_k,
            num_ranks=setup.num_ranks,
            dtype="bfloat16",
        )
        yield from _step(setup, name, shape, max(width // setup.shrink, 64))


def _step(setup: Setup, name: str, shape: ExchangeShape, width: int) -> Iterator[Row]:
    ids = routing.expert_ids("uniform", shape, seed=0)
    num_tokens, top_k = ids.shape
    rows = shape.tokens_per_rank * top_k
    per_expert = int(np.bincount(ids.ravel(), minlength=shape.num_experts).max())
    capacity = max(per_expert, -(-int(_SLACK * rows) // shape.num_local_experts))
    capacity = -(-capacity // 8) * 8
    recv_capacity = moe.required_recv_capacity(
        tokens_per_rank=shape.tokens_per_rank,
        num_experts=shape.num_experts,
        top_k=top_k,
        num_ranks=shape.num_ranks,
        slack=_SLACK,
    )
    hidden = shape.hidden
    weights = np.random.default_rng(1).random((num_tokens, top_k), np.float32)
    arguments = (
        setup.normal((num_tokens, hidden), jnp.bfloat16, 0),
        *setup.put(ids, weights / weights.sum(1, keepdims=True)),
        setup.normal((shape.num_experts, hidden, width), jnp.bfloat16, 2) / hidden**0.5,
        setup.normal((shape.num_experts, width, hidden), jnp.bfloat16, 3) / width**0.5,
    )

    def training_step(layer: Callable[..., jax.Array]) -> Any:
        mapped = setup.on_mesh(layer, 5)

        def loss(tokens: Any, weights: Any, up: Any, down: Any, ids: Any) -> Any:
            y = mapped(tokens, ids, weights, up, down).astype(jnp.float32)
            return (y * y).mean()

        return jax.jit(
            lambda t, i, w, u, d: jax.value_and_grad(loss, (0, 1, 2, 3))(t, w, u, d, i)
        )

    programs = {
        "ours": training_step(_ours(shape, capacity)),
        "experts alone": training_step(_alone),
    }
    inputs = dict.fromkeys(programs, arguments)
    # As many rows, made before: to make them would count as the experts' work.
    rows_there = setup.normal((shape.num_experts, capacity, hidden), jnp.bfloat16, 4)
    inputs["experts alone"] = (rows_there, *arguments[1:])
    for peer in _PEERS:
        theirs = _theirs(peers.EXACT[peer], shape, recv_capacity, capacity)
        programs[peer] = training_step(theirs)
        inputs[peer] = arguments
    case = (
        f"{setup.access}: {name} step, {shape.num_ranks} x {shape.tokens_per_rank}"
        f" tokens, hidden {hidden}, {shape.num_experts} experts of {width}, top-{top_k}"
    )
    losses = {key: float(program(*inputs[key])[0]) for key, program in programs.items()}
    for peer in _PEERS:
        error = abs(losses[peer] - losses["ours"]) / abs(losses["ours"])
        yield Row.make(case, f"loss, off from {peer}'s", error, required="<= 0.01")
    times = setup.times(
        {
            key: functools.partial(program, *inputs[key])
            for key, program in programs.items()
        }
    )
    best = min(_PEERS, key=lambda peer: times[peer])
    alone = times["experts alone"]
    yield Row.make(case, "experts alone, ms", alone * 1e3)
    yield Row.make(
        case,
        "whole step, ms",
        times["ours"] * 1e3,
        peer=times[best] * 1e3,
        peer_name=best,
    )
    yield Row.make(
        case,
        "exchange's share of the step, ms",
        (times["ours"] - alone) * 1e3,
        peer=(times[best] - alone) * 1e3,
        peer_name=best,
        required="<= 0.5",
    )
