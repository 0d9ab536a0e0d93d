"""Loads the C++ libraries and registers their XLA FFI targets."""

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import jax

from jax_turbobus import _compat, _environment

__all__ = [
    "CUDA_ONLY",
    "check_api_version",
    "core",
    "cuda",
    "loaded_cuda",
    "register",
    "set_exchange_timeout",
]

# Targets that the core, for CPU devices, has not.
CUDA_ONLY = (
    "turbobus_moe_count",
    "turbobus_moe_finish",
    "turbobus_ragged_all_to_all_onto_zeros",
    *(
        f"turbobus_moe_{name}_start"
        for name in ("dispatch", "dispatch_grad", "combine", "combine_grad")
    ),
)


_T = TypeVar("_T")
_loaded: list[ModuleType] = []  # The CUDA library, once its targets are registered.
_lock = threading.RLock()


def _renew_lock() -> None:
    """Gives a fork's child a lock that no thread of its parent holds."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _once(function: Callable[[], _T]) -> Callable[[], _T]:
    """Returns a function that runs once in a process, whichever threads call it first.

    The others wait for it. What raises runs again at the next call.
    """
    results: list[_T] = []

    @functools.wraps(function)
    def once() -> _T:
        if not results:
            with _lock:
                if not results:
                    results.append(function())
        return results[0]

    return once


def check_api_version(library: str, built_against: tuple[int, int]) -> None:
    """Refuses a library that this jaxlib would choke on.

    XLA checks the version only when a target is registered, and what it refuses
    then takes the whole backend down with it.

    Args:
      library: what to call it in the message.
      built_against: (major, minor) version of the FFI headers it was built with.

    Raises:
      ImportError: jaxlib has an older FFI, or one with another major version.
    """
    found = _compat.ffi_api_version()
    if built_against[0] == found[0] and built_against[1] <= found[1]:
        return
    raise ImportError(
        f"jax_turbobus: {library} was built against XLA FFI "
        f"{'.'.join(map(str, built_against))}, but this jaxlib has "
        f"{'.'.join(map(str, found))}; rebuild jax_turbobus with the jaxlib it is "
        "to run with (pip install --force-reinstall --no-deps jax_turbobus), or "
        "upgrade jaxlib"
    )


@_once
def core() -> ModuleType:
    """Returns the C++ extension, with its FFI targets registered for CPU.

    Raises:
      ImportError: JAX is too old, the extension was not built, or it was built
        against a newer FFI than this jaxlib has.
      ValueError: ``JAX_TURBOBUS_EXCHANGE_TIMEOUT_S`` is no time.
    """
    timeout_s = _environment.exchange_timeout()
    _compat.check_jax_version()
    if importlib.util.find_spec("jax_turbobus._core") is None:
        raise ImportError(
            "jax_turbobus: the C++ core is not built; run `pip install .` in the "
            "source tree (needs a C++20 compiler)"
        )
    _core = importlib.import_module("jax_turbobus._core")
    check_api_version("its C++ core", _core.ffi_api_version)
    _register(_core, "cpu")
    if timeout_s is not None:
        _core.set_exchange_timeout(timeout_s)
    return _core


@_once
def cuda() -> ModuleType | None:
    """Returns the CUDA library with its targets registered, or None without CUDA.

    None where JAX has no CUDA device or the library was not built (there was no
    `nvcc`): programs for CUDA then fail to compile with the name of the target.

    Raises:
      ImportError: the library is there but does not load, or was built against a
        newer FFI than this jaxlib has.
    """
    if not _compat.has_cuda_devices():
        return None
    if importlib.util.find_spec("jax_turbobus._cuda") is None:
        return None
    _cuda = importlib.import_module("jax_turbobus._cuda")
    check_api_version("its CUDA library", _cuda.ffi_api_version)
    for name, parts in _cuda.ffi_types().items():
        jax.ffi.register_ffi_type(name, parts, platform="CUDA")
    _register(_cuda, "CUDA")
    _loaded[:] = [_cuda]
    _cuda.set_exchange_timeout(core().exchange_timeout())
    # Imported here: it imports `topology`, which imports this module.
    importlib.import_module("jax_turbobus.gpu").start(_cuda)
    return _cuda


def set_exchange_timeout(seconds: float) -> None:
    """Sets how long ranks of an exchange wait, here and on the GPUs if there are any.

    Args:
      seconds: positive.
    """
    core().set_exchange_timeout(seconds)
    for library in loaded_cuda():
        library.set_exchange_timeout(seconds)


def loaded_cuda() -> list[ModuleType]:
    """Returns the CUDA library, if something has needed it by now; loads nothing."""
    return list(_loaded)


def _register(library: ModuleType, platform: str) -> None:
    for name, stages in library.ffi_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform=platform)


@_once
def register() -> None:
    """Registers every FFI target; what each public call does first."""
    core()
    cuda()
    # Imported here: it imports this module.
    importlib.import_module("jax_turbobus.config").apply_environment()
