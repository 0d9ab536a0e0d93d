"""The devices of benchmarks that exchange."""

import os
import sys
from typing import NoReturn

import jax

__all__ = ["bench_devices"]

# On CPU devices the comparison is that of four ranks.
_NUM_CPU_DEVICES = 4
_REEXECUTED = "JAX_TURBOBUS_BENCH_REEXECUTED"


def bench_devices() -> list[jax.Device]:
    """Returns the devices to compare on; on CPU, four of them.

    A process that has fewer CPU devices starts itself again with four.
    """
    devices = jax.devices()
    if jax.default_backend() != "cpu":
        return devices
    if len(devices) < _NUM_CPU_DEVICES:
        _start_again()
    return devices[:_NUM_CPU_DEVICES]


def _start_again() -> NoReturn:
    if os.environ.get(_REEXECUTED):
        raise RuntimeError(
            f"bench: expected {_NUM_CPU_DEVICES} CPU devices, got"
            f" {jax.device_count()}; XLA_FLAGS={os.environ.get('XLA_FLAGS')!r}"
        )
    count = f"--xla_force_host_platform_device_count={_NUM_CPU_DEVICES}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    environment = os.environ | {"XLA_FLAGS": flags, _REEXECUTED: "1"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)  # the flag would not count
    command = [sys.executable, "-m", "jax_turbobus", *sys.argv[1:]]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)
