"""Transfers beside a computation.

A transfer has two halves. XLA runs a program's operations in an order of its own,
so three ties keep them where they belong: start, compute, done. All of it is one
body: a transfer in flight never crosses the edge of a loop, cond or jit, where XLA
may copy the buffer that is being written.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jax_turbobus import _ffi
from jax_turbobus.offload import _marks
from jax_turbobus.offload import _primitives as p
from jax_turbobus.offload._check_together import check_together
from jax_turbobus.offload._checks import (
    DEVICE,
    HOST,
    check_array,
    check_function,
    check_out,
    check_space,
    check_values,
    named_leaves,
)
from jax_turbobus.offload._define import laid_like, row_aval
from jax_turbobus.offload._programs import compiled_for
from jax_turbobus.offload._rows import vary_alike

__all__ = ["Transfer", "beside", "overlap"]

Tree = Any


class Transfer(NamedTuple):
    """A transfer that is started before a computation and done after it.

    Attributes:
      start: the primitive of its first half.
      operands: what the first half takes.
      read: those of the operands that must stay as they are until it is done.
      done: the FFI target of its second half.
      params: the first half's static parameters.
    """

    start: Any
    operands: tuple[Any, ...]
    read: tuple[Any, ...]
    done: str
    params: dict[str, Any]

    @classmethod
    def fetch(cls, stack: Any, index: Any) -> "Transfer":
        """Returns the transfer of row `index` of `stack` to the device."""
        operands = vary_alike(stack, index)
        return cls(
            p.fetch_start_p, operands, operands, "turbobus_h2d_done", {"axis": 0}
        )

    @classmethod
    def store(cls, stack: Any, index: Any, row: Any) -> "Transfer":
        """Returns the transfer of `row` to row `index` of `stack`."""
        row = laid_like(row, row_aval(jax.typeof(stack), 0))
        operands = vary_alike(stack, index, row)
        return cls(
            p.store_start_p, operands, operands[1:], "turbobus_d2h_done", {"axis": 0}
        )

    @classmethod
    def to_device(cls, x: Any) -> "Transfer":
        """Returns the transfer of `x` to the device."""
        return cls(p.h2d_start_p, (x,), (x,), "turbobus_h2d_done", {})

    @classmethod
    def to_host(cls, x: Any, out: Any = None) -> "Transfer":
        """Returns the transfer of `x` to host memory, to that of `out` if given."""
        if out is None:
            params = p.to_host_params()
            return cls(p.d2h_start_p, (x,), (x,), "turbobus_d2h_done", params)
        operands = vary_alike(laid_like(x, jax.typeof(out)), out)
        return cls(p.d2h_into_start_p, operands, operands[:1], "turbobus_d2h_done", {})


def beside(
    compute: Callable[..., Any], args: Tree, transfers: Sequence[Transfer]
) -> tuple[Any, list[Any]]:
    """Runs `compute(*args)` while the transfers are under way.

    To be called while tracing, where all of it ends up in one body.

    Args:
      compute: what to run.
      args: its arguments, a sequence of trees.
      transfers: in the order in which they start.

    Returns:
      Its result, and what the transfers moved.
    """
    anchors = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    in_flight = [
        t.start.bind(*_anchored(t.operands, anchors), **t.params) for t in transfers
    ]
    started = _mark(in_flight)
    args = jax.tree.map(lambda x: _after(x, started), args)
    args, in_flight = _tie(args, in_flight)
    result = compute(*args)
    result, in_flight = _tie(result, in_flight)
    marks = started + _mark(result) if transfers else []
    moved = [
        p.done_p.bind(value, *t.read, *marks, target=t.done, num_marks=len(marks))
        for value, t in zip(in_flight, transfers, strict=True)
    ]
    # Whoever uses one of these keeps the second half of all transfers.
    result, moved = _tie(result, moved)
    return result, moved


def _anchored(operands: tuple[Any, ...], anchors: list[Any]) -> tuple[Any, ...]:
    """Returns the operands, one of them (of rows: the index) not before `anchors`."""
    n = min(1, len(operands) - 1)
    anchored = _marks.anchor_p.bind(operands[n], *anchors)
    return (*operands[:n], anchored, *operands[n + 1 :])


def _mark(tree: Tree) -> list[Any]:
    """Returns a mark that the arrays of the tree are there, if it has any."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return [_marks.mark_p.bind(*vary_alike(*arrays))] if arrays else []


