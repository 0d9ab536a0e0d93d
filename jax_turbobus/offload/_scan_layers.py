"""A loop over layers whose parameters stay in host memory."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_turbobus import _ffi
from jax_turbobus.offload import _marks
from jax_turbobus.offload._check_together import check_together
from jax_turbobus.offload._checks import (
    DEVICE,
    HOST,
    check_array,
    check_function,
    check_space,
    check_stack,
    check_values,
    named_leaves,
    space_of,
)
from jax_turbobus.offload._define import row_aval
from jax_turbobus.offload._layer_loops import Keep, run_backward, run_forward
from jax_turbobus.offload._programs import compiled_for
from jax_turbobus.offload._rows import vary_over

__all__ = ["scan_layers"]

Tree = Any


def scan_layers(
    f: Callable[[Tree, Tree], Tree],
    stack: Tree,
    x: Tree,
    *,
    offload_inputs: bool = False,
) -> Tree:
    """Returns `x` after `x = f(layer, x)` for every layer of a stack.

    While one layer computes, the next one is fetched; two are on the device. The
    backward pass fetches the layers again, last one first, and writes each layer's
    gradient to a stack in host memory while the one before it computes. The inputs
    of all layers are kept for it, on the device or in host memory; what `f` computes
    is not (wrap `f` in `jax.checkpoint` only to save memory within one layer).

    Args:
      f: takes one layer, a tree like `stack` without its first axis, in device
        memory, and `x`; returns the next `x`. It may close over other arrays, and
        those have gradients too.
      stack: a tree of arrays `[num_layers, ...]` in pinned host memory. They may be
        sharded along any axis but the first. Leaves in device memory stay there, as
        do their gradients; unless `offload_inputs`, at least one must be on the host.
      x: a tree of arrays in device memory.
      offload_inputs: whether the layers' inputs are kept in pinned host memory: each
        goes out while its layer computes, and comes back, in the backward pass, with
        its layer. Leaves of `x` whose dtype is a key or below a byte stay on the
        device. Makes no difference to the result, nor without derivatives.

    Returns:
      A tree like `x`.

    Raises:
      TypeError: `f` is no function, a leaf of `stack` no `jax.Array`, or
        `offload_inputs` neither True nor False.
      ValueError: a leaf of `stack` has no layers, they disagree about how many, or
        there is nothing to move; `x` is not in device memory, or `f` returns
        something unlike `x`.

    Transforms:
      jit, reverse-mode differentiation (the gradient of a leaf of `stack` is in the
      memory that the leaf is in), vmap, shard_map, checkpoint. Forward-mode
      differentiation only of a gradient; that in reverse mode by all but `stack`,
      and with `offload_inputs` by nothing.

    Source:
      docs/offload.md, "Layers".
    """
    check_function("scan_layers", "f", f)
    if not isinstance(offload_inputs, bool):
        raise TypeError(
            "scan_layers: argument offload_inputs: expected True or False, got "
            f"{offload_inputs!r}; under jax.jit make it a static argument"
        )
    leaves = named_leaves("stack", stack)
    if not leaves:
        raise ValueError("scan_layers: argument stack: expected arrays, got none")
    for name, leaf in leaves:
        check_array("scan_layers", name, leaf)
    spaces = [space_of(leaf) for _, leaf in leaves]
    if not offload_inputs and all(space is DEVICE for space in spaces):
        raise ValueError(
            f"scan_layers: argument {leaves[0][0]}: expected memory kind 'pinned_host' "
            "of at least one leaf, got 'device' of all: nothing would move. Put layers "
            "there with to_host(stack), keep the inputs of layers there with "
            "offload_inputs=True, or use jax.lax.scan"
        )
    for (name, leaf), space in zip(leaves, spaces, strict=True):
        check_stack("scan_layers", leaf, name, DEVICE if space is DEVICE else HOST)
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
    return compiled_for(_BODIES[offload_inputs], f)(stack, x)


def _scan_layers(
    f: Callable[..., Any], stack: Tree, x: Tree, offload_inputs: bool
) -> Tree:
    step, x, tracers = _close(f, stack, x)
    keep = Keep.HOST if offload_inputs else Keep.DEVICE

    @jax.custom_vjp
    def run(stack: Tree, x: Tree, closed: list[Any], batch: Any) -> Tree:
        del batch
        return run_forward(step, stack, x, closed, Keep.NOTHING)[0]

    def forward(stack: Tree, x: Tree, closed: list[Any], batch: Any) -> Any:
        result, inputs = run_forward(step, stack, x, closed, keep)
        return result, (stack, inputs, closed, batch)

    def backward(residuals: Any, ct: Tree) -> Any:
        stack, inputs, closed, batch = residuals
        return (*run_backward(step, stack, inputs, closed, batch, ct), None)

    run.defvjp(forward, backward)
    batch = _marks.batch_p.bind(
        *jax.tree.leaves((stack, x, tracers)), differentiated=False
    )
    return run(stack, x, tracers, batch)


# Each is one object: programs are found by it.
_BODIES = {
    flag: functools.partial(_scan_layers, offload_inputs=flag) for flag in (False, True)
}


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
