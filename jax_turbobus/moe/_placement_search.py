"""The search behind `plan_placement`: swap experts while the busiest link gets freer.

Deterministic, NumPy only. A *unit* is one copy of an expert, or an empty slot: what
occupies one slot of one rank. Units keep their load and change places.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_turbobus.moe._counts import Matrix
from jax_turbobus.moe._wiring import Wiring

__all__ = ["Load", "Objective", "crowded_units", "search"]

Ints = npt.NDArray[np.int64]

# Swaps that look best by their estimate and are worked out exactly.
_SHORTLIST = 24
# Of the links' mean time, added to the busiest one's: among plans whose busiest links
# are alike, less traffic is better.
_TIE_BREAK = 0.02
# A swap has to make the score smaller by this part of it.
_WORTH_A_SWAP = 2e-4


class Load:
    """Rows that ranks send to units: sampled tokens with their units, or totals.

    Attributes:
      by_unit: ``float64[num_ranks, num_units]``: rows without dedup.
      together: ``float64[num_units, num_units]``: tokens that want both; 0 on the
        diagonal, and everywhere if only totals are known.
    """

    def __init__(self, by_unit: Matrix, units: Sequence[npt.NDArray[np.int64]]) -> None:
        """Makes a load.

        Args:
          by_unit: rows from each rank to each unit.
          units: for each rank, ``int[tokens, top_k]`` units of its sampled tokens
            (-1: masked), so that a rank's second copy of a token costs nothing; empty
            where only totals are known.
        """
        self.by_unit = by_unit
        num_ranks, num_units = by_unit.shape
        self._tokens: list[npt.NDArray[np.int64]] = [
            np.zeros(0, np.int64) for _ in range(num_units)
        ]
        self._sources = np.zeros(0, np.int64)
        self._has = np.zeros((0, 0), bool)
        self.together = np.zeros((num_units, num_units))
        if not units:
            return
        self._sources = np.repeat(np.arange(num_ranks), [len(u) for u in units])
        chosen = np.concatenate(units)
        self._has = np.zeros((num_units + 1, len(chosen)), bool)
        self._has[chosen.T, np.arange(len(chosen))] = True  # -1 falls on the last row
        self._has = self._has[:-1]
        self._tokens = [np.flatnonzero(row) for row in self._has]
        has = self._has.astype(np.float32)
        self.together = np.asarray(has @ has.T, np.float64)
        np.fill_diagonal(self.together, 0.0)

    def rows(self, rank_of: npt.NDArray[np.int64]) -> tuple[Matrix, Matrix]:
        """Returns rows from rank to rank, one a destination, and one an expert."""
        num_ranks = self.by_unit.shape[0]
        hot = np.eye(num_ranks)[rank_of]
        copies = self.by_unit @ hot
        if not len(self._sources):
            return copies, copies
        unique = np.zeros((num_ranks, num_ranks))
        for rank, here in enumerate(self._present(rank_of)):
            unique[:, rank] = np.bincount(self._sources[here], minlength=num_ranks)
        return unique, copies

    def _present(self, rank_of: npt.NDArray[np.int64]) -> list[npt.NDArray[np.bool_]]:
        ranks = range(self.by_unit.shape[0])
        return [self._has[rank_of == rank].any(axis=0) for rank in ranks]

    def swapped(
        self,
        rank_of: npt.NDArray[np.int64],
        unique: Matrix,
        copies: Matrix,
        pair: tuple[int, int],
    ) -> tuple[Matrix, Matrix]:
        """Returns what `rows` would after two units have changed places."""
        e, f = pair
        a, b = int(rank_of[e]), int(rank_of[f])
        step = self.by_unit[:, e] - self.by_unit[:, f]
        copies = copies.copy()
        copies[:, a] -= step
        copies[:, b] += step
        if not len(self._sources):
            return copies, copies
        unique = unique.copy()
        for rank, loses, gains in ((a, e, f), (b, f, e)):
            others = np.flatnonzero(rank_of == rank)
            others = others[others != loses]
            for unit, sign in ((loses, -1), (gains, 1)):
                tokens = self._tokens[unit]
                alone = ~self._has[np.ix_(others, tokens)].any(axis=0)
                counts = np.bincount(
                    self._sources[tokens[alone]], minlength=len(unique)
                )
                unique[:, rank] += sign * counts
        return unique, copies


@dataclasses.dataclass(frozen=True)
class Objective:
    """Modelled seconds of a placement: links there and back, then the experts.

    Attributes:
      crossings: ``float64[num_ranks, num_ranks, num_links]``: how often bytes from
        rank to rank cross each link.
      link_bytes_per_s: ``float64[num_links]``.
      row_bytes: of a row on the wire.
      row_seconds: that an expert works on a row.
    """

    crossings: npt.NDArray[np.float64]
    link_bytes_per_s: npt.NDArray[np.float64]
    row_bytes: int
    row_seconds: float

    @classmethod
    def make(
        cls,
        wiring: Wiring,
        row_bytes: int,
        row_seconds: float | None,
        assumed_bytes_per_s: float,
    ) -> "Objective":
        """Returns the objective on a machine's links.

        Args:
          wiring: the links.
          row_bytes: of a row.
          row_seconds: None: as long as a row takes on the median link.
          assumed_bytes_per_s: of links whose rate is unknown.
        """
        num_ranks = wiring.num_ranks
        crossings = np.zeros((num_ranks, num_ranks, len(wiring.links)))
        for a, row in enumerate(wiring.paths):
            for b, path in enumerate(row):
                np.add.at(crossings[a, b], list(path), 1.0)
        rates = np.array(
            [k.bandwidth_bytes_per_s or assumed_bytes_per_s for k in wiring.links]
        )
        used = crossings.any(axis=(0, 1))
        if row_seconds is None:
            row_seconds = row_bytes / float(np.median(rates[used])) if used.any() else 0
        return cls(crossings[:, :, used], rates[used], row_bytes, row_seconds)

    def link_seconds(self, unique: Matrix) -> Matrix:
        """Returns how long each link is busy, there and back in one figure each.

        Args:
          unique: ``float64[..., num_ranks, num_ranks]`` rows.

        Returns:
          ``float64[2, ..., num_links]``: dispatch, combine.
        """
        there = np.tensordot(unique, self.crossings, axes=2)
        back = np.tensordot(np.swapaxes(unique, -1, -2), self.crossings, axes=2)
        return np.stack([there, back]) * (self.row_bytes / self.link_bytes_per_s)

    def seconds(self, unique: Matrix, copies: Matrix) -> npt.NDArray[np.float64]:
        """Returns the modelled time, ``float64[...]``."""
        links = self.link_seconds(unique)
        busiest = links.max(axis=-1, initial=0.0).sum(axis=0)
        work = copies.sum(axis=-2).max(axis=-1) * self.row_seconds
        return np.asarray(busiest + work, np.float64)

    def score(self, unique: Matrix, copies: Matrix) -> npt.NDArray[np.float64]:
        """Returns what the search makes small: `seconds`, ties broken."""
        total = self.link_seconds(unique).sum(axis=(0, -1))
        spread = (copies.sum(axis=-2) ** 2).sum(axis=-1) ** 0.5 * self.row_seconds
        num_links = max(1, len(self.link_bytes_per_s))
        tie = _TIE_BREAK * (total / num_links + spread / copies.shape[-1])
        return np.asarray(self.seconds(unique, copies) + tie, np.float64)


def search(
    load: Load,
    objective: Objective,
    slots_per_rank: int,
    max_swaps: int,
    expert_of: Ints,
) -> Ints:
    """Returns the rank of each unit, ``int64[num_units]``; all slots are filled.

    Heaviest units first, each where it hurts least; then the best swap, again and
    again, until none helps.

    Args:
      load: of ``num_ranks * slots_per_rank`` units.
      objective: what to make small.
      slots_per_rank: units of a rank.
      max_swaps: when to stop at the latest.
      expert_of: ``int64[num_units]``, -1 for empty slots. Units of one expert go to
        different ranks; `crowded_units` tells where that could not be.
    """
    rank_of = _greedy(load, objective, slots_per_rank, expert_of)
    rank_of = _spread(rank_of, expert_of)
    unique, copies = load.rows(rank_of)
    best = float(objective.score(unique, copies))
    for _ in range(max_swaps):
        found, goal = None, best * (1 - _WORTH_A_SWAP)
        for pair in _shortlist(load, objective, rank_of, unique, copies, expert_of):
            candidate = load.swapped(rank_of, unique, copies, pair)
            score = float(objective.score(*candidate))
            if score < min(best, goal):
                best, found = score, (pair, candidate)
        if found is None:
            break
        (e, f), (unique, copies) = found
        rank_of[[e, f]] = rank_of[[f, e]]
    return rank_of


def crowded_units(rank_of: Ints, expert_of: Ints) -> npt.NDArray[np.bool_]:
    """Returns which units share a rank with an earlier unit of the same expert."""
    places = rank_of * (expert_of.max(initial=0) + 1) + expert_of
    first = np.zeros(len(places), bool)
    first[np.unique(places, return_index=True)[1]] = True
    return ~first & (expert_of >= 0)


def _holds(rank_of: Ints, expert_of: Ints) -> Ints:
    """Returns how many units of each expert ranks have, ``[num_ranks, num_experts]``.

    The last column, of empty slots, is 0.
    """
    holds = np.zeros((rank_of.max() + 1, expert_of.max(initial=0) + 2), np.int64)
    np.add.at(holds, (rank_of, expert_of), 1)
    holds[:, -1] = 0
    return holds


def _may_swap(rank_of: Ints, expert_of: Ints, e: Ints, f: Ints) -> Any:
    """Returns whether units e and f may change places: no rank gets an expert twice."""
    holds = _holds(rank_of, expert_of)
    is_same = expert_of[e] == expert_of[f]
    return is_same | (
        (holds[rank_of[f], expert_of[e]] == 0) & (holds[rank_of[e], expert_of[f]] == 0)
    )


def _spread(rank_of: Ints, expert_of: Ints) -> Ints:
    """Returns a placement of fewer crowded units, if a swap of each with one helps."""
    rank_of = rank_of.copy()
    others = np.arange(len(rank_of))
    for unit in np.flatnonzero(crowded_units(rank_of, expert_of)).tolist():
        able = _may_swap(rank_of, expert_of, np.full_like(others, unit), others)
        able &= expert_of != expert_of[unit]
        if able.any():
            other = int(able.argmax())
            rank_of[[unit, other]] = rank_of[[other, unit]]
    return rank_of


def _greedy(
    load: Load, objective: Objective, slots_per_rank: int, expert_of: Ints
) -> Ints:
    num_ranks, num_units = load.by_unit.shape
    rank_of = np.zeros(num_units, np.int64)
    placed = np.zeros(num_units, bool)
    room = np.full(num_ranks, slots_per_rank)
    pairs = np.zeros((num_ranks, num_ranks))
    order = np.argsort(-load.by_unit.sum(axis=0), kind="stable")
    for unit in order:
        tried = np.repeat(pairs[None], num_ranks, axis=0)
        ranks = np.arange(num_ranks)
        tried[ranks, :, ranks] += load.by_unit[:, unit]
        scores = np.where(room > 0, objective.score(tried, tried), np.inf)
        has_it = np.zeros(num_ranks, bool)
        has_it[rank_of[placed & (expert_of == expert_of[unit])]] = expert_of[unit] >= 0
        if (room[~has_it] > 0).any():
            scores[has_it] = np.inf
        rank = int(scores.argmin())
        rank_of[unit] = rank
        placed[unit] = True
        room[rank] -= 1
        pairs = tried[rank]
    return rank_of


def _shortlist(
    load: Load,
    objective: Objective,
    rank_of: npt.NDArray[np.int64],
    unique: Matrix,
    copies: Matrix,
    expert_of: Ints,
) -> list[tuple[int, int]]:
    """Returns the swaps that look best by either of two estimates.

    One moves loads as if dedup saved every unit the same part; the other counts the
    tokens that would find their experts on one rank.
    """
    e, f = np.triu_indices(len(rank_of), 1)
    differ = (rank_of[e] != rank_of[f]) & _may_swap(rank_of, expert_of, e, f)
    e, f = e[differ], f[differ]
    if not len(e):
        return []
    saved = unique.sum() / max(1.0, copies.sum())
    step = (load.by_unit[:, e] - load.by_unit[:, f]).T
    index = np.arange(len(e))

    def moved(matrix: Matrix, part: float) -> Matrix:
        result = np.repeat(matrix[None], len(e), axis=0)
        result[index, :, rank_of[e]] -= step * part
        result[index, :, rank_of[f]] += step * part
        return result

    scores = objective.score(moved(unique, saved), moved(copies, 1.0))
    chosen = np.argsort(scores, kind="stable")[:_SHORTLIST].tolist()
    if load.together.any():
        near = load.together @ np.eye(copies.shape[-1])[rank_of]
        a, b = rank_of[e], rank_of[f]
        gain = near[e, b] - near[e, a] + near[f, a] - near[f, b]
        gain -= 2 * load.together[e, f]
        chosen += np.argsort(-gain, kind="stable")[:_SHORTLIST].tolist()
    return [(int(e[i]), int(f[i])) for i in dict.fromkeys(chosen)]
