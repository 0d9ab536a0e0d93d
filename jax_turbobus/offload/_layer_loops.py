"""The loops of `scan_layers`, forward and backward."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus import _compat
from jax_turbobus.offload import _buffers, _marks
from jax_turbobus.offload import _primitives as p
from jax_turbobus.offload._checks import HOST, space_of
from jax_turbobus.offload._overlap import Transfer, beside
from jax_turbobus.offload._rows import vary_alike

__all__ = ["Inputs", "Keep", "run_backward", "run_forward"]

Tree = Any
Step = Callable[[Tree, Tree, list[Any]], Tree]


class Keep(enum.Enum):
    """Where the inputs of layers are kept for the backward pass."""

    NOTHING = enum.auto()
    DEVICE = enum.auto()
    HOST = enum.auto()


class Inputs(NamedTuple):
    """The inputs of all layers.

    Attributes:
      hosted: of each leaf, all inputs but the last in host memory, or None.
      staying: those of the other leaves in device memory, or None.
      last: that of the last layer, a tree in device memory.
    """

    hosted: list[Any]
    staying: list[Any]
    last: Tree


class _Layers:
    """The layers of a stack; `on_host` are the leaves that must be fetched."""

    def __init__(self, stack: Tree) -> None:
        self.leaves, self._structure = jax.tree.flatten(stack)
        self.num_layers = self.leaves[0].shape[0]
        self.on_host = [space_of(leaf) is HOST for leaf in self.leaves]

    def fetches(self, i: Any) -> list[Transfer]:
        """Returns the transfers that layer `i` needs."""
        pairs = zip(self.leaves, self.on_host, strict=True)
        return [Transfer.fetch(leaf, i) for leaf, on_host in pairs if on_host]

    def fetch(self, i: int) -> list[Any]:
        """Returns what those transfers bring."""
        return [p.fetch_p.bind(*t.operands, axis=0) for t in self.fetches(np.int32(i))]

    def layer(self, fetched: list[Any], i: Any) -> Tree:
        """Returns layer `i`, of which `fetched` has come."""
        remaining = iter(fetched)
        return jax.tree.unflatten(
            self._structure,
            [
                next(remaining)
                if on_host
                else jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)
                for leaf, on_host in zip(self.leaves, self.on_host, strict=True)
            ],
        )

    def tree(self, values: list[Any]) -> Tree:
        """Returns a tree like the stack."""
        return jax.tree.unflatten(self._structure, values)


def run_forward(
    step: Step, stack: Tree, x: Tree, closed: list[Any], keep: Keep
) -> tuple[Tree, Inputs]:
    """Runs all layers.

    Args:
      step: `step(layer, x, closed)` returns the next `x`.
      stack: the layers.
      x: the first one's input.
      closed: what else they take.
      keep: which inputs are returned, and where.

    Returns:
      The result, and the inputs of the layers.
    """
    layers = _Layers(stack)
    num_kept = layers.num_layers - 1
    operands = jax.tree.leaves((stack, x, closed))
    hosted = [
        _buffers.host_stack_of(leaf, num_kept, *operands)
        if keep is Keep.HOST and num_kept > 0 and _can_leave(leaf)
        else None
        for leaf in jax.tree.leaves(x)
    ]

    def body(carry: Any, i: Any) -> Any:
        def compute(fetched: list[Any], x: Tree) -> Tree:
            return step(layers.layer(fetched, i), x, closed)

        x, fetched, hosted = carry
        here = jax.tree.leaves(x)
        stores = [
            Transfer.store(into, i, leaf)
            for into, leaf in zip(hosted, here, strict=True)
            if into is not None
        ]
        y, moved = beside(compute, (fetched, x), [*layers.fetches(i + 1), *stores])
        fetched, stored = moved[: len(fetched)], iter(moved[len(fetched) :])
        staying = [
            leaf if keep is not Keep.NOTHING and into is None else None
            for into, leaf in zip(hosted, here, strict=True)
        ]
        hosted = [None if into is None else next(stored) for into in hosted]
        return (y, fetched, hosted), staying

    (x, fetched, hosted), staying = jax.lax.scan(
        body, (x, layers.fetch(0), hosted), jnp.arange(num_kept, dtype=jnp.int32)
    )
    result = step(layers.layer(fetched, num_kept), x, closed)
    return result, Inputs(hosted, staying, x)


def run_backward(
    step: Step, stack: Tree, inputs: Inputs, closed: list[Any], batch: Any, ct: Tree
) -> tuple[Tree, Tree, list[Any]]:
    """Runs all layers' derivatives, last one first.

    If only inputs, `closed` or `ct` are mapped, and not by the function that was
    differentiated (`batch` is not mapped), there are as many gradients of the stack.

    Args:
      step: as in `run_forward`.
      stack: likewise.
      inputs: what that returned.
      closed: as in `run_forward`.
      batch: what `batch_p` gave the forward pass.
      ct: the cotangent of the result.

    Returns:
      The gradients of stack, x and `closed`.
    """
    layers = _Layers(stack)
    last = layers.num_layers - 1
    x_leaves, x_structure = jax.tree.flatten(inputs.last)
    # Only these of the stack's leaves have a gradient.
    inexact = [n for n, leaf in enumerate(layers.leaves) if _is_inexact(leaf)]
    is_hosted = [layers.on_host[n] for n in inexact]

    def pull_back(i: Any) -> Callable[..., Any]:
        def of_layer(fetched: list[Any], x: Tree, ct: list[Any]) -> Any:
            layer = layers.layer(fetched, i)
            rows, ct, closed_grads = _pull_back(step, layer, x, closed, ct)
            rows = [
                _marks.total_p.bind(row, layers.leaves[n], batch)
                for row, n in zip(rows, inexact, strict=True)
            ]
            return rows, ct, closed_grads

        return of_layer

    def fetches(i: Any) -> list[Transfer]:
        stacks = [hosted for hosted in inputs.hosted if hosted is not None]
        return [*layers.fetches(i), *(Transfer.fetch(stack, i) for stack in stacks)]

    def split(moved: list[Any]) -> tuple[list[Any], list[Any]]:
        num_layer_leaves = sum(layers.on_host)
        return moved[:num_layer_leaves], moved[num_layer_leaves:]

    # The last layer, while the one before it comes in.
    ct = list(filter(_is_inexact, jax.tree.leaves(ct)))
    (rows, ct, closed_grads), moved = beside(
        pull_back(last),
        (layers.fetch(last), inputs.last, ct),
        fetches(last - 1) if last > 0 else [],
    )
    grads = [
        _buffers.host_buffer_like(leaf, row) if hosted else jnp.zeros_like(leaf)
        for leaf, row, hosted in zip(
            (layers.leaves[n] for n in inexact), rows, is_hosted, strict=True
        )
    ]
    grads = [vary_alike(grad, row)[0] for grad, row in zip(grads, rows, strict=True)]

    def body(carry: Any, per_layer: Any) -> Any:
        (fetched, returned), ct, rows, grads, closed_grads = carry
        i, staying = per_layer
        back = iter(returned)
        x = [next(back) if leaf is None else leaf for leaf in staying]
        pending = list(zip(grads, rows, is_hosted, strict=True))
        stores = [Transfer.store(g, i + 1, row) for g, row, hosted in pending if hosted]
        # The first layer fetches itself once more: cheaper than a third copy of
        # the layer's derivative in the program.
        (rows, ct, more), moved = beside(
            pull_back(i),
            (fetched, jax.tree.unflatten(x_structure, x), ct),
            [*fetches(jnp.maximum(i - 1, 0)), *stores],
        )
        num_fetched = len(moved) - len(stores)
        stored = iter(moved[num_fetched:])
        grads = [
            next(stored) if hosted else _put(grad, i + 1, row)
            for grad, row, hosted in pending
        ]
        closed_grads = jax.tree.map(jnp.add, closed_grads, more)
        return (split(moved[:num_fetched]), ct, rows, grads, closed_grads), None

    if last > 0:
        (_, ct, rows, grads, closed_grads), _ = jax.lax.scan(
            body,
            (split(moved), ct, rows, grads, closed_grads),
            (jnp.arange(last, dtype=jnp.int32), inputs.staying),
            reverse=True,
        )
    stack_grads: list[Any] = [None] * len(layers.leaves)
    for n, grad, row, hosted in zip(inexact, grads, rows, is_hosted, strict=True):
        operands = vary_alike(grad, np.int32(0), row)
        stack_grads[n] = (
            p.store_p.bind(*operands, axis=0) if hosted else _put(grad, 0, row)
        )
    return (
        layers.tree(stack_grads),
        jax.tree.unflatten(x_structure, _spread(x_leaves, ct)),
        _spread(closed, closed_grads),
    )


def _pull_back(
    step: Callable[..., Any], layer: Tree, x: Tree, closed: list[Any], ct: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the gradients of one layer, its input and what `step` closes over.

    Of all of them, and in `ct`, only leaves that have a gradient are there.
    """
    trees = [jax.tree.flatten(tree) for tree in (layer, x, closed)]

    def of_inexact(*parts: list[Any]) -> list[Any]:
        layer, x, closed = (
            jax.tree.unflatten(structure, _spread(leaves, part, leaves))
            for (leaves, structure), part in zip(trees, parts, strict=True)
        )
        return list(filter(_is_inexact, jax.tree.leaves(step(layer, x, closed))))

    _, vjp = jax.vjp(of_inexact, *(list(filter(_is_inexact, t[0])) for t in trees))
    return tuple(vjp(ct))


def _spread(
    leaves: list[Any], values: list[Any], others: list[Any] | None = None
) -> list[Any]:
    """Returns `values` in the places of the inexact leaves, `others` elsewhere."""
    remaining = iter(values)
    others = others or [None] * len(leaves)
    return [
        next(remaining) if _is_inexact(leaf) else other
        for leaf, other in zip(leaves, others, strict=True)
    ]


def _put(stack: Any, i: Any, row: Any) -> Any:
    """Returns a stack in device memory with another row."""
    stack, row = vary_alike(stack, row)
    return jax.lax.dynamic_update_index_in_dim(stack, row, i, 0)


def _can_leave(x: Any) -> bool:
    """Returns whether rows like this can lie on the host, whatever their shape."""
    is_number = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return is_number and _compat.element_bits(x.dtype) % 8 == 0


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
