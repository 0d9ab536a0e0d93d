"""`configure`, its environment variables, and what a fork and an exit leave."""

import json
import os
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turbobus
from jax_turbobus import config
from jax_turbobus.topology import Topology

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_engine():
    jax_turbobus.configure(enabled=False)
    yield
    jax_turbobus.configure(enabled=False)


def run_python(body, **environment):
    """Runs `body` in a fresh interpreter; returns its output, checks its status."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_TURBOBUS")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


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


def num_transfers(path):
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("cat") == "transfer" for event in events)


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


def test_a_block_without_an_engine_leaves_the_environment_to_be_applied(tmp_path):
    outer, never_left = tmp_path / "outer.json", tmp_path / "never_left.json"
    out, _ = run_python(
        """
    import jax_turbobus
    from jax_turbobus import config
    with jax_turbobus.configured(enabled=False):
        pass
    """
        + TRANSFER
        + f"""
    y.block_until_ready()
    print(config.current().topology.name, jax_turbobus.stats().num_completed)
    block = jax_turbobus.configured(topology="2xh200", trace={str(never_left)!r})
    block.__enter__()
    jax.jit(jax_turbobus.to_device)(x).block_until_ready()
    """,
        JAX_TURBOBUS_TOPOLOGY="2xh200",
        JAX_TURBOBUS_TRACE=str(outer),
    )
    assert out.split() == ["2xh200", "1"]
    assert num_transfers(outer) == num_transfers(never_left) == 1


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "no-such"}, "topology: expected one of"),
        ({"topology": 3}, "topology: expected a Topology"),
        ({"topology": "cpu"}, "topology: expected at least one GPU"),
        ({"emulate": True}, "topology: expected one to emulate, got None"),
        ({"mode": "fast"}, "mode: expected 'free-running' or 'lock-step'"),
        ({"block_bytes": 100}, "block_bytes: expected a whole number from 4096 to"),
        ({"block_bytes": 1e6}, "block_bytes: expected a whole number"),
        ({"chunk_bytes": 5000}, "chunk_bytes: expected at least block_bytes"),
        ({"block_bytes": 2**60}, "block_bytes: expected a whole number"),
        ({"block_bytes": 2**70}, "block_bytes: expected a whole number"),
        ({"chunk_bytes": 2**65}, "chunk_bytes: expected a whole number"),
        ({"rate_scale": -1}, "rate_scale: expected a number from 1e-09 to 1e"),
        ({"rate_scale": 1e9}, r"rate_scale: .* to 9.95e\+04 for topology 'cpu devi"),
        ({"rate_scale": 1e308}, "rate_scale: expected a number from"),
        ({"rate_scale": 1e-300}, "rate_scale: expected a number from"),
        ({"rate_scale": float("nan")}, "rate_scale: expected a number from"),
        ({"trace": -3}, "trace: expected a whole number from 0"),
        ({"trace": 2**40}, "trace: expected a whole number from 0"),
        ({"trace": "/nowhere/at/all.json"}, "trace: expected .* got '/nowhere/at"),
        ({"trace": "/"}, "trace: expected"),
        ({"trace": "\0"}, "trace: expected"),
    ],
)
def test_bad_arguments_name_themselves_and_change_nothing(arguments, message):
    before = jax_turbobus.configure(topology="2xh200")
    with pytest.raises(ValueError, match=message):
        jax_turbobus.configure(**arguments)
    assert config.current() == before


def test_the_largest_rate_scale_named_is_one_that_fits():
    jax_turbobus.configure(rate_scale=9.95e4)
    assert jax_turbobus.stats().is_enabled


TRANSFER = """
    import jax, jax.numpy as jnp, jax_turbobus
    from jax.sharding import SingleDeviceSharding
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.device_put(jnp.arange(500_000.0), host)
    y = jax.jit(lambda x: jnp.sin(jax_turbobus.to_device(x)).sum())(x)
