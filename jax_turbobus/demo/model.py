"""A byte-level transformer with a mixture of experts in every layer, in plain JAX.

Written as anyone would write it. Everything runs inside `jax.shard_map` over one mesh
axis: the batch is split over it, and so are the experts; all other parameters are
replicated. How tokens reach their experts is the `exchange` the caller passes in.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

__all__ = ["Aux", "Exchange", "ModelConfig", "apply", "init", "loss", "param_specs"]

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every size of the model, by name."""

    num_layers: int = 2
    hidden: int = 128
    num_heads: int = 4
    num_experts: int = 8
    top_k: int = 2
    expert_hidden: int = 256
    context: int = 128
    # Rows an expert accepts, over what balanced routing would send it.
    capacity_factor: float = 2.0
    balance_weight: float = 0.01

    def expert_capacity(self, num_tokens: int) -> int:
        """Returns the rows an expert accepts of `num_tokens` tokens on all ranks."""
        balanced = num_tokens * self.top_k / self.num_experts
        return min(num_tokens, int(np.ceil(balanced * self.capacity_factor)))


class Exchange(Protocol):
    """Runs experts that live on other devices; what the two backends differ in."""

    def __call__(
        self,
        expert_fn: Callable[[jax.Array], jax.Array],
        tokens: jax.Array,
        expert_ids: jax.Array,
        weights: jax.Array,
        *,
        num_experts: int,
        expert_capacity: int,
        axis_name: str,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weighted sum of each token's experts, and how many rows dropped.

        Args:
          expert_fn: `f32[num_local_experts, expert_capacity, hidden]` to the same.
          tokens: `f32[num_tokens, hidden]`, this rank's.
          expert_ids: `int32[num_tokens, top_k]`.
          weights: `f32[num_tokens, top_k]`.
          num_experts: on all ranks.
          expert_capacity: rows an expert accepts; later ones are dropped.
          axis_name: the mesh axis the experts are spread over.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aux:
    """What a forward pass tells besides its loss.

    Attributes:
      cross_entropy: `f32[]`, nats per byte.
      dropped: `int32[]`, rows over an expert's capacity, on all ranks and layers.
      expert_ids: `int32[num_layers, num_tokens, top_k]`, where tokens went.
    """

    cross_entropy: jax.Array
    dropped: jax.Array
    expert_ids: jax.Array


def init(config: ModelConfig, seed: int) -> Params:
    """Returns the parameters as NumPy arrays, drawn from `seed`."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, fan_in: int) -> np.ndarray:
        draw = rng.standard_normal(shape) / np.sqrt(fan_in)
        return draw.astype(np.float32)

    def layer() -> Params:
        size, inner, experts = config.hidden, config.expert_hidden, config.num_experts
        return {
            "attention_norm": np.ones(size, np.float32),
            "qkv": normal(size, 3 * size, fan_in=size),
            "attention_out": normal(size, size, fan_in=2 * config.num_layers * size),
            "moe_norm": np.ones(size, np.float32),
            "router": normal(size, experts, fan_in=size),
            "experts": {
                "up": normal(experts, size, inner, fan_in=size),
                "down": normal(
                    experts, inner, size, fan_in=2 * config.num_layers * inner
                ),
            },
        }

    return {
        "embed": normal(256, config.hidden, fan_in=1),
        "layers": [layer() for _ in range(config.num_layers)],
        "final_norm": np.ones(config.hidden, np.float32),
        # Zero: the untrained model gives every byte 1/256, a loss of ln 256 = 5.545.
        "unembed": np.zeros((config.hidden, 256), np.float32),
    }


def param_specs(params: Params, axis_name: str) -> Params:
    """Returns each parameter's `PartitionSpec`: experts are split, the rest is not."""

    def spec(path: tuple[Any, ...], _: Any) -> P:
        is_expert = any(getattr(key, "key", None) == "experts" for key in path)
        return P(axis_name) if is_expert else P()

    return jax.tree_util.tree_map_with_path(spec, params)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _rotate(x: jax.Array) -> jax.Array:
    """Returns `[batch, context, heads, size]` turned by position (rotary embedding)."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-np.arange(half, dtype=np.float32) / half)
    angles = np.arange(x.shape[1], dtype=np.float32)[:, None] * rates
    cos, sin = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _attention(p: Params, x: jax.Array, num_heads: int) -> jax.Array:
    batch, context, hidden = x.shape
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
    heads = (batch, context, num_heads, hidden // num_heads)
    mixed = jax.nn.dot_product_attention(
        _rotate(q.reshape(heads)),
        _rotate(k.reshape(heads)),
        v.reshape(heads),
        is_causal=True,
    )
    return mixed.reshape(x.shape) @ p["attention_out"]


def _expert(p: Params, rows: jax.Array) -> jax.Array:
    """Returns what local experts make of their `[experts, capacity, hidden]` rows."""
    return jax.nn.gelu(rows @ p["up"]) @ p["down"]


def _moe(
    p: Params, x: jax.Array, config: ModelConfig, exchange: Exchange, axis_name: str
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    tokens = x.reshape(-1, config.hidden)
    probs = jax.nn.softmax(tokens @ p["router"])
    weights, expert_ids = jax.lax.top_k(probs, config.top_k)
    weights /= weights.sum(axis=-1, keepdims=True)
    num_ranks = jax.lax.axis_size(axis_name)
    out, dropped = exchange(
        functools.partial(_expert, p["experts"]),
        tokens,
        expert_ids,
        weights,
        num_experts=config.num_experts,
        expert_capacity=config.expert_capacity(tokens.shape[0] * num_ranks),
        axis_name=axis_name,
    )
    # The usual balancing loss: share of slots times mean probability, over experts.
    chosen = jax.nn.one_hot(expert_ids, config.num_experts).mean(axis=(0, 1))
    shares = jax.lax.pmean(chosen, axis_name)
    means = jax.lax.pmean(probs.mean(axis=0), axis_name)
    balance = config.num_experts * jnp.sum(shares * means)
    return out.reshape(x.shape), balance, dropped, expert_ids


def apply(
    params: Params,
    inputs: jax.Array,
    config: ModelConfig,
    exchange: Exchange,
    axis_name: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns logits, the balancing loss, dropped rows and the routing.

    Args:
      params: this rank's part of what `init` returns.
      inputs: `int32[batch, context]`, this rank's.
      config: the sizes.
      exchange: how tokens reach their experts and come back.
      axis_name: the mesh axis of batch and experts.
    """
    x = params["embed"][inputs]
    balance = jnp.float32(0)
    dropped = jnp.int32(0)
    routing = []
    for p in params["layers"]:
        x += _attention(p, _rms_norm(x, p["attention_norm"]), config.num_heads)
        y, layer_balance, layer_dropped, expert_ids = _moe(
            p, _rms_norm(x, p["moe_norm"]), config, exchange, axis_name
        )
        x += y
        balance += layer_balance
        dropped += layer_dropped
        routing.append(expert_ids)
    logits = _rms_norm(x, params["final_norm"]) @ params["unembed"]
    return logits, balance / config.num_layers, dropped, jnp.stack(routing)


def loss(
    params: Params,
    windows: jax.Array,
    config: ModelConfig,
    exchange: Exchange,
    axis_name: str,
) -> tuple[jax.Array, Aux]:
    """Returns the mean loss over all ranks, and what else is worth knowing.

    Args:
      params: this rank's part of what `init` returns.
      windows: `uint8[batch, context + 1]`, this rank's.
      config: the sizes.
      exchange: how tokens reach their experts and come back.
      axis_name: the mesh axis of batch and experts.
    """
    windows = windows.astype(jnp.int32)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    logits, balance, dropped, routing = apply(
        params, inputs, config, exchange, axis_name
    )
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    cross_entropy = jax.lax.pmean(-logps.mean(), axis_name)
    aux = Aux(cross_entropy, jax.lax.psum(dropped, axis_name), routing)
    return cross_entropy + config.balance_weight * balance, aux
