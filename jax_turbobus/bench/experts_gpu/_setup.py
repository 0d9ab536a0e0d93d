"""What the cases on GPUs share: devices, sizes, times."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe
from jax_turbobus.bench._report import Timing, alternate
from jax_turbobus.moe._counts import ExchangeShape

__all__ = ["AXIS", "Setup", "expert_capacity", "over"]

AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class Setup:
    """Where and how often cases run.

    Attributes:
      devices: the ranks.
      rounds: measurements of each.
      shrink: divides every size.
      has_peers: whether GPUs reach each other's memory.
    """

    devices: list[jax.Device]
    rounds: int
    shrink: int
    has_peers: bool

    @property
    def num_ranks(self) -> int:
        """GPUs."""
        return len(self.devices)

    @property
    def mesh(self) -> Mesh:
        """All devices along one axis."""
        return Mesh(np.array(self.devices), (AXIS,), axis_types=(AxisType.Auto,))

    @property
    def access(self) -> str:
        """As rows say it."""
        return "NVLink" if self.has_peers else "no peer access"

    def small(self, size: int) -> int:
        """Returns a size divided by `shrink`, at least 8 times the ranks."""
        return max(size // self.shrink, 8 * self.num_ranks)

    def shape(
        self, tokens: int, hidden: int, num_experts: int, top_k: int
    ) -> ExchangeShape:
        """Returns the sizes of an exchange in bfloat16, of so many tokens a rank."""
        return ExchangeShape(
            tokens_per_rank=self.small(tokens),
            hidden=max(hidden // self.shrink, 64),
            num_experts=num_experts,
            top_k=top_k,
            num_ranks=self.num_ranks,
            dtype="bfloat16",
        )

    def on_mesh(self, function: Callable[..., Any], num_arguments: int) -> Any:
        """Returns a jitted function of arrays that are split over the ranks."""
        specs = (P(AXIS),) * num_arguments
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=P(AXIS))
        )

    def put(self, *arrays: Any) -> list[jax.Array]:
        """Returns arrays split over the ranks."""
        sharding = NamedSharding(self.mesh, P(AXIS))
        return [jax.device_put(x, sharding) for x in arrays]

    def normal(self, shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
        """Returns random values, split over the ranks by the first axis."""
        sharding = NamedSharding(self.mesh, P(AXIS))
        make = jax.jit(
            lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype),
            out_shardings=sharding,
        )
        return make(jax.random.key(seed))  # type: ignore[no-any-return]

    def dispatched(
        self,
        tokens: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        *,
        num_experts: int,
        capacity: int,
    ) -> jax.Array:
        """Returns what the experts get, ``[num_experts, capacity, hidden]``."""

        def run(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            rows, _, _ = moe.dispatch(
                tokens,
                ids,
                weights,
                num_experts=num_experts,
                axis_name=AXIS,
                expert_capacity=capacity,
            )
            return jnp.asarray(rows)

        return jnp.asarray(self.on_mesh(run, 3)(tokens, ids, weights))

    def timings(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Returns the times of calls, in turn, each until its result is ready."""

        def waiting(function: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: jax.block_until_ready(function())

        waits = {name: waiting(function) for name, function in functions.items()}
        return alternate(waits, rounds=self.rounds)

    def times(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Returns the median seconds of calls, as `timings`."""
        timings = self.timings(functions)
        return {name: timing.median for name, timing in timings.items()}


def over(more: Timing, less: Timing) -> float:
    """Returns by how many seconds one function takes longer, the median over rounds."""
    pairs = zip(more.seconds, less.seconds, strict=True)
    return statistics.median(a - b for a, b in pairs)


def expert_capacity(
    ids: np.ndarray[Any, Any],
    *,
    num_experts: int,
    num_ranks: int,
    num_chunks: int = 1,
    is_by_source: bool = False,
    slack: float = 1.25,
) -> int:
    """Returns rows for each expert and chunk: `slack` x balanced, or more if needed.

    Args:
      ids: ``int[num_ranks * tokens_per_rank, top_k]``.
      num_experts: experts in all.
      num_ranks: ranks, which cut their tokens alike.
      num_chunks: into how many parts; they divide the tokens of a rank.
      is_by_source: every rank may fill its own part of an expert's rows only.
      slack: at least so many times what each gets if all get as many.
    """
    parts = ids.reshape(num_ranks, num_chunks, -1)
    counts = np.array(
        [[np.bincount(c, minlength=num_experts) for c in rank] for rank in parts]
    )
    needed = counts.max() * num_ranks if is_by_source else counts.sum(0).max()
    balanced = slack * ids.size / num_chunks / num_experts
    multiple = 8 * num_ranks
    return -(-int(max(needed, balanced)) // multiple) * multiple
