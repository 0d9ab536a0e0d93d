"""Transfers over the links of several GPUs, from threads and under other settings."""

import threading

import jax
import numpy as np
import pytest
from gpu_programs import (
    MIB,
    PLATFORM,
    assert_same_bytes,
    gpus,
    on_host,
    random,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb
from jax_turbobus import gpu as engine_of_gpus

pytestmark = pytest.mark.multigpu


def test_the_other_gpus_link_is_used(gpu):
    if PLATFORM != "cuda":
        pytest.skip("CPU devices have no links of their own")
    h = on_host(random(256 * MIB, np.uint8), gpu)
    move = jax.jit(tb.to_device)
    jax.block_until_ready(move(h))
    before = engine_of_gpus.engine().raw()
    for _ in range(4):
        jax.block_until_ready(move(h))
    after = engine_of_gpus.engine().raw()
    assert after["num_pooled"] - before["num_pooled"] == 4
    relayed = [
        b["num_bytes"] - a["num_bytes"]
        for a, b in zip(before["paths"], after["paths"], strict=True)
        if a["gpu"] == 0 and a["relay"] == 1 and a["direction"] == "h2d"
    ]
    assert relayed[0] > 4 * 100 * MIB
    lanes = {lane.name: lane for lane in tb.stats().lanes}
    assert lanes["gpu0 h2d via gpu1"].num_bytes >= relayed[0]


def test_shards_of_both_gpus_move_at_once_with_collectives_between():
    mesh = jax.make_mesh(
        (2,), ("x",), devices=gpus()[:2], axis_types=(jax.sharding.AxisType.Auto,)
    )
    x = random((2, 12 * MIB), np.int32)
    host = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    h = jax.device_put(x, host)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def program(h):
        d = tb.to_device(h)
        total = jax.lax.psum(d, "x")
        h2 = tb.to_host(total + d)
        again = tb.to_device(h2)
        return again + jax.lax.ppermute(d, "x", [(0, 1), (1, 0)])

    expected = x + x.sum(0, keepdims=True, dtype=np.int32) + x[::-1]
    for _ in range(5):
        np.testing.assert_array_equal(program(h), expected)


def test_two_programs_from_two_threads_in_any_order():
    devices = gpus()[:2]
    mesh = jax.make_mesh(
        (2,), ("x",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
    )
    x = random((2, 6 * MIB), np.int32)
    h = jax.device_put(x, NamedSharding(mesh, P("x"), memory_kind="pinned_host"))
    alone = [on_host(random(20 * MIB, np.uint8, i), devices[i]) for i in range(2)]

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def sharded(h):
        d = tb.to_device(h)
        return jax.lax.psum(d, "x") + d

    single = jax.jit(tb.to_device)
    expected = x.sum(0, keepdims=True, dtype=np.int32) + x
    errors = []

    def run_sharded():
        try:
            results = [sharded(h) for _ in range(12)]
            for result in results:
                np.testing.assert_array_equal(result, expected)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    def run_single():
        try:
            results = [single(alone[i % 2]) for i in range(40)]
            for i, result in enumerate(results):
                assert_same_bytes(result, alone[i % 2])
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    jax.block_until_ready(sharded(h))
    threads = [threading.Thread(target=t) for t in (run_sharded, run_single)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
        assert not thread.is_alive(), "deadlock"
    assert not errors


@pytest.mark.parametrize(
    "settings",
    [
        {"is_lock_step": True},
        {"split": "even"},
        {"split": "direct"},
        {"has_yields": False},
        {"block_bytes": MIB},
        {"is_disabled": True},
        {"is_traced": True},
    ],
    ids=str,
)
def test_other_settings_are_exact_too(gpu, settings, tmp_path):
    if PLATFORM != "cuda":
        pytest.skip("CPU devices have another engine")
    x = random(77 * MIB + 5, np.uint8)
    before = engine_of_gpus.engine().raw()["num_pooled"]
    with engine_of_gpus.configured(**settings):
        d = jax.jit(tb.to_device)(on_host(x, gpu))
        assert_same_bytes(d, x)
        back = jax.jit(tb.to_host, donate_argnums=1)(d, on_host(x * 0, gpu))
        assert_same_bytes(back, x)
        if "is_traced" in settings:
            path = tmp_path / "trace.json"
            assert tb.trace(path) > 8
            is_pooled = engine_of_gpus.engine().raw()["num_pooled"] > before
            assert ("second hop" in path.read_text()) == is_pooled
