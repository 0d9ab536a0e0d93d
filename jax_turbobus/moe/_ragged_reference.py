"""`ragged_all_to_all` in plain JAX: every rank gathers all operands and picks.

What our exchange must equal, and what stands in for it where it cannot run: on
platforms without a handler, over several processes, and under axes that are not mesh
axes (`jax.vmap` with `axis_name`). It moves ``axis size`` times the operand.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = [
    "Groups",
    "collect",
    "covered_rows",
    "exchange",
    "gather_tables",
    "group_of",
    "members_of",
]

# Static axis indices by group, or None: one group of all.
Groups = tuple[tuple[int, ...], ...] | None


def members_of(axis_name: Any, groups: Groups) -> jax.Array | None:
    """Returns the axis indices of the caller's group, or None if it has all."""
    if groups is None:
        return None
    of_index = np.zeros(sum(map(len, groups)), np.int32)
    for i, group in enumerate(groups):
        of_index[list(group)] = i
    mine = jnp.asarray(of_index)[lax.axis_index(axis_name)]
    return jnp.asarray(groups, jnp.int32)[mine]


def group_of(axis_name: Any, groups: Groups) -> jax.Array:
    """Returns the caller's ``int32[]`` rank in its group."""
    index = lax.axis_index(axis_name)
    if groups is None:
        return jnp.asarray(index, jnp.int32)
    position = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        position[list(group)] = np.arange(len(group))
    return jnp.asarray(position)[index]


def gather_tables(x: jax.Array, axis_name: Any, groups: Groups) -> jax.Array:
    """Returns `x` of every rank of the caller's group, by rank in front."""
    gathered: jax.Array = lax.all_gather(x, axis_name)
    members = members_of(axis_name, groups)
    return gathered if members is None else gathered[members]


def _arrivals(tables: jax.Array, rank: jax.Array) -> Sequence[jax.Array]:
    """Returns each slice that comes to `rank`, in the order of writing.

    Args:
      tables: ``int32[num_ranks, 4, num_slices]``.
      rank: ``int32[]``.

    Returns:
      Source ranks, operand offsets, sizes and output offsets: ``int32[num_slices]``.
    """
    num_ranks, _, num_slices = tables.shape
    each = num_slices // num_ranks
    mine = lax.dynamic_slice_in_dim(tables, rank * each, each, axis=2)
    operand_offsets, sizes, output_offsets = (
        mine[:, field].reshape(-1) for field in (0, 1, 2)
    )
    sources = jnp.repeat(jnp.arange(num_ranks, dtype=jnp.int32), each)
    return sources, operand_offsets, sizes, output_offsets


def covered_rows(tables: jax.Array, rank: jax.Array, num_rows: int) -> jax.Array:
    """Returns which of `rank`'s result rows are received, ``bool[num_rows]``."""
    _, _, sizes, begin = _arrivals(tables, rank)
    edges = jnp.zeros(num_rows, jnp.int32)
    edges = edges.at[begin].add(jnp.where(sizes > 0, 1, 0), mode="drop")
    edges = edges.at[begin + sizes].add(jnp.where(sizes > 0, -1, 0), mode="drop")
    return jnp.cumsum(edges) > 0


def _writers(
    tables: jax.Array, rank: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns who writes each of `rank`'s result rows, ``[num_rows]`` each.

    Args:
      tables: ``int32[num_ranks, 4, num_slices]``.
      rank: ``int32[]``.
      num_rows: rows of a result.

    Returns:
      Whether anybody does, the source's rank, and the row of its operand.
    """
    sources, operand_offsets, sizes, output_offsets = _arrivals(tables, rank)
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    hits = (row >= output_offsets) & (row < output_offsets + sizes)
    # Where slices meet, the later one wins: the last hit.
    last = hits.shape[1] - 1 - jnp.argmax(hits[:, ::-1], axis=1)
    source_rows = operand_offsets[last] + row[:, 0] - output_offsets[last]
    return hits.any(axis=1), sources[last], source_rows


def exchange(
    operand: jax.Array,
    output: jax.Array,
    table: jax.Array,
    *,
    axis_name: Any,
    groups: Groups,
) -> jax.Array:
    """Returns what the caller receives, over `output`.

    Args:
      operand: ``[operand_rows, ...]``.
      output: ``[output_rows, ...]``, same dtype and row shape.
      table: ``int32[4, num_slices]``: input offsets, send sizes, output offsets and
        receive sizes of the caller.
      axis_name: bound axis or axes.
      groups: which indices exchange with each other.
    """
    if output.shape[0] == 0 or operand.shape[0] == 0:
        return output
    tables = gather_tables(table, axis_name, groups)
    operands = gather_tables(operand, axis_name, groups)
    rank = group_of(axis_name, groups)
    received, sources, source_rows = _writers(tables, rank, output.shape[0])
    picked = operands[sources, source_rows]
    received = received.reshape(-1, *(1,) * (output.ndim - 1))
    return jnp.where(received, picked, output)


def collect(
    cotangent: jax.Array,
    table: jax.Array,
    *,
    num_rows: int,
    axis_name: Any,
    groups: Groups,
) -> jax.Array:
    """Returns the transpose of `exchange` in its operand.

    Every rank gathers all cotangents and picks those of its own rows. Not left to
    JAX: where a lowering calls this, types do not say that an operand varies over the
    axis, and the transpose of gathering what does not vary sums over the ranks.

    Args:
      cotangent: ``[output_rows, ...]``; half precision is added up in float32.
      table: as of `exchange`.
      num_rows: rows of the operand.
      axis_name: bound axis or axes.
      groups: which indices exchange with each other.

    Returns:
      ``[num_rows, ...]``, of the cotangent's dtype.
    """
    dtype, row = cotangent.dtype, cotangent.shape[1:]
    wide = jnp.promote_types(dtype, jnp.float32)
    result = jnp.zeros((num_rows, *row), wide)
    if result.size == 0 or cotangent.size == 0:
        return result.astype(dtype)
    tables = gather_tables(table, axis_name, groups)
    cotangents = gather_tables(cotangent, axis_name, groups)
    rank = group_of(axis_name, groups)
    for peer in range(cotangents.shape[0]):
        received, sources, rows = _writers(tables, jnp.int32(peer), cotangent.shape[0])
        # Rows of others have no place in the result.
        rows = jnp.where(received & (sources == rank), rows, num_rows)
        result = result.at[rows].add(cotangents[peer].astype(wide), mode="drop")
    return result.astype(dtype)
