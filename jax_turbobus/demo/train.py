"""Trains the demo's model: experts over the devices, Adam's moments on the host.

One jitted step holds everything. Parameters live on the devices (experts split over the
mesh, the rest replicated). Adam's moments are split over the mesh too, live in pinned
host memory, come in for the update and go back into the same buffers.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus.demo import model, text
from jax_turbobus.demo.backends import Backend
from jax_turbobus.demo.model import Aux, ModelConfig

__all__ = ["AXIS", "Point", "Step", "TrainConfig", "Trainer"]

AXIS = "devices"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long and how fast to learn."""

    num_steps: int = 600
    batch: int = 16  # windows a step, on all devices
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    eval_every: int = 50
    eval_batches: int = 8
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of a curve: nats per byte after `step` updates."""

    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Step:
    """What one update did.

    Attributes:
      step: updates done, this one included.
      loss: cross entropy of its batch before the update, nats per byte.
      dropped: rows over an expert's capacity.
      expert_ids: `int32[num_layers, num_tokens, top_k]`, where tokens went.
      held_out: the held-out loss after this update, where it was measured.
      seconds: since training began, compilation included.
    """

    step: int
    loss: float
    dropped: int
    expert_ids: np.ndarray
    held_out: float | None
    seconds: float


class Trainer:
    """Parameters, optimizer state and the compiled step of one training run.

    Attributes:
      mesh: the devices, on one axis.
      params: the model's parameters, on the devices.
      opt_state: Adam's moments in pinned host memory, its counters on the device.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        train_config: TrainConfig,
        backend: Backend,
        corpus: text.Corpus,
        devices: list[jax.Device],
    ) -> None:
        self.model_config = model_config
        self.config = train_config
        self.backend = backend
        self.corpus = corpus
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self._batch_sharding = NamedSharding(self.mesh, P(AXIS))
        params = model.init(model_config, train_config.seed)
        self._specs = model.param_specs(params, AXIS)
        param_shardings = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), self._specs
        )
        self.params = jax.device_put(params, param_shardings)
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=train_config.learning_rate,
            warmup_steps=train_config.warmup_steps,
            decay_steps=max(train_config.num_steps, train_config.warmup_steps + 1),
            end_value=0.05 * train_config.learning_rate,
        )
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99)
        )
        opt_state = jax.jit(self._optimizer.init)(params)
        opt_shardings = jax.tree.map(self._opt_sharding, opt_state)
        self.opt_state = jax.device_put(opt_state, opt_shardings)
        self._loss = self._sharded_loss()
        aux_shardings = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), self._aux_specs()
        )
        self._step = jax.jit(
            self._update,
            donate_argnums=(0, 1),
            out_shardings=(param_shardings, opt_shardings, aux_shardings),
        )
        self._eval = jax.jit(lambda p, w: self._loss(p, w)[1].cross_entropy)

    def _opt_sharding(self, leaf: Any) -> NamedSharding:
        if jnp.ndim(leaf) == 0:
            return NamedSharding(self.mesh, P())
        return NamedSharding(self.mesh, P(AXIS), memory_kind="pinned_host")

    def _aux_specs(self) -> Aux:
        specs: tuple[Any, ...] = (P(), P(), P(None, AXIS))
        return Aux(*specs)

    def _sharded_loss(self) -> Callable[..., tuple[jax.Array, Aux]]:
        def loss(params: Any, windows: jax.Array) -> tuple[jax.Array, Aux]:
            return model.loss(
                params, windows, self.model_config, self.backend.exchange, AXIS
            )

        return jax.shard_map(
            loss,
            mesh=self.mesh,
            in_specs=(self._specs, P(AXIS)),
            out_specs=(P(), self._aux_specs()),
        )

    def _update(
        self, params: Any, opt_state: Any, windows: jax.Array
    ) -> tuple[Any, Any, Aux]:
        grads, aux = jax.grad(self._loss, has_aux=True)(params, windows)
        on_device = jax.tree.map(
            lambda x: self.backend.to_device(x) if x.ndim else x, opt_state
        )
        updates, new_state = self._optimizer.update(grads, on_device)
        new_state = jax.tree.map(
            lambda x, out: self.backend.to_host(x, out) if x.ndim else x,
            new_state,
            opt_state,
        )
        return optax.apply_updates(params, updates), new_state, aux

    def held_out_loss(self) -> float:
        """Returns nats per byte on held-out windows, the same ones every time."""
        rng = np.random.default_rng(self.config.seed + 1)
        losses = []
        for _ in range(self.config.eval_batches):
            batch = self._windows(self.corpus.held_out, rng)
            losses.append(float(self._eval(self.params, batch)))
        return float(np.mean(losses))

    def _windows(self, data: np.ndarray, rng: np.random.Generator) -> jax.Array:
        batch = text.windows(data, rng, self.config.batch, self.model_config.context)
        return jax.device_put(batch, self._batch_sharding)

    def run(self) -> Iterator[Step]:
        """Yields after every update; closing the iterator stops the training."""
        rng = np.random.default_rng(self.config.seed + 2)
        started = time.perf_counter()
        for step in range(1, self.config.num_steps + 1):
            batch = self._windows(self.corpus.train, rng)
            self.params, self.opt_state, aux = self._step(
                self.params, self.opt_state, batch
            )
            is_last = step == self.config.num_steps
            measured = step % self.config.eval_every == 0 or is_last
            held_out = self.held_out_loss() if measured else None
            yield Step(
                step=step,
                loss=float(aux.cross_entropy),
                dropped=int(aux.dropped),
                expert_ids=np.asarray(aux.expert_ids),
                held_out=held_out,
                seconds=time.perf_counter() - started,
            )
