"""Eight CPU devices for every test, or GPUs; what ran where, in the header.

Tests in tests/gpu see GPUs if nothing else is run with them: all others are of CPU
devices, on any machine.
"""

import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from deviceless import cuda

__all__ = ["cuda"]


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("JAX_PLATFORMS"):
        return
    on_gpus = pathlib.Path(__file__).parent / "gpu"
    places = (config.invocation_params.dir / arg.split("::")[0] for arg in config.args)
    if not all(on_gpus in (path, *path.parents) for path in places):
        os.environ["JAX_PLATFORMS"] = "cpu"  # of processes that tests start
        jax.config.update("jax_platforms", "cpu")


def pytest_report_header() -> str:
    devices = ", ".join(sorted({d.device_kind for d in jax.devices()}))
    return f"jax {jax.__version__}, {jax.device_count()} x {devices}"