def _after(x: Any, marks: list[Any]) -> Any:
    return _marks.after_p.bind(x, *marks) if marks and isinstance(x, jax.Array) else x


def _tie(*trees: Any) -> Any:
    """Returns the trees, all of their arrays there before any of them is."""
    leaves, structure = jax.tree.flatten(trees)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    tied = iter(_marks.tie_p.bind(*arrays))
    leaves = [next(tied) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, leaves)


def overlap(
    compute: Callable[..., Any],
    *args: Any,
    fetch: Tree = (),
    offload: Tree = (),
    out: Tree = None,
) -> tuple[Any, Tree, Tree]:
    """Runs `compute(*args)` while values come in from the host and others go out.

    Args:
      compute: a function of arrays. What it reads should come through `args`: that
        is what holds it back until the transfers have started.
      *args: its arguments, trees of arrays.
      fetch: a tree of arrays in pinned host memory, moved to the device.
      offload: a tree of arrays in device memory, moved to pinned host memory.
      out: where to write `offload`, as in `to_host`.

    Returns:
      `(compute(*args), fetched, offloaded)`: the last two are trees like `fetch`
      and `offload`, in the other memory.

    Raises:
      TypeError: `compute` is no function, or a leaf of `fetch`, `offload` or `out`
        no `jax.Array`.
      ValueError: one lies in the wrong memory, or `out` does not match `offload`.

    Transforms:
      jit, grad, vmap, shard_map, scan, checkpoint. Called outside of `jax.jit` it
      is compiled by itself, once for each `compute` object.

    Ordering:
      All transfers start before `compute` and are done when anything of the result
      is used.
    """
    check_function("overlap", "compute", compute)
    check_values("overlap", "args", args)
    for name, leaf in named_leaves("fetch", fetch):
        check_array("overlap", name, leaf)
        check_space("overlap", name, leaf, HOST)
    leaves = named_leaves("offload", offload)
    for name, leaf in leaves:
        check_array("overlap", name, leaf)
        check_space("overlap", name, leaf, DEVICE)
    if out is not None:
        found: Any = jax.tree.structure(out)
        expected: Any = jax.tree.structure(offload)
        if found != expected:
            raise ValueError(
                "overlap: argument out: expected a tree like offload, "
                f"{expected}, got {found}"
            )
        for (name, leaf), (out_name, into) in zip(
            leaves, named_leaves("out", out), strict=True
        ):
            check_out("overlap", leaf, into, name, out_name)
    check_together(
        "overlap", {"args": args, "fetch": fetch, "offload": offload, "out": out}
    )
    _ffi.register()
    program = compiled_for(_overlap, compute)
    result, fetched, offloaded = program(args, fetch, offload, out)
    return result, fetched, offloaded


def _overlap(
    compute: Callable[..., Any], args: Tree, fetch: Tree, offload: Tree, out: Tree
) -> tuple[Any, Tree, Tree]:
    host_leaves, fetch_tree = jax.tree.flatten(fetch)
    device_leaves, offload_tree = jax.tree.flatten(offload)
    out_leaves = jax.tree.leaves(out) or [None] * len(device_leaves)
    transfers = [Transfer.to_device(x) for x in host_leaves]
    transfers += map(Transfer.to_host, device_leaves, out_leaves)
    result, moved = beside(compute, args, transfers)
    return (
        result,
        jax.tree.unflatten(fetch_tree, moved[: len(host_leaves)]),
        jax.tree.unflatten(offload_tree, moved[len(host_leaves) :]),
    )
