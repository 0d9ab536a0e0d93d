"""Eight CPU devices for every test, GPUs beside them; what ran where, in the header."""

import importlib.util
import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

# On a machine with GPUs the tests are of CPU devices, too, but those in tests/gpu.
if pathlib.Path("/dev/nvidia0").exists() and importlib.util.find_spec("jax_plugins"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from deviceless import cuda

__all__ = ["cuda"]


def pytest_report_header() -> str:
    devices = ", ".join(sorted({d.device_kind for d in jax.devices()}))
    return f"jax {jax.__version__}, {jax.device_count()} x {devices}"
