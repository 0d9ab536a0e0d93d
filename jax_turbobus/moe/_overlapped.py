"""Chunks of a mixture-of-experts layer, exchanged while others are in the experts.

For chunk i, in the order of a GPU's stream (x: on a stream beside it):

    start dispatch i+1 | experts i | start combine i, finish combine i-1, dispatch i+1
      x: combine i-1, dispatch i+1

The first dispatch and the last combine have nothing to run beside. On CPU devices calls
run as soon as their data are there, and an order of ours would only hold them up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np

from jax_turbobus.moe import (
    _combine,
    _devices,
    _dispatch,
    _exchange,
    _halves,
    _in_flight,
    _linear,
)
from jax_turbobus.moe._halves import Handle
from jax_turbobus.moe._routing import Routing
from jax_turbobus.moe._state import DispatchState

__all__ = ["run"]


def run(
    expert_fn: Callable[[jax.Array, jax.Array], jax.Array],
    chunks: Sequence[_dispatch.Operands],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the sums and the overflow of each chunk.

    Args:
      expert_fn: of rows and group sizes; traced once for all chunks.
      chunks: of one shape.
    """
    # Counted later, a chunk's host would wait behind the experts of the one before. The
    # first dispatch waits for no more than the second chunk's count.
    first = chunks[0]
    tokens, early = _counted(first.tokens, chunks[1:2])
    first = first._replace(tokens=tokens)
    rows, sizes, state = _dispatch.received(
        first, _linear.send(first.routing, *first.sent)
    )
    rows, others = _counted(rows, chunks[2:])
    early += others
    experts: Any = expert_fn
    closed_over: list[jax.Array] = []
    if len(chunks) > 1:
        experts, closed_over = _traced(expert_fn, rows, sizes)
    sums: list[jax.Array] = []
    overflows = []
    combining: _Combining | None = None
    for i, _ in enumerate(chunks):
        overflows.append(state.overflow)
        following = None
        if i + 1 < len(chunks):
            chunk = _after_sums(chunks[i + 1], sums)
            rows, tokens = _in_flight.in_order(rows, chunk.tokens, on_gpus=True)
            chunk = chunk._replace(tokens=tokens)
            following = _Dispatching(chunk, early[i], closed_over)
        under_way = [one for one in (following, combining) if one is not None]
        rows = _beside(rows, under_way)
        results = _beside(experts(rows, sizes), under_way)
        if combining is not None:
            results, one = _in_flight.in_order(
                results, combining.finish(), on_gpus=True
            )
            sums.append(one)
        if following is None:
            operands = _combine.prepared(results, state)
            last = _linear.bring(state.routing, *operands)
            sums.append(_combine.restored(last, results.dtype))
            break
        combining = _Combining(results, state)
        rows, sizes, state = following.finish()
    return sums, overflows


def _traced(expert_fn: Any, *args: jax.Array) -> tuple[Any, list[jax.Array]]:
    """Returns the function of arguments like these, and the arrays it closes over."""
    closed = jax.make_jaxpr(expert_fn)(*args)
    function = jax.extend.core.jaxpr_as_fun(closed)
    arrays = [x for x in closed.consts if isinstance(x, jax.Array)]
    return lambda *args: function(*args)[0], arrays


def _is_whole(operands: _dispatch.Operands) -> bool:
    """Returns whether a dispatch is no start, but all of it."""
    routing, tokens, expert_ids, _ = operands
    return (
        _is_too_large(routing, expert_ids)
        or tokens.dtype.name not in _exchange.SUMMABLE
        or _exchange.is_empty(routing, tokens, expert_ids)
        # A slot of -1, as a float, is NaN (`_halves`).
        or bool(jax.config.jax_debug_nans)  # type: ignore[attr-defined]
    )


