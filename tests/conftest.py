"""Eight CPU devices for every test; what ran where, in the header."""

import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from deviceless import cuda

__all__ = ["cuda"]


def pytest_report_header() -> str:
    devices = ", ".join(sorted({d.device_kind for d in jax.devices()}))
    return f"jax {jax.__version__}, {jax.device_count()} x {devices}"
