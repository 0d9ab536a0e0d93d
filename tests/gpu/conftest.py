"""GPU tests: skipped, with the reason, where there are not enough GPUs."""

import os
import pathlib
import sys
import tempfile

# Tests that run side by side are no strangers: each lends what it likes.
os.environ["JAX_TURBOBUS_LOCK_DIR"] = tempfile.mkdtemp(prefix="turbobus-locks-")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

# What these tests share is in files beside them and beside those of `moe`.
sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(1, str(pathlib.Path(__file__).parent.parent / "moe"))

from gpu_programs import PLATFORM, gpus

from jax_turbobus import _ffi


def pytest_collection_modifyitems(items):
    found = len(gpus())
    alone = os.environ.get("JAX_PLATFORMS") == "cpu"
    hint = "; run python -m pytest tests/gpu by itself" if alone else ""
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1
        if not (item.get_closest_marker("gpu") or needed == 2):
            continue
        if found < needed:
            reason = f"needs {needed} GPUs, JAX sees {found}{hint}"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif PLATFORM == "cuda" and not _ffi.cuda():
            reason = "jax_turbobus was built without nvcc"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def gpu():
    return gpus()[0]


@pytest.fixture(autouse=True)
def _no_leftovers():
    yield
    jax.clear_caches()