def _is_too_large(routing: Routing, expert_ids: jax.Array) -> bool:
    """Returns whether GPUs leave the exchange to collectives, which start nothing."""
    reason = _devices.why_too_large_for_gpus(
        num_ranks=routing.group.num_ranks,
        num_experts=routing.num_experts,
        top_k=expert_ids.shape[-1],
    )
    return reason is not None


def _counted(
    x: jax.Array, chunks: Sequence[_dispatch.Operands]
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns `x`, and what names the counts of the chunks.

    GPUs count when `x` goes in and before it comes out.
    """
    if not chunks:
        return x, []
    routing, tokens, _, _ = chunks[0]
    # For JAX of the tokens, too: it would take a loop's count of ids that are the same
    # in all steps out of the loop, and nobody knows there what comes in.
    ids = [_in_flight.anchor(c.expert_ids, [c.tokens]) for c in chunks]
    if _is_whole(chunks[0]):
        return x, ids
    x, *ids = _in_flight.in_order(x, *ids, on_gpus=True)
    early = _exchange.count(routing, ids, tokens.shape[1] * tokens.dtype.itemsize)
    x, *early = _in_flight.in_order(x, *early, on_gpus=True)
    return x, early


def _after_sums(chunk: _dispatch.Operands, sums: list[jax.Array]) -> _dispatch.Operands:
    """Returns a chunk that waits for the sums of earlier ones.

    It bounds the memory where nothing else keeps chunks in order.
    """
    if not sums:
        return chunk
    tokens, sums[-1] = _in_flight.in_order(chunk.tokens, sums[-1], on_gpus=False)
    return chunk._replace(tokens=tokens)


class _Dispatching:
    """The dispatch of a chunk, under way."""

    def __init__(
        self,
        operands: _dispatch.Operands,
        early: jax.Array,
        closed_over: Sequence[jax.Array],
    ) -> None:
        tokens = _in_flight.anchor(operands.tokens, closed_over)
        self._operands = operands._replace(tokens=tokens)
        self._early = early
        self._is_whole = _is_whole(operands)
        if self._is_whole:
            results = _linear.send(operands.routing, *self._operands.sent)
            self.handle = Handle(tuple(results[:1]), tuple(results[1:]))
        else:
            self.handle = _halves.start_send(
                operands.routing, *self._operands.sent, early
            )

    def finish(self) -> tuple[jax.Array, jax.Array, DispatchState]:
        if self._is_whole:
            results: Any = (*self.handle.linear, *self.handle.others)
        else:
            results = _halves.finish_send(
                self._operands.routing,
                self.handle,
                self._operands.expert_ids,
                self._early,
            )
        return _dispatch.received(self._operands, results)


class _Combining:
    """The combine of a chunk, under way."""

    def __init__(self, results: jax.Array, state: DispatchState) -> None:
        self._dtype = results.dtype
        self._routing = state.routing
        self._operands = operands = _combine.prepared(results, state)
        self._is_whole = _is_too_large(
            state.routing, state.expert_ids
        ) or _exchange.is_empty(state.routing, results, state.expert_ids)
        if self._is_whole:
            self.handle = Handle((_linear.bring(self._routing, *operands),))
        else:
            self.handle = _halves.start_bring(self._routing, *operands)

    def finish(self) -> jax.Array:
        sums = self.handle.linear[0]
        if not self._is_whole:
            sums = _halves.finish_bring(self._routing, self.handle, *self._operands)
        return _combine.restored(sums, self._dtype)


def _beside(x: jax.Array, under_way: Sequence[Any]) -> jax.Array:
    """Returns `x`, on GPUs not before what is under way has been started.

    And nothing that is under way is finished before `x` is there.
    """
    if not under_way:
        return x
    lengths = [len(one.handle.linear) for one in under_way]
    x, *values = _in_flight.in_order(
        x, *(v for one in under_way for v in one.handle.linear), on_gpus=True
    )
    ends = np.cumsum(lengths)
    for one, begin, end in zip(under_way, ends - lengths, ends, strict=True):
        one.handle = one.handle._replace(linear=tuple(values[begin:end]))
    return x
