"""scan_layers: a loop over layers in host memory, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_stacks import (
    WIDTH,
    assert_close,
    gradients,
    layer,
    layers,
    loss,
    reference,
    values,
)

import jax_turbobus as tb


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_equals_a_scan_over_device_memory(num_layers, transform):
    stack, x = layers(num_layers), values(8, WIDTH, seed=9)
    ours = transform(functools.partial(tb.scan_layers, layer))(tb.to_host(stack), x)
    assert ours.sharding.memory_kind == "device"
    np.testing.assert_array_equal(
        ours, jax.jit(functools.partial(reference, layer))(stack, x)
    )


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, lambda f: jax.jit(jax.checkpoint(f))],
    ids=["eager", "jit", "checkpoint"],
)
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_gradients_come_back_as_rows_in_host_memory(num_layers, transform):
    stack, x = layers(num_layers), values(8, WIDTH, seed=9)

    def gradient(run, stack, x):
        shift = stack["shift"]

        def inner(params, x):
            return loss(run, {**params, "shift": shift}, x)

        params = {name: stack[name] for name in ("w", "b")}
        return transform(jax.grad(inner, argnums=(0, 1)))(params, x)

    dstack, dx = gradient(tb.scan_layers, tb.to_host(stack), x)
    assert {leaf.sharding.memory_kind for leaf in dstack.values()} == {"pinned_host"}
    assert_close((dstack, dx), gradient(reference, stack, x))


@pytest.mark.parametrize(
    "transform", [jax.jit, lambda f: jax.jit(jax.checkpoint(f))], ids=["", "checkpoint"]
)
@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("on_host", [(), ("w",), ("w", "b", "shift")], ids=len)
def test_inputs_kept_on_the_host(on_host, num_layers, transform):
    stack, x = layers(num_layers), values(8, WIDTH, seed=9)
    mixed = stack | {name: tb.to_host(stack[name]) for name in on_host}
    program = transform(
        functools.partial(gradients, tb.scan_layers, offload_inputs=True)
    )
    dstack, dx = program(mixed, x)
    kinds = {name: leaf.sharding.memory_kind for name, leaf in dstack.items()}
    assert kinds == {n: "pinned_host" if n in on_host else "device" for n in ("w", "b")}
    assert_close((dstack, dx), gradients(reference, stack, x))
    on_device = jax.jit(functools.partial(gradients, tb.scan_layers))
    same = on_device(jax.tree.map(tb.to_host, stack), x)
    jax.tree.map(np.testing.assert_array_equal, (dstack, dx), same)


def test_a_few_leaves_stay_on_the_device():
    stack, x = layers(4), values(8, WIDTH, seed=9)
    mixed = stack | {"w": tb.to_host(stack["w"])}
    ours = jax.jit(functools.partial(gradients, tb.scan_layers))(mixed, x)
    assert ours[0]["w"].sharding.memory_kind == "pinned_host"
    assert ours[0]["b"].sharding.memory_kind == "device"
    assert_close(ours, gradients(reference, stack, x))


def test_no_input_stays_on_the_device():
    """What is left between the passes is the stack of inputs, in host memory."""
    stack, x = tb.to_host(values(6, WIDTH, WIDTH, scale=1 / 6)), values(64, WIDTH)

    def kept(**options):
        def run(stack, x):
            return tb.scan_layers(lambda w, x: jnp.tanh(x @ w), stack, x, **options)

        _, pull_back = jax.vjp(run, stack, x)
        leaves = [y for y in jax.tree.leaves(pull_back) if isinstance(y, jax.Array)]
        return sorted(
            (y.sharding.memory_kind, y.shape)
            for y in leaves
            if y.size >= x.size and y.shape != stack.shape
        )

    assert kept() == [("device", (5, 64, WIDTH)), ("device", (64, WIDTH))]
    assert kept(offload_inputs=True) == [
        ("device", (64, WIDTH)),
        ("pinned_host", (5, 64, WIDTH)),
    ]


def test_inputs_that_cannot_lie_on_the_host_stay():
    stack, x = values(4, WIDTH, WIDTH, scale=1 / 6), values(8, WIDTH, seed=9)
    carry = {
        "x": x,
        "depth": jnp.int32(0),
        "bits": jnp.ones(3, jnp.int4),
        "key": jax.random.key(1),
    }

    def f(w, carry):
        noise = jax.random.normal(carry["key"], (WIDTH,)) * carry["bits"][0].astype(
            float
        )
        return {
            "x": jnp.tanh(carry["x"] @ w + noise * carry["depth"]),
            "depth": carry["depth"] + 1,
            "bits": carry["bits"],
            "key": jax.random.fold_in(carry["key"], carry["depth"]),
        }

    def gradient(scan, stack, **options):
        def inner(w, x):
            return (scan(f, w, carry | {"x": x}, **options)["x"] ** 2).sum()

        return jax.jit(jax.grad(inner, argnums=(0, 1)))(stack, x)

    ours = gradient(tb.scan_layers, tb.to_host(stack), offload_inputs=True)
    assert_close(ours, gradient(reference, stack))


@pytest.mark.parametrize("num_rows", [1, 3], ids=["vmap of grad", "grad of vmap"])
def test_inputs_of_a_batch_kept_on_the_host(num_rows):
    stack, xs = layers(4), values(3, 8, WIDTH, seed=9)
    del stack["shift"]

    def f(params, x):
        return jnp.tanh(x @ params["w"] + params["b"]) + x

    def gradient(scan, stack, xs):
        def one(stack, x):
            return (scan(f, stack, x) ** 2).sum()

        if num_rows == 1:
            return jax.vmap(jax.grad(one, (0, 1)), (None, 0))(stack, xs)
        return jax.grad(lambda s, xs: jax.vmap(one, (None, 0))(s, xs).sum(), (0, 1))(
            stack, xs
        )

    scan = functools.partial(tb.scan_layers, offload_inputs=True)
    mixed = {"w": tb.to_host(stack["w"]), "b": stack["b"]}
    ours = jax.jit(functools.partial(gradient, scan))(mixed, xs)
    assert_close(ours, gradient(reference, stack, xs))


def test_what_the_layer_closes_over_has_a_gradient():
    stack, x = layers(4), values(8, WIDTH, seed=9)
    gain, steps = values(WIDTH, seed=5), jnp.arange(WIDTH)

    def run(scan, stack, x, gain):
        # A float with a gradient, an integer without, and one made by jit itself.
        shared = gain * 2

        def f(params, x):
            return layer(params, x) * shared + gain * (steps % 2)

        return (scan(f, stack, x) ** 2).sum()

    ours = jax.jit(jax.grad(functools.partial(run, tb.scan_layers), argnums=(1, 2)))
    theirs = jax.grad(functools.partial(run, reference), argnums=(1, 2))
    assert_close(ours(tb.to_host(stack), x, gain), theirs(stack, x, gain))
    # And where the derivative is taken outside of what was compiled.
    outside = jax.grad(jax.jit(functools.partial(run, tb.scan_layers)), argnums=(1, 2))
    assert_close(outside(tb.to_host(stack), x, gain), theirs(stack, x, gain))


def test_x_may_be_a_tree_with_integers_in_it():
    stack, x = layers(4), values(8, WIDTH, seed=9)

    def f(params, carry):
        return {"x": layer(params, carry["x"]), "depth": carry["depth"] + 1}

    def run(scan, stack, x):
        result = scan(f, stack, {"x": x, "depth": jnp.int32(0)})
        return (result["x"] ** 2).sum(), result["depth"]

    ours = jax.jit(jax.value_and_grad(functools.partial(run, tb.scan_layers), 1, True))
    theirs = jax.value_and_grad(functools.partial(run, reference), 1, True)
    assert_close(ours(tb.to_host(stack), x), theirs(stack, x))


def test_a_weakly_typed_x_takes_the_type_of_the_result():
    stack = tb.to_host({"w": values(3, 256)})
    ours = jax.jit(lambda s: tb.scan_layers(lambda p, x: x + p["w"].sum(), s, 1.0))(
        stack
    )
    np.testing.assert_allclose(ours, 1 + stack["w"].sum(), rtol=1e-5)
