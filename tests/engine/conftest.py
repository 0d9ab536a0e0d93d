"""No engine before and after each test here; lets the tests import their helpers."""

import os
import pathlib
import sys

import pytest

import jax_turbobus

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_engine():
    jax_turbobus.configure(enabled=False)
    yield
    jax_turbobus.configure(enabled=False)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Pages of this test alone: where the folder of this user's is."""
    monkeypatch.setenv("JAX_TURBOBUS_LOCK_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_TURBOBUS_TOP", raising=False)
    jax_turbobus.configure(enabled=False)
    yield tmp_path / f"jax_turbobus-top-{os.geteuid()}"
    jax_turbobus.configure(enabled=False)
