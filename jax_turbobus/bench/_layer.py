"""One comparison of exchanges: its data, its programs, and what is right."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe
from jax_turbobus.bench import peers

__all__ = ["METRICS", "Layer", "ours"]

METRICS = ("forward", "forward + backward")

# Of the arguments of one layer: expert ids, weights, scales.
_PER_LAYER = 3


@dataclasses.dataclass(frozen=True)
class Layer:
    """One comparison's programs and data: one layer, or several in each program.

    Attributes:
      case: what all schemes share.
      mesh: all devices, along `case.axis_name`.
      arguments: tokens, and then expert ids, weights and scales of each layer, of all
        ranks, sharded. What a layer returns is the next one's tokens.
      programs: what has been compiled already.
    """

    case: peers.Case
    mesh: Mesh
    arguments: tuple[jax.Array, ...]
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def make(
        cls,
        case: peers.Case,
        mesh: Mesh,
        expert_ids: np.ndarray[Any, Any] | Sequence[np.ndarray[Any, Any]],
        seed: int,
    ) -> "Layer":
        """Returns random values under the given routing.

        Args:
          case: what all schemes share.
          mesh: all devices, along `case.axis_name`.
          expert_ids: ``int32[tokens, top_k]``, or several of them: a layer each.
          seed: of the values.
        """
        shape = case.shape
        rng = np.random.default_rng(seed)
        layers = [expert_ids] if isinstance(expert_ids, np.ndarray) else expert_ids
        tokens = rng.standard_normal((len(layers[0]), shape.hidden), np.float32)
        values = [tokens.astype(shape.dtype)]
        for ids in layers:
            weights = rng.random(ids.shape, np.float32)
            scale = rng.standard_normal((shape.num_experts, shape.hidden), np.float32)
            # Sums of weights are 1 and scales about 1: values keep their size from
            # layer to layer.
            weights /= weights.sum(axis=1, keepdims=True)
            values += [ids, weights, 1 + 0.1 * scale]
        return cls(case, mesh, _on_mesh(case, mesh, values))

    @classmethod
    def make_exact(
        cls,
        case: peers.Case,
        mesh: Mesh,
        expert_ids: Sequence[np.ndarray[Any, Any]],
        seed: int,
    ) -> "Layer":
        """Returns values of which every order of sums is exact, bfloat16 included.

        Tokens are whole numbers of five bits, scales 1 or -1, weights 3/4 and 1/4: what
        a layer returns is each token times 1, 1/2, -1/2 or -1.

        Args:
          case: what all schemes share; top-2.
          mesh: all devices, along `case.axis_name`.
          expert_ids: ``int32[tokens, 2]`` of each layer.
          seed: of the values.
        """
        shape = case.shape
        rng = np.random.default_rng(seed)
        size = len(expert_ids[0]), shape.hidden

        def signs(size: tuple[int, int]) -> np.ndarray[Any, Any]:
            return 2 * rng.integers(0, 2, size, np.int8) - 1

        tokens = rng.integers(1, 32, size, np.int8) * signs(size)
        values = [tokens.astype(shape.dtype)]
        for ids in expert_ids:
            scale = signs((shape.num_experts, shape.hidden))
            weights = np.broadcast_to(np.array([0.75, 0.25], np.float32), ids.shape)
            values += [ids, weights, scale.astype(np.float32)]
        return cls(case, mesh, _on_mesh(case, mesh, values))

    @property
    def num_layers(self) -> int:
        """In one program."""
        return len(self.arguments) // _PER_LAYER

    def forward(self, scheme: peers.Peer, calls: int = 1) -> Callable[[], jax.Array]:
        """Returns compiled calls of one scheme, which wait for the last one only.

        Of several calls each one's way from Python to the devices and back is hidden.
        """
        return _waiting(self.program("forward", scheme), calls)

    def forward_backward(self, scheme: peers.Peer, calls: int = 1) -> Callable[[], Any]:
        """Returns compiled calls of one scheme and its gradients, as `forward`."""
        return _waiting(self.program("forward + backward", scheme), calls)

    def program(self, metric: str, scheme: peers.Peer) -> Callable[[], Any]:
        """Returns a compiled call that is not waited for.

        Args:
          metric: one of `METRICS`.
          scheme: whose.
        """
        key = metric, scheme
        if key not in self.programs:
            function = self.mapped(scheme)
            if metric != "forward":
                function = _gradients(function)
            self.programs[key] = jax.jit(function).lower(*self.arguments).compile()
        return functools.partial(self.programs[key], *self.arguments)

    def mapped(self, scheme: peers.Peer) -> Callable[..., jax.Array]:
        """Returns a scheme, layer after layer, of the arrays of all ranks."""
        spec = P(self.case.axis_name)

        def one(*arguments: jax.Array) -> jax.Array:
            return scheme(self.case, *arguments)

        return jax.shard_map(
            _one_after_another(one),
            mesh=self.mesh,
            in_specs=(spec,) * len(self.arguments),
            out_specs=spec,
        )

    def reference(self) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Returns the dense result and its gradients, made on one device.

        One layer is compiled, and run for each.
        """
        home = self.mesh.devices.flat[0]
        tokens, *rest = jax.device_put(self.arguments, home)
        layers = [rest[i : i + _PER_LAYER] for i in range(0, len(rest), _PER_LAYER)]
        inputs = []
        for layer in layers:
            inputs.append(tokens)
            tokens = _dense(tokens, *layer)
        # The gradient of `sum(y ** 2) / 2` is y.
        gradient = tokens
        gradients: list[jax.Array] = []
        for x, layer in zip(reversed(inputs), reversed(layers), strict=True):
            gradient, *of_layer = _dense_backward(x, *layer, gradient)
            gradients = [*of_layer, *gradients]
        return tokens, (gradient, *gradients)


def _on_mesh(
    case: peers.Case, mesh: Mesh, values: Sequence[Any]
) -> tuple[jax.Array, ...]:
    sharding = NamedSharding(mesh, P(case.axis_name))
    return tuple(jax.device_put(list(values), [sharding] * len(values)))


_dense = jax.jit(peers.dense)


@jax.jit
def _dense_backward(
    tokens: jax.Array, ids: jax.Array, weights: jax.Array, scale: jax.Array, dy: Any
) -> Any:
    _, pull = jax.vjp(lambda t, w, s: peers.dense(t, ids, w, s), tokens, weights, scale)
    return pull(dy)


def _waiting(start: Callable[[], Any], calls: int) -> Callable[[], Any]:
    def run() -> Any:
        for _ in range(calls - 1):
            start()
        return jax.block_until_ready(start())

    return run


def _one_after_another(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function of tokens and of each layer's arguments in turn."""

    def run(tokens: jax.Array, *layers: jax.Array) -> jax.Array:
        for i in range(0, len(layers), _PER_LAYER):
            tokens = layer(tokens, *layers[i : i + _PER_LAYER])
        return tokens

    return run


def _gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns the gradients of ``sum(y ** 2) / 2`` in all but the expert ids."""

    def loss(*arguments: jax.Array) -> jax.Array:
        y = function(*arguments).astype(jnp.float32)
        return jnp.sum(y * y) / 2

    def run(*arguments: jax.Array) -> Any:
        is_number = [jnp.issubdtype(x.dtype, jnp.floating) for x in arguments]
        wanted = tuple(i for i, number in enumerate(is_number) if number)
        return jax.grad(loss, wanted)(*arguments)

    return run


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
