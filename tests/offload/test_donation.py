"""Orders of donated arguments and results that docs/offload.md calls good.

The others stop the process, so nothing here is in a bad one.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "offload.md"
SHAPE = (32, 64)


def arguments(sharding):
    """Weights, momentum (in host memory) and gradients."""
    put = [sharding.with_memory_kind(k) for k in ("device", "pinned_host", "device")]
    return [jax.device_put(jnp.full(SHAPE, n + 1.0), s) for n, s in enumerate(put)]


def momentum_step(weights, momentum, grads):
    new = 0.5 * tb.to_device(momentum) + grads
    return {
        "weights": weights - new,
        "momentum": tb.to_host(new, momentum),
        "rest": 2 * new,
    }


def check(results, order, out_pointer=None):
    expected = {"weights": -3.0, "momentum": 4.0, "rest": 8.0}
    for name, result in zip(order, results, strict=True):
        np.testing.assert_array_equal(result, np.full(SHAPE, expected[name]))
        kind = "pinned_host" if name == "momentum" else "device"
        assert result.sharding.memory_kind == kind
        if name == "momentum" and out_pointer is not None:
            assert result.unsafe_buffer_pointer() == out_pointer


@pytest.mark.parametrize(
    ("donate", "order"),
    [
        ((0, 1), ["weights", "momentum", "rest"]),
        ((0, 1), ["weights", "momentum"]),
        ((1,), ["momentum", "weights", "rest"]),
        ((0,), ["weights", "momentum", "rest"]),
        ((0,), ["weights", "rest", "momentum"]),
        ((0, 1, 2), ["weights", "momentum", "rest"]),
        ((), ["rest", "momentum", "weights"]),
    ],
)
def test_donated_arguments_and_what_they_become_in_one_order(donate, order):
    def step(*args):
        results = momentum_step(*args)
        return [results[name] for name in order]

    args = arguments(SingleDeviceSharding(jax.devices()[0]))
    pointer = args[1].unsafe_buffer_pointer() if 1 in donate else None
    check(jax.jit(step, donate_argnums=donate)(*args), order, pointer)
    assert [x.is_deleted() for x in args] == [n in donate for n in range(3)]


@pytest.mark.parametrize("order", [["momentum", "weights"], ["rest", "momentum"]])
def test_any_order_where_all_is_placed(order):
    def step(*args):
        results = momentum_step(*args)
        return [results[name] for name in order]

    one = SingleDeviceSharding(jax.devices()[0])
    kinds = ["pinned_host" if n == "momentum" else "device" for n in order]
    out_shardings = [one.with_memory_kind(kind) for kind in kinds]
    placed = jax.jit(step, donate_argnums=(0, 1), out_shardings=out_shardings)
    several = jax.jit(step, donate_argnums=(0, 1))
    check(placed(*arguments(one)), order)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    check(several(*arguments(NamedSharding(mesh, P("x")))), order)


def run_example(section):
    """Returns what the first example of a section of the docs leaves behind."""
    text = DOCS.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    code = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[0]
    found = {}
    exec(compile(code, str(DOCS), "exec"), found)
    return found


def test_an_optimizer_lives_on_the_host_as_the_docs_say():
    optax = pytest.importorskip("optax")
    found = run_example("An optimizer's state")
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(found["state"])}
    assert kinds == {"pinned_host"}
    params = {"w": jnp.ones((64, 64)) / 64}
    state = optax.adam(1e-2).init(params)
    for _ in range(3):
        grads = jax.grad(found["loss"])(params, jnp.ones((16, 64)))
        updates, state = optax.adam(1e-2).update(grads, state, params)
        params = optax.apply_updates(params, updates)
    for one, other in zip(
        jax.tree.leaves((found["params"], found["state"])),
        jax.tree.leaves((params, state)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4)


def test_a_cache_lives_on_the_host_as_the_docs_say():
    found = run_example("A cache")
    cache = {name: jnp.zeros((4, 128, 64)) for name in "kv"}
    for now in range(3):
        x = jnp.ones(64)
        for i in range(4):
            k = cache["k"][i].at[now].set(x)[: now + 1]
            v = cache["v"][i].at[now].set(jnp.tanh(x))[: now + 1]
            cache["k"] = cache["k"].at[i, now].set(x)
            cache["v"] = cache["v"].at[i, now].set(jnp.tanh(x))
            x = x + jax.nn.softmax(k @ x / 8) @ v
    for name in "kv":
        assert found["cache"][name].sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(found["cache"][name], cache[name], rtol=1e-5)
    np.testing.assert_allclose(found["x"], x, rtol=1e-5)


def test_a_stack_is_trained_as_the_docs_say():
    found = run_example("Training a streamed stack")

    def loss(stack, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, x, stack)[0] ** 2)

    stack, momentum = jnp.ones((8, 64, 64)) / 64, jnp.zeros((8, 64, 64))
    for _ in range(3):
        value, grads = jax.value_and_grad(loss)(stack, jnp.ones((16, 64)))
        norm = jnp.linalg.norm(grads)
        momentum = 0.9 * momentum + grads * jnp.minimum(1, 1 / norm)
        stack = stack - 0.1 * momentum
    for name, expected in (("stack", stack), ("momentum", momentum)):
        assert found[name].sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["value"], value, rtol=1e-5)
    np.testing.assert_allclose(found["norm"], norm, rtol=1e-4)
    assert found["norm"] > 1  # it was clipped
