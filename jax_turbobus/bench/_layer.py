"""One comparison of exchanges: its data, its programs, and what is right."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe
from jax_turbobus.bench import peers

__all__ = ["Layer", "ours"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One comparison's programs and data.

    Attributes:
      case: what all schemes share.
      mesh: all devices, along `case.axis_name`.
      arguments: tokens, expert ids, weights and scales of all ranks, sharded.
      programs: what has been compiled already.
    """

    case: peers.Case
    mesh: Mesh
    arguments: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def make(
        cls, case: peers.Case, mesh: Mesh, expert_ids: np.ndarray[Any, Any], seed: int
    ) -> "Layer":
        """Returns a layer with random values under the given routing."""
        shape = case.shape
        rng = np.random.default_rng(seed)
        num_tokens, top_k = expert_ids.shape
        tokens = rng.standard_normal((num_tokens, shape.hidden), np.float32)
        weights = rng.random((num_tokens, top_k), np.float32)
        scale = rng.standard_normal((shape.num_experts, shape.hidden), np.float32)
        values = (
            tokens.astype(shape.dtype),
            expert_ids,
            weights / weights.sum(axis=1, keepdims=True),
            1 + 0.1 * scale,
        )
        sharding = NamedSharding(mesh, P(case.axis_name))
        return cls(case, mesh, jax.device_put(values, (sharding,) * 4))

    def forward(self, scheme: peers.Peer, calls: int = 1) -> Callable[[], jax.Array]:
        """Returns compiled calls of one scheme, which wait for the last one only.

        Of several calls each one's way from Python to the devices and back is hidden.
        """
        return self._program("forward", scheme, self.mapped(scheme), calls)

    def forward_backward(self, scheme: peers.Peer, calls: int = 1) -> Callable[[], Any]:
        """Returns compiled calls of one scheme and its gradients, as `forward`."""
        mapped = self.mapped(scheme)

        def loss(tokens: Any, weights: Any, scale: Any, ids: Any) -> jax.Array:
            y = mapped(tokens, ids, weights, scale).astype(jnp.float32)
            return jnp.sum(y * y) / 2

        def grads(tokens: Any, ids: Any, weights: Any, scale: Any) -> Any:
            return jax.grad(loss, (0, 1, 2))(tokens, weights, scale, ids)

        return self._program("forward + backward", scheme, grads, calls)

    def _program(
        self, kind: str, scheme: peers.Peer, function: Any, calls: int
    ) -> Callable[[], Any]:
        key = kind, scheme
        if key not in self.programs:
            lowered = jax.jit(function).lower(*self.arguments)
            self.programs[key] = lowered.compile()
        compiled = self.programs[key]

        def run() -> Any:
            for _ in range(calls - 1):
                compiled(*self.arguments)
            return jax.block_until_ready(compiled(*self.arguments))

        return run

    def mapped(self, scheme: peers.Peer) -> Callable[..., jax.Array]:
        """Returns a scheme as a function of the arrays of all ranks."""
        spec = P(self.case.axis_name)

        def per_rank(*arguments: jax.Array) -> jax.Array:
            return scheme(self.case, *arguments)

        return jax.shard_map(
            per_rank, mesh=self.mesh, in_specs=(spec,) * 4, out_specs=spec
        )

    def reference(
        self,
    ) -> tuple[np.ndarray[Any, Any], tuple[np.ndarray[Any, Any], ...]]:
        """Returns the dense result and its gradients, on one device."""
        home = self.mesh.devices.flat[0]
        tokens, ids, weights, scale = jax.device_put(self.arguments, home)

        def loss(tokens: Any, weights: Any, scale: Any) -> jax.Array:
            y = peers.dense(tokens, ids, weights, scale).astype(jnp.float32)
            return jnp.sum(y * y) / 2

        result = jax.jit(peers.dense)(tokens, ids, weights, scale)
        grads = jax.jit(jax.grad(loss, (0, 1, 2)))(tokens, weights, scale)
        return np.asarray(result), tuple(map(np.asarray, grads))


def ours(schedule: str = "auto") -> peers.Peer:
    """Returns our scheme in the shape of a peer."""

    def scheme(
        case: peers.Case,
        tokens: jax.Array,
        expert_ids: jax.Array,
        weights: jax.Array,
        scale: jax.Array,
    ) -> jax.Array:
        rows, group_sizes, state = moe.dispatch(
            tokens,
            expert_ids,
            weights,
            num_experts=case.shape.num_experts,
            axis_name=case.axis_name,
            recv_capacity=case.recv_capacity,
            schedule=schedule,
        )
        place = jnp.arange(case.recv_capacity)
        expert = jnp.searchsorted(
            jnp.cumsum(group_sizes), place, side="right", method="compare_all"
        )
        return moe.combine(peers.scale_rows(rows, expert, scale), state)

    return scheme
