"""What GPU tests share. With TURBOBUS_TEST_PLATFORM=cpu they run on CPU devices."""

import os
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

PLATFORM = os.environ.get("TURBOBUS_TEST_PLATFORM", "cuda")
MIB = 1 << 20


def gpus():
    try:
        return jax.devices(PLATFORM)
    except RuntimeError:
        return []


def on_host(x, device):
    return jax.device_put(x, SingleDeviceSharding(device, memory_kind="pinned_host"))


def on_device(x, device):
    return jax.device_put(x, SingleDeviceSharding(device, memory_kind="device"))


def host_sharding(device):
    return SingleDeviceSharding(device, memory_kind="pinned_host")


def random(shape, dtype=jnp.float32, seed=0):
    """Random bytes of any dtype, NaNs included."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def assert_same_bytes(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    equal = np.array_equal(
        np.atleast_1d(a).view(np.uint8), np.atleast_1d(b).view(np.uint8)
    )
    assert equal


def environment(**changes):
    """The environment of a process that has the GPUs as its devices."""
    return {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_TURBOBUS_LOCK_DIR": tempfile.mkdtemp(prefix="turbobus-locks-"),
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
        **changes,
    }


def run_python(code, timeout_s=120, **environ):
    """Runs code in a process of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout
