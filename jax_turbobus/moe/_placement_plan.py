"""Which expert should live on which rank, and which hot ones on two."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jax_turbobus.moe import _choice
from jax_turbobus.moe._arguments import check_integer, check_number
from jax_turbobus.moe._counts import Matrix
from jax_turbobus.moe._placement import EMPTY, Placement, check_slots_per_rank
from jax_turbobus.moe._placement_search import Load, Objective, crowded_units, search
from jax_turbobus.moe._volume import TopologyLike, wiring_of

__all__ = ["plan_placement"]


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
    slots_per_rank = check_slots_per_rank(slots_per_rank, num_experts, num_ranks)
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
            units = np.where(crowded, EMPTY, units)
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
    sample = np.where(is_valid, array, EMPTY).astype(np.int64)
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
    return np.append(units, np.full(num_slots - len(units), EMPTY))


def _load(
    sample: npt.NDArray[np.int64] | None, totals: Matrix, units: npt.NDArray[np.int64]
) -> Load:
    """Returns the load of units: tokens take the copies of an expert in turn."""
    number = np.bincount(units[units >= 0], minlength=totals.shape[1])
    where: list[list[int]] = [[] for _ in range(totals.shape[1])]
    for unit, expert in enumerate(units):
        if expert != EMPTY:
            where[expert].append(unit)
    if sample is None:
        share = np.zeros((totals.shape[0], len(units)))
        used = units >= 0
        share[:, used] = (totals / number)[:, units[used]]
        return Load(share, [])
    most = int(number.max())
    table = np.array([(w * most)[:most] for w in where])
    turn = np.arange(sample.shape[1])[None, :, None] % number[sample]
    chosen = np.where(sample >= 0, table[sample, turn], EMPTY)
    by_unit = np.zeros((len(sample), len(units)))
    for rank, ids in enumerate(chosen):
        # A token that names an expert twice gets one row of it.
        has = np.zeros((len(ids), len(units) + 1), bool)
        np.put_along_axis(has, ids, True, axis=1)
        by_unit[rank] = has[:, :-1].sum(axis=0)
    return Load(by_unit, list(chosen))
