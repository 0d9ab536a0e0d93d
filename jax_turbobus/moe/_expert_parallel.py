"""Dispatch, experts and combine in one call, in chunks that overlap."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus.moe import _dispatch, _overlapped, _routing
from jax_turbobus.moe._arguments import check_integer
from jax_turbobus.moe._matching import AxisName

__all__ = ["expert_parallel"]


def expert_parallel(
    expert_fn: Callable[[jax.Array, jax.Array], jax.Array],
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    *,
    num_experts: int,
    axis_name: AxisName,
    num_chunks: int = 1,
    recv_capacity: int | None = None,
    expert_capacity: int | None = None,
    schedule: str = "auto",
    explain: bool = False,
    valid: jax.Array | None = None,
    with_overflow: bool = False,
) -> Any:
    """Returns what a mixture-of-experts layer makes of this rank's tokens.

    `dispatch`, `expert_fn` and `combine`, over `num_chunks` equal parts of the tokens
    (the last one padded with masked tokens, so all ranks have the same number). The
    exchanges of a chunk overlap the experts of the chunks before and after it, and
    backwards again; rows of three chunks exist at once.

    Args:
      expert_fn: ``expert_fn(rows, group_sizes) -> rows``, this rank's experts, for each
        chunk of what `dispatch` returns; may change `hidden` and dtype. It is traced
        once.
        It may close over parameters and be differentiated. Rows that belong to no
        token are zero and what it makes of them is not used, but parameters' gradients
        see them: a function that is not finite at zero spoils those.
      tokens: ``[num_tokens, hidden]``, one array: for fp8 rows with their scales, call
        `dispatch` and `combine`.
      expert_ids: ``int32[num_tokens, top_k]``; ids that are no expert's are masked.
      weights: ``float[num_tokens, top_k]``.
      num_experts: experts of all ranks together. Static.
      axis_name: mesh axis of the ranks, or a tuple of axes. Static.
      num_chunks: at least 1; the same on all ranks. No more are made than there are
        tokens. Static.
      recv_capacity: rows that a rank can receive, of one chunk. Static.
      expert_capacity: rows of each local expert, of one chunk. Static.
      schedule: as for `dispatch`. Static.
      explain: as for `dispatch`, of the first chunk.
      valid: ``bool[num_tokens]``.
      with_overflow: also return how many rows were wanted where some were dropped;
        each rank has its own number.

    Returns:
      ``[num_tokens, hidden]`` as `combine` returns it; with `with_overflow`, that and
      ``int32[]``: the most rows that any chunk wanted of this rank and did not get, 0
      if nothing was dropped.

    Raises:
      TypeError: as `dispatch`, or `num_chunks` is not an integer, or `expert_fn` no
        function or returns no array.
      ValueError: as `dispatch`, or `num_chunks` is below 1, or `expert_fn` returns
        another number of rows than it gets.

    Transforms:
      As `dispatch` and `combine`.

    Source: ThunderEP's overlap of exchange and experts.
    """
    _check_one(tokens)
    _routing.check_arrays("expert_parallel", tokens, expert_ids, weights, valid)
    if not callable(expert_fn):
        raise TypeError(
            "expert_parallel: expert_fn: expected a function of (rows, group_sizes),"
            f" got {type(expert_fn).__name__}"
        )
    num_chunks = check_integer("expert_parallel: num_chunks", num_chunks, least=1)
    if valid is not None:
        expert_ids = jnp.where(valid[:, None], expert_ids, -1)
    num_tokens = tokens.shape[0]
    num_chunks = min(num_chunks, max(1, num_tokens))
    chunk_size = -(-num_tokens // num_chunks)
    chunks = [
        _dispatch.prepared(
            "expert_parallel",
            _chunk(tokens, i * chunk_size, chunk_size, 0),
            _chunk(expert_ids, i * chunk_size, chunk_size, -1),
            _chunk(weights, i * chunk_size, chunk_size, 0),
            None,
            num_experts=num_experts,
            axis_name=axis_name,
            recv_capacity=recv_capacity,
            expert_capacity=expert_capacity,
            schedule=schedule,
            explain=explain if i == 0 else False,
        )
        for i in range(num_chunks)
    ]
    sums, overflows = _overlapped.run(_checked(expert_fn), chunks)
    result = sums[0] if num_chunks == 1 else jnp.concatenate(sums)[:num_tokens]
    if not with_overflow:
        return result
    return result, jnp.stack(overflows).max()


def _check_one(tokens: Any) -> None:
    """Refuses a tree of arrays.

    Raises:
      TypeError: it is one.
    """
    if isinstance(tokens, tuple | dict):
        raise TypeError(
            "expert_parallel: tokens: expected one array, got"
            f" {type(tokens).__name__}; several arrays of a token (fp8 rows and their"
            " scales) are for moe.dispatch, with the experts and moe.combine after it"
        )


def _checked(expert_fn: Any) -> Any:
    def run(rows: jax.Array, group_sizes: jax.Array) -> Any:
        results = expert_fn(rows, group_sizes)
        _check_results(results, rows)
        return results

    return run


def _check_results(results: Any, rows: jax.Array) -> None:
    """Refuses what `expert_fn` may not return.

    Raises:
      TypeError: no array of numbers.
      ValueError: not one row for each of `rows`.
    """
    if not isinstance(results, jax.Array | np.ndarray):
        raise TypeError(
            "expert_parallel: expert_fn: expected it to return an array, one row for"
            f" each of its rows, got {type(results).__name__}"
        )
    if not jnp.issubdtype(results.dtype, jnp.number):
        raise TypeError(
            "expert_parallel: expert_fn: expected it to return numbers, which can be"
            f" added up, got dtype {results.dtype}"
        )
    if results.ndim != rows.ndim or results.shape[:-1] != rows.shape[:-1]:
        expected = ", ".join(map(str, rows.shape[:-1]))
        raise ValueError(
            "expert_parallel: expert_fn: expected it to return an array of shape"
            f" [{expected}, hidden] for rows of shape {list(rows.shape)}, got"
            f" {list(results.shape)}"
        )


def _chunk(x: jax.Array, begin: int, size: int, fill: int) -> jax.Array:
    """Returns rows ``[begin, begin + size)``, filled up where `x` ends."""
    part = x[begin : begin + size]
    missing = size - part.shape[0]
    if not missing:
        return part
    return jnp.pad(part, ((0, missing), (0, 0)), constant_values=fill)
