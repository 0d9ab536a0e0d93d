"""Lets a trained model write, a byte at a time."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus.demo import model
from jax_turbobus.demo.train import AXIS, Trainer

__all__ = ["PROMPTS", "write"]

PROMPTS = ("def ", "class ", "import ", "    return ")


def write(
    trainer: Trainer,
    num_bytes: int,
    prompts: Sequence[str] = PROMPTS,
    temperature: float = 0.6,
    seed: int = 0,
) -> list[str]:
    """Returns what the model makes of each prompt, the prompt included.

    Args:
      trainer: holds the trained parameters.
      num_bytes: bytes to add to every prompt.
      prompts: as many as there are devices are continued, one on each.
      temperature: 0 takes the likeliest byte; 1 samples as the model believes.
      seed: of the draw.
    """
    num_ranks = trainer.mesh.size
    context = trainer.model_config.context
    # Nothing dropped: text must not depend on what other ranks write.
    config = dataclasses.replace(
        trainer.model_config,
        capacity_factor=trainer.model_config.num_experts / trainer.model_config.top_k,
    )

    def next_logits(
        params: model.Params, inputs: jax.Array, at: jax.Array
    ) -> jax.Array:
        logits, *_ = model.apply(params, inputs, config, trainer.backend.exchange, AXIS)
        return jnp.take_along_axis(logits, at[:, None, None], axis=1)[:, 0]

    step = jax.jit(
        jax.shard_map(
            next_logits,
            mesh=trainer.mesh,
            in_specs=(model.param_specs(trainer.params, AXIS), P(AXIS), P(AXIS)),
            out_specs=P(AXIS),
        )
    )
    sharding = NamedSharding(trainer.mesh, P(AXIS))
    rng = np.random.default_rng(seed)
    # A newline before each prompt: to the model it begins a line.
    texts = [
        bytearray(b"\n" + prompts[rank % len(prompts)].encode())
        for rank in range(num_ranks)
    ]
    for _ in range(num_bytes):
        inputs = np.full((num_ranks, context), ord("\n"), np.int32)
        at = np.zeros(num_ranks, np.int32)
        for rank, written in enumerate(texts):
            tail = written[-context:]
            inputs[rank, : len(tail)] = np.frombuffer(tail, np.uint8)
            at[rank] = len(tail) - 1
        logits = np.asarray(
            step(trainer.params, *jax.device_put((inputs, at), sharding))
        )
        noise = rng.gumbel(size=logits.shape)
        for written, choice in zip(
            texts, np.argmax(logits + temperature * noise, axis=-1), strict=True
        ):
            written.append(int(choice))
    return [_printable(bytes(written[1:])) for written in texts[: len(prompts)]]


def _printable(text: bytes) -> str:
    """Returns text in which what a terminal would obey is shown instead."""
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}"
        for c in text.decode(errors="replace").expandtabs()
    )
