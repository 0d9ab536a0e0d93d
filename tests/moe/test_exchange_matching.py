"""Calls that look alike are never confused, and a missing rank never hangs."""

import os
import re
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from moe_mesh import integers, make_mesh, on_mesh, routing, scaling_layer

from jax_turbobus import _ffi, moe

E, H = 8, 256


def inputs(num_ranks, num_tokens, seed=0):
    ids = routing("distinct", num_ranks, num_tokens, 2, E, seed)
    return (
        integers((num_ranks * num_tokens, H), seed=seed + 1),
        jnp.asarray(ids.reshape(-1, 2)),
        jnp.ones((num_ranks * num_tokens, 2)),
    )


@jax.jit
def there_and_back(tokens, ids, weights):
    """One helper, lowered once: each call of it has the same attributes."""
    rows, _, state = moe.dispatch(tokens, ids, weights, num_experts=E, axis_name="x")
    return moe.combine(rows, state)


@pytest.mark.slow
def test_sixteen_identical_exchanges_among_collectives():
    """Each call carries its number; a wrong pair would bring another one back."""
    num_ranks, num_calls, num_runs = 8, 16, 1000

    def step(tokens, ids, weights):
        wrong, sums = 0.0, 0.0
        for i in range(num_calls):
            # Work of different lengths, so that ranks come in different orders.
            x = jnp.sin(tokens) if i % 3 else (tokens @ tokens[:1].T) * tokens
            x = jnp.round(x).at[:, 0].set(i)
            y = there_and_back(x, ids, weights)
            wrong += jnp.abs(y - 2 * x).sum()
            if i % 4 == 1:
                sums += lax.psum(x, "x").sum()
        return jnp.reshape(wrong, 1), jnp.reshape(sums, 1)

    args = inputs(num_ranks, 16)
    run = jax.jit(on_mesh(step, make_mesh((num_ranks,))))
    first = run(*args)[1]
    for _ in range(num_runs):
        wrong, sums = run(*args)
        assert not np.asarray(wrong).any()
        np.testing.assert_array_equal(sums, first)


def test_independent_exchanges_beside_psum_under_many_schedules():
    def step(tokens, ids, weights):
        a = there_and_back(tokens + 1, ids, weights)
        total = lax.psum(tokens, "x")
        b = there_and_back(jnp.flip(tokens), ids, weights)
        return a, b, total

    args = inputs(4, 8)
    run = jax.jit(on_mesh(step, make_mesh()))
    x = np.asarray(args[0]).reshape(4, 8, H)
    want = (
        2 * (args[0] + 1),
        2 * x[:, ::-1, ::-1].reshape(4 * 8, H),
        np.tile(x.sum(0), (4, 1)),
    )
    for _ in range(200):
        for g, w in zip(run(*args), want, strict=True):
            np.testing.assert_array_equal(g, w)


def test_many_runs_in_flight_at_once():
    args = inputs(4, 8)
    run = jax.jit(on_mesh(there_and_back, make_mesh()))
    results = [run(args[0] + i, *args[1:]) for i in range(30)]
    for i, y in enumerate(results):
        np.testing.assert_array_equal(y, 2 * (args[0] + i))


def test_two_programs_from_two_threads():
    mesh = make_mesh()
    args = inputs(4, 8)
    scales = [integers((E, H), seed=7 + i) for i in range(2)]
    run = jax.jit(on_mesh(scaling_layer(E), mesh))
    want = [np.asarray(run(*args, scale)) for scale in scales]
    grad = jax.jit(
        jax.grad(lambda x, s: on_mesh(scaling_layer(E), mesh)(x, *args[1:], s).sum())
    )
    want_grad = np.asarray(grad(args[0], scales[1]))
    wrong = []

    def work(i):
        for _ in range(40):
            y = run(*args, scales[i])
            wrong.append(not (np.asarray(y) == want[i]).all())
            if i == 1:
                wrong.append(
                    not (np.asarray(grad(args[0], scales[1])) == want_grad).all()
                )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 120
    assert not any(wrong)


@pytest.fixture
def short_timeout():
    before = moe.exchange_timeout()
    moe.set_exchange_timeout(0.5)
    yield
    moe.set_exchange_timeout(before)


def compute(x, count):
    """Returns `x`, after a computation that grows with `count`."""
    busy = lax.fori_loop(0, count, lambda _, y: jnp.cos(y), x * 0)
    return x + 0 * busy


@pytest.fixture(scope="module")
def two_seconds_of_work():
    """Returns a `count` for `compute` that keeps this machine busy about 2 s."""
    x, count = jnp.ones((8, H)), 2000
    run = jax.jit(compute)
    run(x, 1).block_until_ready()
    start = time.monotonic()
    run(x, count).block_until_ready()
    return int(2.0 / (time.monotonic() - start) * count)


