"""What the environment puts in, and what a fork and an exit leave: fresh processes."""

import json
import os
import subprocess
import sys
import textwrap

from trace_files import num_transfers

TRANSFER = """
    import jax, jax.numpy as jnp, jax_turbobus
    from jax.sharding import SingleDeviceSharding
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.device_put(jnp.arange(500_000.0), host)
    y = jax.jit(lambda x: jnp.sin(jax_turbobus.to_device(x)).sum())(x)
"""


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
