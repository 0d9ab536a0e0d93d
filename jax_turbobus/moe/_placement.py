"""Which expert lives on which rank, and which hot ones on two."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_turbobus.moe import _choice
from jax_turbobus.moe._arguments import check_integer, check_number
from jax_turbobus.moe._placement_search import Load, Objective, crowded_units, search
from jax_turbobus.moe._traffic import Matrix
from jax_turbobus.moe._volume import TopologyLike, wiring_of

__all__ = ["Placement", "plan_placement"]

_EMPTY = -1


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
        wrong = [s for s in self.slots if not _EMPTY <= s < self.num_experts]
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
        per_rank = _check_slots_per_rank(slots_per_rank, num_experts, num_ranks)
        slots: list[int] = []
        for part in np.array_split(np.arange(num_experts), num_ranks):
            slots += [*part.tolist(), *[_EMPTY] * (per_rank - len(part))]
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
            if expert != _EMPTY:
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
        return jnp.where(is_valid, slot, _EMPTY)

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
        is_used = slots != _EMPTY
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
            names = ["-" if e == _EMPTY else str(e) for e in here]
            lines.append(f"rank {rank}: {' '.join(names)}")
        return "\n".join(lines)


def plan_placement(
    traffic: npt.ArrayLike,
    topology: TopologyLike | None = None,
    *,
    num_experts: int | None = None,
    slots_per_rank: int | None = None,
    max_copies: int = 2,
    gpus: Sequence[int] | None = None,
    row_bytes: int = 8192,
    row_seconds: float | None = None,
    max_swaps: int = 400,
) -> Placement:
    """Returns the placement whose busiest link and rank have least to do, as modelled.

    Experts that many tokens want go where links are fast, away from degraded ones;
    experts that tokens want together go to one rank, where they share a copy of the
    token; ranks get like numbers of rows. Spare slots take second copies of the hottest
    experts. The plan is never modelled slower than experts in order.

    Args:
      traffic: a sample of routing, ``int[num_ranks, num_tokens, top_k]`` of logical
        expert ids as the ranks' tokens chose them (ids that are no expert's are
        masked); or just totals, ``float[num_ranks, num_experts]``: rows from each
        rank to each expert.
      topology: the machine, or its name or file as for `Topology.load`; without one,
        all ranks are connected alike.
      num_experts: needed with a sample; it need not be a multiple of the ranks.
      slots_per_rank: experts that a rank has room for; by default just enough. More
        leave room for copies.
      max_copies: of one expert. No rank gets two: its slot stays empty instead.
      gpus: the topology's GPU under each rank; by default the first ones.
      row_bytes: of a row on the wire.
      row_seconds: that an expert works on a row. By default as long as the row takes
        on the median link: an exchange as long as the experts.
      max_swaps: bound on the search.

    Returns:
      A `Placement`, the same for the same arguments.

    Raises:
      TypeError: ids are not integers, or an argument is of the wrong kind.
      ValueError: shapes or sizes that do not fit each other.

    Source: ThunderEP, "topology awareness".
    """
    sample, totals = _read_traffic(traffic, num_experts)
    num_ranks, num_experts = totals.shape
    slots_per_rank = _check_slots_per_rank(slots_per_rank, num_experts, num_ranks)
    max_copies = min(num_ranks, check_integer("max_copies", max_copies, least=1))
    max_swaps = check_integer("max_swaps", max_swaps, least=0)
    row_bytes = check_integer("row_bytes", row_bytes, least=1)
    if row_seconds is not None:
        row_seconds = check_number("row_seconds", row_seconds, may_be_zero=True)
    costs = _choice.CPU_COSTS if topology is None else _choice.GPU_COSTS
    objective = Objective.make(
        wiring_of(num_ranks, topology, gpus),
        row_bytes,
        row_seconds,
        costs.link_bytes_per_s,
    )
    num_slots = num_ranks * slots_per_rank
    best, best_seconds = None, np.inf
    for copies in sorted({1, max_copies if num_slots > num_experts else 1}):
        units = _units(totals, num_slots, copies)
        load = _load(sample, totals, units)
        rank_of = search(load, objective, slots_per_rank, max_swaps, units)
        crowded = crowded_units(rank_of, units)
        if crowded.any():
            units = np.where(crowded, _EMPTY, units)
            load = _load(sample, totals, units)
        seconds = float(objective.seconds(*load.rows(rank_of)))
        if seconds < best_seconds:
            order = np.argsort(rank_of, kind="stable")
            best = Placement(num_experts, num_ranks, tuple(units[order].tolist()))
            best_seconds = seconds
    in_order = Placement.contiguous(num_experts, num_ranks, slots_per_rank)
    units = np.array(in_order.slots)
    load = _load(sample, totals, units)
    rank_of = np.arange(num_slots) // slots_per_rank
    if best is None or objective.seconds(*load.rows(rank_of)) <= best_seconds:
        return in_order
    return best


def _check_slots_per_rank(value: Any, num_experts: int, num_ranks: int) -> int:
    least = -(-num_experts // num_ranks)
    number = least if value is None else check_integer("slots_per_rank", value, least=1)
    if number < least:
        raise ValueError(
            f"slots_per_rank: expected at least {least} for {num_experts} experts on"
            f" {num_ranks} ranks, got {number}"
        )
    return number


def _read_traffic(
    traffic: npt.ArrayLike, num_experts: int | None
) -> tuple[npt.NDArray[np.int64] | None, Matrix]:
    """Returns the sample, -1 where masked, if there is one; and the totals.

    Raises:
      TypeError: ids are not integers.
      ValueError: shapes or numbers that cannot be.
    """
    array = np.asarray(traffic)
    if array.ndim == 2:
        if num_experts not in (None, array.shape[1]):
            raise ValueError(
                f"num_experts: expected {array.shape[1]}, the second axis of traffic"
                f" (numbers of rows, [num_ranks, num_experts]), got {num_experts};"
                " a sample of ids has shape [num_ranks, num_tokens, top_k]"
            )
        if array.dtype.kind not in "iuf" or not np.all(np.isfinite(array)):
            raise ValueError("traffic: expected finite numbers of rows")
        if (array < 0).any():
            raise ValueError(f"traffic: expected rows of 0 and more, got {array.min()}")
        return None, array.astype(np.float64)
    if array.ndim != 3 or 0 in (array.shape[0], array.shape[2]):
        raise ValueError(
            "traffic: expected shape [num_ranks, num_tokens, top_k] (a sample of expert"
            " ids) or [num_ranks, num_experts] (numbers of rows), got"
            f" {list(array.shape)}"
        )
    if array.dtype.kind not in "iu":
        raise TypeError(f"traffic: expected integer expert ids, got {array.dtype}")
    if num_experts is None:
        raise ValueError(
            "num_experts: expected the number of experts with a sample, got None"
        )
    num_experts = check_integer("num_experts", num_experts, least=1)
    is_valid = (array >= 0) & (array < num_experts)
    sample = np.where(is_valid, array, _EMPTY).astype(np.int64)
    totals = np.stack(
        [np.bincount(ids[ids >= 0], minlength=num_experts) for ids in sample]
    )
    return sample, totals.astype(np.float64)


def _units(totals: Matrix, num_slots: int, max_copies: int) -> npt.NDArray[np.int64]:
    """Returns what is to be placed: experts, second copies of hot ones, empty slots."""
    heat = totals.sum(axis=0)
    number = np.ones(len(heat), np.int64)
    for _ in range(num_slots - len(heat)):
        share = np.where(number < max_copies, heat / number, 0.0)
        if share.max(initial=0.0) <= 0:
            break
        number[share.argmax()] += 1
    units = np.repeat(np.arange(len(heat)), number)
    return np.append(units, np.full(num_slots - len(units), _EMPTY))


def _load(
    sample: npt.NDArray[np.int64] | None, totals: Matrix, units: npt.NDArray[np.int64]
) -> Load:
    """Returns the load of units: tokens take the copies of an expert in turn."""
    number = np.bincount(units[units >= 0], minlength=totals.shape[1])
    where: list[list[int]] = [[] for _ in range(totals.shape[1])]
    for unit, expert in enumerate(units):
        if expert != _EMPTY:
            where[expert].append(unit)
    if sample is None:
        share = np.zeros((totals.shape[0], len(units)))
        used = units >= 0
        share[:, used] = (totals / number)[:, units[used]]
        return Load(share, [])
    most = int(number.max())
    table = np.array([(w * most)[:most] for w in where])
    turn = np.arange(sample.shape[1])[None, :, None] % number[sample]
    chosen = np.where(sample >= 0, table[sample, turn], _EMPTY)
    by_unit = np.zeros((len(sample), len(units)))
    for rank, ids in enumerate(chosen):
        # A token that names an expert twice gets one row of it.
        has = np.zeros((len(ids), len(units) + 1), bool)
        np.put_along_axis(has, ids, True, axis=1)
        by_unit[rank] = has[:, :-1].sum(axis=0)
    return Load(by_unit, list(chosen))
