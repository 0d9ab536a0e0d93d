"""A loop over layers whose parameters stay in host memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus import _ffi
from jax_turbobus.offload import _marks
from jax_turbobus.offload import _primitives as p
from jax_turbobus.offload._check_together import check_together
from jax_turbobus.offload._checks import (
    DEVICE,
    check_function,
    check_space,
    check_stack,
    check_values,
    named_leaves,
)
from jax_turbobus.offload._define import row_aval
from jax_turbobus.offload._overlap import Transfer, beside
from jax_turbobus.offload._programs import compiled_for
from jax_turbobus.offload._rows import vary_alike, vary_over

__all__ = ["scan_layers"]

Tree = Any


def scan_layers(f: Callable[[Tree, Tree], Tree], stack: Tree, x: Tree) -> Tree:
    """Returns `x` after `x = f(layer, x)` for every layer of a stack.

    While one layer computes, the next one is fetched; two are on the device. The
    backward pass fetches the layers again, last one first, and writes each layer's
    gradient to a stack in host memory while the one before it computes. The inputs
    of all layers are kept on the device for it; what `f` computes is not
    (wrap `f` in `jax.checkpoint` only to save memory within one layer).

    Args:
      f: takes one layer, a tree like `stack` without its first axis, in device
        memory, and `x`; returns the next `x`. It may close over other arrays, and
        those have gradients too.
      stack: a tree of arrays `[num_layers, ...]` in pinned host memory. They may be
        sharded along any axis but the first.
      x: a tree of arrays in device memory.

    Returns:
      A tree like `x`.

    Raises:
      TypeError: `f` is no function, or a leaf of `stack` no `jax.Array`.
      ValueError: a leaf of `stack` is not in pinned host memory or has no layers,
        they disagree about how many, `x` is not in device memory, or `f` returns
        something unlike `x`.

    Transforms:
      jit, reverse-mode differentiation (the gradient of `stack` is in pinned host
      memory), vmap, shard_map, checkpoint. Forward-mode differentiation only of a
      gradient; that in reverse mode by all but `stack`.

    Source:
      docs/offload.md, "Layers".
    """
    check_function("scan_layers", "f", f)
    leaves = named_leaves("stack", stack)
    if not leaves:
        raise ValueError("scan_layers: argument stack: expected arrays, got none")
    for name, leaf in leaves:
        check_stack("scan_layers", leaf, name)
    lengths = sorted({leaf.shape[0] for _, leaf in leaves})
    if len(lengths) > 1:
        raise ValueError(
            "scan_layers: argument stack: expected one number of layers, the first "
            f"axis of every leaf; got {lengths}"
        )
    check_values("scan_layers", "x", x)
    for name, leaf in named_leaves("x", x):
        if isinstance(leaf, jax.Array):
            check_space("scan_layers", name, leaf, DEVICE)
    check_together("scan_layers", {"stack": stack, "x": x})
    _ffi.register()
    return compiled_for(_scan_layers, f)(stack, x)


def _scan_layers(f: Callable[..., Any], stack: Tree, x: Tree) -> Tree:
    step, x, tracers = _close(f, stack, x)

    @jax.custom_vjp
    def run(stack: Tree, x: Tree, closed: list[Any], batch: Any) -> Tree:
        del batch
        return _forward(step, stack, x, closed, keep_inputs=False)[0]

    def forward(stack: Tree, x: Tree, closed: list[Any], batch: Any) -> Any:
        result, inputs = _forward(step, stack, x, closed, keep_inputs=True)
        return result, (stack, inputs, closed, batch)

    def backward(residuals: Any, ct: Tree) -> Any:
        stack, inputs, closed, batch = residuals
        return (*_backward(step, stack, inputs, closed, batch, ct), None)

    run.defvjp(forward, backward)
    batch = _marks.batch_p.bind(
        *jax.tree.leaves((stack, x, tracers)), differentiated=False
    )
    return run(stack, x, tracers, batch)


def _close(f: Callable[..., Any], stack: Tree, x: Tree) -> tuple[Any, Tree, list[Any]]:
    """Returns `f` with what it closes over as a third argument.

    A custom derivative may not close over what is being traced, and what `f` closes
    over has a gradient too.

    Args:
      f: the user's function.
      stack: its layers.
      x: its second argument.

    Returns:
      `step(layer, x, closed)`; `x` in the type that `step` returns; and `closed`.
    """
    layer = jax.tree.map(lambda s: row_aval(jax.typeof(s), 0), stack)
    for _ in range(2):  # the second time, if x must vary over more mesh axes
        in_avals = jax.tree.map(jax.typeof, x)
        try:
            jaxpr, out = jax.make_jaxpr(f, return_shape=True)(layer, in_avals)
        except Exception as error:
            error.add_note(_how_called(layer, in_avals))
            raise
        out = jax.tree.unflatten(_structure(out), jaxpr.out_avals)
        _check_result(layer, in_avals, out)
        x = jax.tree.map(_as_result, x, out)
        if jax.tree.map(jax.typeof, x) == in_avals:
            break

    def step(layer: Tree, x: Tree, closed: list[Any]) -> Tree:
        flat = jax.core.eval_jaxpr(jaxpr.jaxpr, closed, *jax.tree.leaves((layer, x)))
        return jax.tree.unflatten(_structure(out), flat)

    return step, x, list(jaxpr.consts)


def _structure(tree: Tree) -> Any:
    return jax.tree.structure(tree)


def _how_called(layer: Tree, x: Tree) -> str:
    def types(tree: Tree) -> Any:
        return jax.tree.map(lambda aval: aval.str_short(), tree)

    return f"scan_layers calls f(layer, x) with layer {types(layer)} and x {types(x)}"


def _check_result(layer: Tree, x: Tree, result: Tree) -> None:
    if _structure(x) != _structure(result):
        raise ValueError(
            "scan_layers: argument f: expected a result with the tree structure of x, "
            f"{_structure(x)}, got {_structure(result)}; {_how_called(layer, x)}"
        )
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(result), strict=True):
        same_dtype = a.dtype == b.dtype or a.weak_type
        if a.shape != b.shape or not same_dtype:
            raise ValueError(
                "scan_layers: argument f: expected a result like x, "
                f"{a.dtype}{list(a.shape)}, got {b.dtype}{list(b.shape)}; cast or "
                f"reshape what f returns. {_how_called(layer, x)}"
            )
        if b.memory_space is not DEVICE:
            raise ValueError(
                "scan_layers: argument f: expected a result in device memory, got "
                f"{b.str_short()}; move it with to_device, or leave it on the device"
            )
        if a.sharding.mesh == b.sharding.mesh and a.sharding != b.sharding:
            raise ValueError(
                "scan_layers: argument f: expected a result split like x, "
                f"{a.sharding.spec}, got {b.sharding.spec}; reshard what f returns, "
                "or x, with jax.sharding.reshard"
            )


def _as_result(x: Any, result: Any) -> Any:
    """Returns `x` with the dtype and the varying mesh axes of `result`."""
    x = jax.lax.convert_element_type(x, result.dtype)
    return vary_over(x, frozenset(result.manual_axis_type.varying))


def _forward(
    step: Callable[..., Any], stack: Tree, x: Tree, closed: list[Any], keep_inputs: bool
) -> tuple[Tree, Any]:
    """Returns the result, and the inputs of all layers but the last, and of that."""
    leaves, structure = jax.tree.flatten(stack)
    num_layers = leaves[0].shape[0]

    def compute(layer: Tree, x: Tree) -> Tree:
        return step(layer, x, closed)

    def body(carry: Any, i: Any) -> Any:
        x, layer = carry
        fetches = [Transfer.fetch(leaf, i + 1) for leaf in leaves]
        y, following = beside(compute, (layer, x), fetches)
        return (y, jax.tree.unflatten(structure, following)), x if keep_inputs else None

    first = jax.tree.map(lambda leaf: _fetch(leaf, 0), stack)
    (x, layer), inputs = jax.lax.scan(
        body, (x, first), jnp.arange(num_layers - 1, dtype=jnp.int32)
    )
    return compute(layer, x), (inputs, x)


def _backward(
    step: Callable[..., Any],
    stack: Tree,
    inputs: Any,
    closed: list[Any],
    batch: Any,
    ct: Tree,
) -> tuple[Tree, Tree, list[Any]]:
    """Returns the gradients of stack, x and what `step` closes over.

    If only `x`, `closed` or `ct` are mapped, and not by the function that was
    differentiated (`batch` is not mapped), there are as many gradients of stack.
    """
    leaves, structure = jax.tree.flatten(stack)
    num_layers = leaves[0].shape[0]
    earlier_inputs, last_input = inputs
    # Only these of the stack's leaves have a gradient.
    inexact = [n for n, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def pull_back(layer: Tree, x: Tree, ct: list[Any]) -> Any:
        row_grads, ct, closed_grads = _pull_back(step, layer, x, closed, ct)
        of_stack = zip(row_grads, inexact, strict=True)
        row_grads = [
            _marks.total_p.bind(grad, leaves[n], batch) for grad, n in of_stack
        ]
        return row_grads, ct, closed_grads

    def fetches(i: Any) -> list[Transfer]:
        return [Transfer.fetch(leaf, i) for leaf in leaves]

    def unflatten(values: list[Any]) -> Tree:
        return jax.tree.unflatten(structure, values)

    # The last layer, while the one before it comes in.
    last = jax.tree.map(lambda leaf: _fetch(leaf, num_layers - 1), stack)
    ct = [c for c in jax.tree.leaves(ct) if _is_inexact(c)]
    (row_grads, ct, closed_grads), layer = beside(
        pull_back,
        (last, last_input, ct),
        fetches(num_layers - 2) if num_layers > 1 else [],
    )
    of_stack = zip(row_grads, inexact, strict=True)
    grads = [p.host_buffer_like(leaves[n], row) for row, n in of_stack]

    def body(carry: Any, per_layer: Any) -> Any:
        layer, ct, pending, grads, closed_grads = carry
        i, x = per_layer
        stores = [
            Transfer.store(stack_grad, i + 1, row_grad)
            for stack_grad, row_grad in zip(grads, pending, strict=True)
        ]
        # The first layer fetches itself once more: cheaper than a third copy of
        # the layer's derivative in the program.
        (row_grads, ct, more), moved = beside(
            pull_back,
            (unflatten(layer), x, ct),
            [*fetches(jnp.maximum(i - 1, 0)), *stores],
        )
        closed_grads = jax.tree.map(jnp.add, closed_grads, more)
        layer, grads = moved[: len(leaves)], moved[len(leaves) :]
        return (layer, ct, row_grads, grads, closed_grads), None

    if num_layers > 1:
        (_, ct, row_grads, grads, closed_grads), _ = jax.lax.scan(
            body,
            (layer, ct, row_grads, grads, closed_grads),
            (jnp.arange(num_layers - 1, dtype=jnp.int32), earlier_inputs),
            reverse=True,
        )
    stack_grads: list[Any] = [None] * len(leaves)
    for n, grad, row in zip(inexact, grads, row_grads, strict=True):
        stack_grads[n] = p.store_p.bind(*vary_alike(grad, np.int32(0), row), axis=0)
    x_leaves, x_structure = jax.tree.flatten(last_input)
    return (
        unflatten(stack_grads),
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


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _fetch(leaf: Any, i: int) -> Any:
    return p.fetch_p.bind(*vary_alike(leaf, np.int32(i)), axis=0)
