"""Derivatives of scan_layers: of batches, of derivatives, in any order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_stacks import (
    WIDTH,
    assert_close,
    layers,
    loss,
    reference,
    squared,
    values,
)

import jax_turbobus as tb


def test_bfloat16_gradients_keep_their_dtype():
    stack = values(3, WIDTH, WIDTH, scale=1 / 6).astype(jnp.bfloat16)
    x = values(8, WIDTH, seed=9).astype(jnp.bfloat16)

    def run(scan, stack, x):
        return scan(lambda w, x: jnp.tanh(x @ w), stack, x).astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(functools.partial(run, tb.scan_layers)))(
        tb.to_host(stack), x
    )
    assert grad.dtype == jnp.bfloat16
    expected = jax.grad(functools.partial(run, reference))(stack, x)
    np.testing.assert_allclose(
        grad.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("stacked", [False, True], ids=["shared", "stacked"])
def test_vmap(stacked):
    stack, xs = layers(4), values(3, 8, WIDTH, seed=9)
    if stacked:
        stack = jax.tree.map(lambda s: jnp.stack([s, 2 * s, 3 * s]), stack)

    def run(scan, params, shift, xs):
        def one(params, shift, x):
            return loss(scan, {**params, "shift": shift}, x)

        over = 0 if stacked else None
        return jax.vmap(one, in_axes=(over, over, 0))(params, shift, xs).sum()

    def gradient(scan, params, shift, xs):
        run_scan = functools.partial(run, scan)
        return jax.value_and_grad(run_scan, argnums=(0, 2))(params, shift, xs)

    shift = stack.pop("shift")
    theirs = gradient(reference, stack, shift, xs)
    ours = jax.jit(functools.partial(gradient, tb.scan_layers))(
        tb.to_host(stack), tb.to_host(shift), xs
    )
    assert_close(ours, theirs)
    for name, grad in ours[1][0].items():
        assert grad.shape == stack[name].shape
        assert grad.sharding.memory_kind == "pinned_host"


def test_a_gradient_does_not_depend_on_which_was_taken_before():
    stack, x = tb.to_host(values(3, 8, 8, scale=1 / 3)), values(2, 8, seed=9)

    def f(w, x):  # one function, whose traces JAX keeps
        return jnp.tanh(x @ w)

    def run(stack, x):
        return tb.scan_layers(f, stack, x).sum()

    expected = jax.grad(run)(stack, x)
    jax.grad(run, 1)(stack, x)
    assert_close(jax.jit(jax.grad(jax.jit(run)))(stack, x), expected)


@pytest.mark.parametrize(("inner", "outer"), [(0, 0), (0, 1), (1, 0)])
def test_forward_over_reverse(inner, outer):
    stack, x = values(3, 8, 8, scale=1 / 3), values(2, 8, seed=9)

    def directional(scan, stack, x, tangent):
        def gradient(value):
            operands = (value, x) if outer == 0 else (stack, value)
            return jax.grad(functools.partial(squared, scan), inner)(*operands)

        return jax.jvp(gradient, ((stack, x)[outer],), (tangent,))[1]

    tangent = (values(3, 8, 8, seed=3), values(2, 8, seed=3))[outer]
    theirs = directional(reference, stack, x, tangent)
    moved = tb.to_host(tangent) if outer == 0 else tangent
    ours = jax.jit(functools.partial(directional, tb.scan_layers))
    assert_close(ours(tb.to_host(stack), x, moved), theirs)


@pytest.mark.parametrize("inner", [0, 1])
def test_reverse_over_reverse_by_the_stack_is_refused_in_words(inner):
    def norm(stack, x):
        grad = jax.grad(functools.partial(squared, tb.scan_layers), inner)(stack, x)
        return (tb.device_put(grad, jax.memory.Space.Device) ** 2).sum()

    stack, x = tb.to_host(values(3, 8, 8, scale=1 / 3)), values(2, 8, seed=9)
    with pytest.raises(NotImplementedError, match=r"argument stack: .* forward over"):
        jax.grad(norm)(stack, x)
    by_x = jax.grad(norm, 1)(stack, x)  # and by x it is not

    def plain(stack, x):
        grad = jax.grad(functools.partial(squared, reference), inner)(stack, x)
        return (grad**2).sum()

    assert_close(by_x, jax.grad(plain, 1)(tb.to_device(stack), x))


def example(scan, stack, x):
    return jnp.sin(scan(lambda w, x: jnp.tanh(x @ w), stack, x)).sum()


def of_batch(f, stack, xs):
    return jax.vmap(f, (None, 0))(stack, xs).sum()


PER_EXAMPLE = {
    "vmap_grad": lambda f: jax.vmap(jax.grad(f), (None, 0)),
    "vmap_vmap_grad": lambda f: jax.vmap(
        jax.vmap(jax.grad(f), (None, 0)), (None, 1), out_axes=1
    ),
    "grad_vmap_vmap": lambda f: jax.grad(
        lambda s, xs: of_batch(functools.partial(of_batch, f), s, xs)
    ),
    "vmap_grad_vmap": lambda f: jax.vmap(
        jax.grad(functools.partial(of_batch, f)), (None, 0)
    ),
    "jacrev": lambda f: jax.jacrev(jax.vmap(jax.vmap(f, (None, 0)), (None, 0))),
    "grad_of_vmap_value_and_grad": lambda f: jax.grad(
        lambda s, xs: (
            jax.vmap(jax.vmap(jax.grad(f, 1), (None, 0)), (None, 0))(0.5 * s, xs) ** 2
        ).sum(),
        1,
    ),
}


@pytest.mark.parametrize(
    ("order", "sharded"),
    [("vmap_grad", True), *((order, False) for order in PER_EXAMPLE)],
)
def test_a_batch_is_summed_only_where_it_was_differentiated_as_one(order, sharded):
    stack, xs = values(3, 8, 8, scale=1 / 3), values(2, 4, 3, 8, seed=9)
    transform = PER_EXAMPLE[order]
    host = stack
    if sharded:
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
        host = jax.device_put(stack, NamedSharding(mesh, P(None, "x")))
    host = tb.to_host(host)
    ours = jax.jit(transform(jax.jit(functools.partial(example, tb.scan_layers))))
    theirs = transform(functools.partial(example, reference))(stack, xs)
    assert_close(ours(host, xs), theirs)


def test_the_derivative_can_be_differentiated():
    stack, x = values(3, WIDTH, WIDTH, scale=1 / 6), values(2, WIDTH, seed=9)

    def run(scan, stack, x):
        def f(w, x):
            return jnp.tanh(x @ w)

        gradient = jax.grad(lambda x: (scan(f, stack, x) ** 2).sum())
        return (gradient(x) ** 2).sum()

    ours = jax.jit(jax.grad(functools.partial(run, tb.scan_layers), argnums=1))
    theirs = jax.grad(functools.partial(run, reference), argnums=1)
    assert_close(ours(tb.to_host(stack), x), theirs(stack, x))


KEPT = functools.partial(tb.scan_layers, offload_inputs=True)


@pytest.mark.parametrize("mapped", ["stack", "closed"])
@pytest.mark.parametrize("order", ["vmap_grad", "grad_vmap"])
def test_kept_inputs_of_a_batch_that_starts_from_one_x(mapped, order):
    # The first input is the same for all; those of later layers are not.
    stacks, x = values(2, 3, 8, 8, scale=1 / 3), values(4, 8, seed=9)
    gains = values(2, 8, seed=5)
    axes = {"stack": (0, None, None), "closed": (None, None, 0)}[mapped]

    def gradient(scan, *args):
        def one(stack, x, gain):
            return (scan(lambda w, x: jnp.tanh(x @ w) * gain, stack, x) ** 2).sum()

        if order == "vmap_grad":
            return jax.vmap(jax.grad(one, (0, 1, 2)), axes)(*args)
        each = jax.vmap(one, axes)
        return jax.grad(lambda *args: each(*args).sum(), (0, 1, 2))(*args)

    args = (stacks, x, gains[0]) if mapped == "stack" else (stacks[0], x, gains)
    ours = jax.jit(functools.partial(gradient, KEPT))(tb.to_host(args[0]), *args[1:])
    assert_close(ours, gradient(reference, *args))


@pytest.mark.parametrize("where", [tb.to_host, jnp.asarray], ids=["host", "device"])
def test_forward_over_reverse_with_kept_inputs(where):
    stack, x = values(3, 8, 8, scale=1 / 3), values(2, 8, seed=9)

    def directional(scan, stack):
        gradient = jax.grad(lambda stack: squared(scan, stack, x))
        return jax.jvp(gradient, (stack,), (stack,))[1]

    ours = jax.jit(functools.partial(directional, KEPT))(where(stack))
    assert_close(ours, directional(reference, stack))
    assert ours.sharding.memory_kind == where(stack).sharding.memory_kind


def test_reverse_over_reverse_with_kept_inputs_is_refused_in_words():
    def norm(x):
        return (jax.grad(functools.partial(squared, KEPT, stack))(x) ** 2).sum()

    stack, x = tb.to_host(values(3, 8, 8, scale=1 / 3)), values(2, 8, seed=9)
    with pytest.raises(NotImplementedError, match="pass offload_inputs=False"):
        jax.grad(norm)(x)
