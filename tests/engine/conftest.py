"""No engine before and after each test here; lets the tests import their helpers."""

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