"""


def test_the_environment_configures_the_first_transfer(tmp_path):
    path = tmp_path / "trace.json"
    out, _ = run_python(
        TRANSFER
        + """
    from jax_turbobus import config
    c = config.current()
    y.block_until_ready()
    s = jax_turbobus.stats()
    print(c.topology.name, c.emulate, c.pooled, c.mode, c.block_bytes, c.rate_scale)
    print(s.num_completed_bytes)
    """,
        JAX_TURBOBUS_TOPOLOGY="2xh200",
        JAX_TURBOBUS_EMULATE="1",
        JAX_TURBOBUS_POOLED="0",
        JAX_TURBOBUS_MODE="lock-step",
        JAX_TURBOBUS_BLOCK_BYTES="65536",
        JAX_TURBOBUS_RATE_SCALE="0.5",
        JAX_TURBOBUS_TRACE=str(path),
    )
    assert out.split() == [
        "2xh200",
        "True",
        "False",
        "lock-step",
        "65536",
        "0.5",
        "2000000",
    ]
    assert len(json.loads(path.read_text())["traceEvents"]) > 30


def test_disable_overrides_everything():
    out, _ = run_python(
        """
    import jax_turbobus
    print(jax_turbobus.configure(topology="2xh200").is_enabled)
    """
        + TRANSFER
        + "    print(jax_turbobus.stats().is_enabled, y)",
        JAX_TURBOBUS_DISABLE="1",
        JAX_TURBOBUS_TOPOLOGY="2xh200",
    )
    assert out.split()[:2] == ["False", "False"]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("EMULATE", "perhaps", "JAX_TURBOBUS_EMULATE: expected 1 or 0"),
        ("BLOCK_BYTES", "16M", "JAX_TURBOBUS_BLOCK_BYTES: expected a whole number"),
        ("RATE_SCALE", "x", "JAX_TURBOBUS_RATE_SCALE: expected a number"),
        ("TOPOLOGY", "nowhere", "topology: expected one of"),
    ],
)
def test_a_wrong_variable_names_itself(monkeypatch, variable, value, message):
    monkeypatch.setenv(f"JAX_TURBOBUS_{variable}", value)
    with pytest.raises(ValueError, match=message):
        jax_turbobus.configure()


def test_a_process_ends_cleanly_with_transfers_in_flight():
    out, err = run_python(
        """
    import jax_turbobus
    # 2 MB at about 0.1 MB/s: it cannot be over when the process ends.
    jax_turbobus.configure(topology="2xh200", emulate=True, rate_scale=2e-6)
    """
        + TRANSFER
        + """
    import time
    deadline = time.monotonic() + 60
    while not jax_turbobus.stats().num_in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    print("ending", jax_turbobus.stats().num_in_flight)
    """
    )
    assert out == "ending 1\n"
    assert "Traceback" not in err
    assert "terminate" not in err


def test_the_child_of_a_fork_falls_back_to_plain_copies_and_never_hangs():
    out, _ = run_python(
        """
    import os, sys, warnings
    import numpy as np
    from jax_turbobus import _core, config
    import jax_turbobus
    warnings.simplefilter("ignore")
    config.configure(topology="2xh200", emulate=True, rate_scale=1e-3)
    engine = config.engine()
    src, dst = np.ones(3_000_000, np.uint8), np.zeros(3_000_000, np.uint8)
    transfer = engine.submit(0, "h2d", src, dst)
    child = os.fork()
    if child == 0:
        def says(call):
            try:
                call()
            except Exception as error:
                return str(error)
            return "nothing"
        print(_core.has_process_engine(), jax_turbobus.stats().is_enabled)
        print("fork" in says(lambda: engine.submit(0, "h2d", src, dst)))
        print("fork" in says(transfer.wait))
        # A new engine works here.
        config.configure(topology="2xh200")
        config.engine().submit(0, "h2d", src, dst).wait()
        print(int(dst.sum()))
        del engine, transfer
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    transfer.wait()
    print("parent", int(dst.sum()), _core.has_process_engine())
    """
    )
    assert out.split() == (
        ["False", "False", "True", "True", "3000000", "parent", "3000000", "True"]
    )


@pytest.mark.parametrize("name", ["emulate", "pooled", "enabled"])
def test_words_are_no_flags(name):
    with pytest.raises(ValueError, match=f"{name}: expected True or False, got 'no'"):
        jax_turbobus.configure(topology="2xh200", **{name: "no"})
