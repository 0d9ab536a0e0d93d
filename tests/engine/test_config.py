"""The engine that `configure` and `configured` put in place, and what they put back."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trace_files import num_transfers

import jax_turbobus
from jax_turbobus import config
from jax_turbobus.topology import Topology

MIB = 1 << 20


def to_device_under_jit(size):
    """A program of several operations around one transfer of f32[size]."""
    x = jax.device_put(
        jnp.arange(size, dtype=jnp.float32),
        jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
    )

    @jax.jit
    def f(x):
        y = jax_turbobus.to_device(x)
        for _ in range(4):
            y = jnp.sin(y) * 2 + 1
        return y

    want = jnp.arange(size, dtype=jnp.float32)
    for _ in range(4):
        want = jnp.sin(want) * 2 + 1
    np.testing.assert_allclose(f(x), want, rtol=1e-5, atol=1e-5)


def test_without_configure_there_is_no_engine():
    assert not config.current().is_enabled
    assert not jax_turbobus.stats().is_enabled
    assert jax_turbobus.stats().lanes == ()
    assert str(jax_turbobus.stats()).startswith("no engine")


def test_transfers_under_jit_go_over_the_emulated_links():
    made = jax_turbobus.configure(
        topology="2xh200", emulate=True, rate_scale=0.01, block_bytes=MIB
    )
    assert made == config.current()
    assert made.topology.name == "2xh200"
    to_device_under_jit(2 * MIB)
    stats = jax_turbobus.stats()
    assert stats.num_completed >= 1
    assert stats.num_completed_bytes == 8 * MIB
    assert sum(lane.num_bytes for lane in stats.lanes) == 8 * MIB
    one = stats.recent_transfers[-1]
    assert (one.gpu, one.direction, one.status) == (0, "h2d", "OK")
    assert one.ended_ns > one.started_ns >= one.submitted_ns > stats.created_ns
    assert 0 < one.bytes_per_s < 1.2e9
    by_link = stats.bytes_by_link()
    assert by_link["pcie0 numa0>gpu0"] + by_link.get("pcie1 numa0>gpu1", 0) == 8 * MIB


@pytest.mark.parametrize("mode", ["free-running", "lock-step"])
def test_without_a_topology_every_device_has_a_link_of_its_own(mode):
    jax_turbobus.configure(mode=mode)
    to_device_under_jit(MIB)
    stats = jax_turbobus.stats()
    assert len(stats.lanes) == 2 * jax.local_device_count()
    assert stats.bytes_by_link() == {"memory0 numa0>cpu0": 4 * MIB}
    heading, link = str(stats).splitlines()
    assert heading == f"{stats.num_completed} transfers; 4 MiB"
    assert link.split()[:5] == ["memory0", "numa0>cpu0", "4", "MiB", "busy"]


def test_a_device_that_the_topology_has_no_gpu_for_is_an_error_that_names_it():
    jax_turbobus.configure(topology="2xh200")
    sharding = jax.sharding.SingleDeviceSharding(
        jax.devices()[5], memory_kind="pinned_host"
    )
    x = jax.device_put(jnp.ones(100_000), sharding)
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match="no lane serves gpu 5"
    ):
        jax.block_until_ready(jax.jit(jax_turbobus.to_device)(x))


def test_configured_restores_what_was_before():
    jax_turbobus.configure(topology="dgx-v100")
    with jax_turbobus.configured(topology="2xh200", pooled=False) as inner:
        assert inner.pooled is False
        assert len(jax_turbobus.stats().lanes) == 4
    assert config.current().topology.name == Topology.load("dgx-v100").name
    assert jax_turbobus.stats().is_enabled
    with jax_turbobus.configured(enabled=False):
        assert not jax_turbobus.stats().is_enabled
    with pytest.raises(TypeError, match=r"expected arguments of configure .*got speed"):
        jax_turbobus.configured(enabled=False, speed=1).__enter__()


def test_configured_puts_the_same_engine_back_and_writes_its_own_trace(tmp_path):
    outer, inner = tmp_path / "outer.json", tmp_path / "inner.json"
    jax_turbobus.configure(topology="2xh200", trace=outer, block_bytes=MIB)
    to_device_under_jit(MIB)
    engine = config.engine()
    with jax_turbobus.configured(topology="2xh200", trace=inner, block_bytes=4 * MIB):
        to_device_under_jit(MIB)
        with jax_turbobus.configured(enabled=False):
            to_device_under_jit(MIB)
        assert jax_turbobus.stats().num_completed == 1
        assert not inner.exists()
    assert num_transfers(inner) == 1
    assert config.engine() is engine
    to_device_under_jit(MIB)
    assert jax_turbobus.stats().num_completed == 2
    assert not outer.exists()
    jax_turbobus.configure(enabled=False)
    assert num_transfers(outer) == 2


def test_a_trace_that_cannot_be_written_is_warned_about(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    jax_turbobus.configure(topology="2xh200", trace=folder / "trace.json")
    folder.rmdir()
    with pytest.warns(RuntimeWarning, match="gone/trace.json' cannot be written: No"):
        jax_turbobus.configure(enabled=False)
    assert not config.current().is_enabled


def test_the_engine_can_be_changed_while_transfers_run():
    stop = threading.Event()
    failures = []

    def transfer():
        while not stop.is_set():
            try:
                to_device_under_jit(MIB // 4)
            except BaseException as error:  # noqa: BLE001
                failures.append(error)
                return

    thread = threading.Thread(target=transfer)
    thread.start()
    for i in range(12):
        jax_turbobus.configure(
            topology="2xh200",
            emulate=i % 2 == 0,
            mode="lock-step" if i % 3 else "free-running",
            enabled=i % 4 != 3,
            block_bytes=256 << 10,
        )
    stop.set()
    thread.join()
    assert not failures


def test_the_engine_can_be_taken_out_while_a_fetch_starts():
    sharding = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    want = np.arange(4 * MIB, dtype=np.float32)
    x = jax.device_put(want, sharding)

    @jax.jit
    def f(x, y):
        y, fetched = jax_turbobus.overlap(lambda y: jnp.sin(y) * 2 + 1, y, fetch=x)[:2]
        return y.sum(), fetched

    stop = threading.Event()

    def flip():
        while not stop.is_set():
            with jax_turbobus.configured(topology="2xh200"):
                stop.wait(0.005)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for _ in range(25):
            np.testing.assert_array_equal(f(x, jnp.ones(4096))[1], want)
    finally:
        stop.set()
        thread.join()


def test_configure_waits_for_transfers_on_the_old_engine():
    jax_turbobus.configure(topology="2xh200", emulate=True, rate_scale=1e-4)
    old = config.engine()
    source, target = np.ones(MIB, np.uint8), np.zeros(MIB, np.uint8)
    transfer = old.submit(0, "h2d", source, target)
    jax_turbobus.configure(enabled=False)
    assert transfer.is_done
