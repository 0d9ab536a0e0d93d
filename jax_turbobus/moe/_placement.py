"""Experts in the slots of ranks: routing, and parameters in that order."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus.moe._arguments import check_integer

__all__ = ["EMPTY", "Placement", "check_slots_per_rank"]

# In a slot that has no expert.
EMPTY = -1


@dataclasses.dataclass(frozen=True)
class Placement:
    """Experts in the slots of ranks; a slot is a physical expert.

    Rank r has the physical experts ``[r * slots_per_rank, (r + 1) * slots_per_rank)``,
    as `dispatch` wants them: route logical ids through `route`, give it
    ``num_experts=placement.num_slots``, and bring stacked parameters into the order of
    slots with `permute`.

    Attributes:
      num_experts: logical experts.
      num_ranks: ranks.
      slots: the logical expert in each slot, by rank; -1 in empty slots, which no
        token reaches.
    """

    num_experts: int
    num_ranks: int
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_ranks"):
            number = check_integer(name, getattr(self, name), least=1)
            object.__setattr__(self, name, number)
        try:
            object.__setattr__(self, "slots", tuple(map(operator.index, self.slots)))
        except TypeError:
            raise TypeError(
                f"slots: expected an integer for each slot, got {self.slots!r}"
            ) from None
        if len(self.slots) % self.num_ranks:
            raise ValueError(
                f"slots: expected a multiple of num_ranks={self.num_ranks} entries, got"
                f" {len(self.slots)}"
            )
        wrong = [s for s in self.slots if not EMPTY <= s < self.num_experts]
        missing = set(range(self.num_experts)) - set(self.slots)
        if wrong or missing:
            raise ValueError(
                f"slots: expected each of {self.num_experts} experts at least once, and"
                f" -1 for empty slots; missing: {sorted(missing)}, not experts: {wrong}"
            )

    @classmethod
    def contiguous(
        cls, num_experts: int, num_ranks: int, slots_per_rank: int | None = None
    ) -> "Placement":
        """Returns experts in order, what every library does without a plan.

        Where there are more slots than experts, the empty ones are spread over ranks.

        Args:
          num_experts: logical experts; need not be a multiple of `num_ranks`.
          num_ranks: ranks.
          slots_per_rank: by default just enough.

        Raises:
          TypeError: a number is not an integer.
          ValueError: numbers below 1, or too few slots.
        """
        num_experts = check_integer("num_experts", num_experts, least=1)
        num_ranks = check_integer("num_ranks", num_ranks, least=1)
        per_rank = check_slots_per_rank(slots_per_rank, num_experts, num_ranks)
        slots: list[int] = []
        for part in np.array_split(np.arange(num_experts), num_ranks):
            slots += [*part.tolist(), *[EMPTY] * (per_rank - len(part))]
        return cls(num_experts, num_ranks, tuple(slots))

    @property
    def num_slots(self) -> int:
        """Slots of all ranks: what `dispatch` takes as `num_experts`."""
        return len(self.slots)

    @property
    def slots_per_rank(self) -> int:
        """Slots of one rank."""
        return self.num_slots // self.num_ranks

    @functools.cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each logical expert, in order."""
        where: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slots):
            if expert != EMPTY:
                where[expert].append(slot)
        return tuple(map(tuple, where))

    def route(self, expert_ids: jax.typing.ArrayLike) -> jax.Array:
        """Returns the slot that each choice goes to.

        Tokens take the copies of an expert in turn, by their index: static, the same in
        forward and backward, and even over copies whoever sends.

        Args:
          expert_ids: ``int[..., num_tokens, top_k]`` logical ids; ids outside
            ``[0, num_experts)`` stay masked.

        Returns:
          ``int32[..., num_tokens, top_k]`` of slots, -1 where masked.

        Raises:
          TypeError: `expert_ids` are not integers.
          ValueError: they have less than two axes.
        """
        # Before JAX cuts 64-bit ids to 32 bits.
        wide = (
            expert_ids if isinstance(expert_ids, jax.Array) else np.asarray(expert_ids)
        )
        if not jnp.issubdtype(wide.dtype, jnp.integer):
            raise TypeError(f"route: expert_ids: expected integers, got {wide.dtype}")
        if wide.ndim < 2:
            raise ValueError(
                "route: expert_ids: expected shape [..., num_tokens, top_k], got"
                f" {list(wide.shape)}"
            )
        if wide.dtype.itemsize < np.dtype(np.int32).itemsize:
            wide = wide.astype(np.int32)
        is_valid = (wide >= 0) & (wide < self.num_experts)
        where = jnp.where if isinstance(wide, jax.Array) else np.where
        known: jax.Array = jnp.asarray(where(is_valid, wide, 0), jnp.int32)
        most = max(map(len, self.copies))
        table = np.array([(c * most)[:most] for c in self.copies], np.int32)
        number = np.array([len(c) for c in self.copies], np.int32)
        token = jnp.arange(known.shape[-2], dtype=jnp.int32)[:, None]
        turn = token % jnp.asarray(number)[known]
        slot: jax.Array = jnp.asarray(table)[known, turn]
        return jnp.where(is_valid, slot, EMPTY)

    def permute(self, params: Any) -> Any:
        """Returns parameters stacked by slot, from parameters stacked by expert.

        Differentiable: the gradients of an expert's copies add up.

        Args:
          params: a tree of arrays ``[num_experts, ...]``.

        Returns:
          The same tree of ``[num_slots, ...]``; zero in empty slots. With one copy of
          each expert and none empty, a permutation.

        Raises:
          ValueError: a leaf has another first axis.
        """
        slots = np.array(self.slots)
        is_used = slots != EMPTY
        source = np.where(is_used, slots, 0)

        def leaf(x: Any) -> jax.Array:
            x = self._checked("permute", x, self.num_experts)
            moved: jax.Array = jnp.take(x, source, axis=0)
            if is_used.all():
                return moved
            used = is_used.reshape(-1, *(1,) * (x.ndim - 1))
            used_rows: jax.Array = jnp.where(used, moved, jnp.zeros_like(moved))
            return used_rows

        return jax.tree.map(leaf, params)

    def restore(self, params: Any) -> Any:
        """Returns parameters stacked by expert, from parameters stacked by slot.

        Undoes `permute`; of an expert with copies it takes the first.

        Args:
          params: a tree of arrays ``[num_slots, ...]``.

        Raises:
          ValueError: a leaf has another first axis.
        """
        first = np.array([copies[0] for copies in self.copies])
        return jax.tree.map(
            lambda x: jnp.take(
                self._checked("restore", x, self.num_slots), first, axis=0
            ),
            params,
        )

    def _checked(self, op: str, x: Any, size: int) -> jax.Array:
        array: jax.Array = jnp.asarray(x)
        if array.ndim < 1 or array.shape[0] != size:
            raise ValueError(
                f"{op}: params: expected a first axis of {size} in every leaf, got"
                f" shape {list(array.shape)}"
            )
        return array

    def __str__(self) -> str:
        lines = []
        for rank in range(self.num_ranks):
            begin = rank * self.slots_per_rank
            here = self.slots[begin : begin + self.slots_per_rank]
            names = ["-" if e == EMPTY else str(e) for e in here]
            lines.append(f"rank {rank}: {' '.join(names)}")
        return "\n".join(lines)


def check_slots_per_rank(value: Any, num_experts: int, num_ranks: int) -> int:
    """Returns the slots of a rank: just enough where `value` is None.

    Raises:
      TypeError: it is not an integer.
      ValueError: it is too few.
    """
    least = -(-num_experts // num_ranks)
    number = least if value is None else check_integer("slots_per_rank", value, least=1)
    if number < least:
        raise ValueError(
            f"slots_per_rank: expected at least {least} for {num_experts} experts on"
            f" {num_ranks} ranks, got {number}"
        )
    return number
