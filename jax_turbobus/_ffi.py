"""Loads the C++ libraries and registers their XLA FFI targets."""

import functools
import importlib
from types import ModuleType

import jax

from jax_turbobus import _compat

__all__ = ["core", "register"]


@functools.cache
def core() -> ModuleType:
    """Returns the C++ extension, with its FFI targets registered for CPU.

    Raises:
      ImportError: JAX is too old, the extension was not built, or it was built
        against a newer FFI than this jaxlib has.
    """
    _compat.check_jax_version()
    try:
        module = importlib.import_module("jax_turbobus._core")
    except ModuleNotFoundError as error:
        if error.name != "jax_turbobus._core":
            raise
        raise ImportError(
            "jax_turbobus: the C++ core is not built; run `pip install .` in the "
            "source tree (needs a C++20 compiler)"
        ) from error
    for name, stages in module.ffi_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
    return module


def register() -> None:
    """Registers every FFI target; safe to call again."""
    core()