@pytest.mark.parametrize("late", ["dispatch", "combine", "combine's gradient"])
def test_a_late_rank_fails_the_call_on_all_ranks_in_bounded_time(
    short_timeout, two_seconds_of_work, late
):
    """https://github.com/marin-community/marin/issues/8870."""
    del short_timeout

    def be_late(x):
        return compute(x, jnp.where(lax.axis_index("x") == 2, two_seconds_of_work, 1))

    @jax.custom_vjp
    def delayed_gradient(x):
        return x

    delayed_gradient.defvjp(lambda x: (x, None), lambda _, g: (be_late(g),))

    def layer(is_delayed):
        def wait(x, op):
            return be_late(x) if is_delayed and op == late else x

        def step(tokens, ids, weights):
            def loss(tokens):
                # A first layer, so that the keys of the second are known early.
                tokens = wait(there_and_back(tokens, ids, weights), "dispatch")
                rows, _, state = moe.dispatch(
                    tokens, ids, weights, num_experts=E, axis_name="x"
                )
                y = moe.combine(wait(rows, "combine"), state)
                if is_delayed and late == "combine's gradient":
                    y = delayed_gradient(y)
                return (y * y).sum()

            if late == "combine's gradient":
                return jax.grad(loss)(tokens)
            return jnp.reshape(loss(tokens), (1, 1))

        return jax.jit(
            jax.shard_map(
                step,
                mesh=make_mesh(),
                in_specs=jax.P("x"),
                out_specs=jax.P("x"),
            )
        )

    args = inputs(4, 8)
    want = layer(False)(*args)
    start = time.monotonic()
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        jax.block_until_ready(layer(True)(*args))
    waited = time.monotonic() - start
    message = str(caught.value)
    assert f"jax_turbobus: {late} over axis 'x'" in message
    assert_tells_who_is_late(message)
    assert waited < 30
    # Nobody is left waiting, and the next exchange works.
    assert_none_is_open()
    np.testing.assert_array_equal(layer(False)(*args), want)


def assert_tells_who_is_late(message):
    for part in (
        "DEADLINE_EXCEEDED",
        "rank 2 of 4 did not come within 0.5 s",
        "JAX_TURBOBUS_EXCHANGE_TIMEOUT_S",
    ):
        assert part in message
    found = re.search(r"ranks 0, 1, 3 waited for (\d+) bytes", message)
    assert found, message
    assert int(found[1]) > 0


def assert_none_is_open():
    num_open = _ffi.core().num_open_exchanges
    for _ in range(100):
        if not num_open():
            break
        time.sleep(0.1)
    assert num_open() == 0


@pytest.mark.parametrize("late", ["forward", "gradient"])
def test_a_late_rank_fails_ragged_all_to_all_too(
    short_timeout, two_seconds_of_work, late
):
    del short_timeout
    sizes = jnp.full(4, 2)

    def be_late(x):
        return compute(x, jnp.where(lax.axis_index("x") == 2, two_seconds_of_work, 1))

    @jax.custom_vjp
    def delayed_gradient(x):
        return x

    delayed_gradient.defvjp(lambda x: (x, None), lambda _, g: (be_late(g),))

    def step(is_delayed):
        def run(x):
            me = lax.axis_index("x")
            plan = (jnp.arange(4) * 2, sizes, jnp.repeat(me * 2, 4), sizes)
            # A first exchange, so that the second one's key is known early.
            x = moe.ragged_all_to_all(x, x * 0, *plan, axis_name="x")
            x = be_late(x) if is_delayed and late == "forward" else x
            y = moe.ragged_all_to_all(x, x * 0, *plan, axis_name="x")
            return delayed_gradient(y) if is_delayed and late == "gradient" else y

        def per_rank(x):
            y, pull = jax.vjp(run, x)
            return pull(y)[0] if late == "gradient" else y

        return jax.jit(on_mesh(per_rank, make_mesh()))

    x = integers((4 * 8, H))
    want = step(False)(x)
    np.testing.assert_array_equal(want, x)  # Twice there, or there and back.
    start = time.monotonic()
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match="ragged_all_to_all"
    ) as caught:
        jax.block_until_ready(step(True)(x))
    assert time.monotonic() - start < 30
    assert_tells_who_is_late(str(caught.value))
    assert_none_is_open()
    np.testing.assert_array_equal(step(False)(x), want)


def test_the_timeout_is_read_from_the_environment():
    def seconds(value):
        code = "from jax_turbobus import moe; print('imported', flush=True); "
        code += "print(moe.exchange_timeout())"
        env = {**os.environ, "JAX_TURBOBUS_EXCHANGE_TIMEOUT_S": value}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True
        )

    assert seconds("7.5").stdout.split() == ["imported", "7.5"]
    assert seconds(" ").stdout.split() == ["imported", "60.0"]
    for value in ("soon", "1e10"):
        bad = seconds(value)
        assert bad.stdout.strip() == "imported"  # or not even --help would work
        assert bad.returncode != 0
        message = "EXCHANGE_TIMEOUT_S: seconds: expected a positive number, from 0.001"
        assert message in bad.stderr
