"""Which links transfers of this process travel over, and how.

By default there is no engine: on CPU devices a transfer is one plain copy.
`configure` puts an engine in: lanes over the links of a topology, which on CPU
devices move real bytes at memory speed, or (``emulate=True``) in the time that
those links would take. CPU device i plays the topology's GPU i, by its place in
``jax.local_devices(backend="cpu")``; the engine refuses transfers of a device that
the topology has no GPU for.

Environment variables stand in for arguments that are not given:
``JAX_TURBOBUS_TOPOLOGY``, ``JAX_TURBOBUS_EMULATE``, ``JAX_TURBOBUS_POOLED``,
``JAX_TURBOBUS_MODE``, ``JAX_TURBOBUS_BLOCK_BYTES``, ``JAX_TURBOBUS_CHUNK_BYTES``,
``JAX_TURBOBUS_RATE_SCALE`` and ``JAX_TURBOBUS_TRACE`` (1, or a file with a folder or
an ending in its name, which is written when the engine is taken out or the process
ends). If any of the first two or the
last is set, the first transfer of the process configures it so.
``JAX_TURBOBUS_DISABLE=1`` overrides everything: no engine. ``JAX_TURBOBUS_TOP=0``
keeps what is moved from `python -m jax_turbobus top`.
"""

import atexit
import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax_turbobus import _environment, _ffi
from jax_turbobus._settings import NOT_GIVEN, Config, Mode, is_in_environment, resolve
from jax_turbobus.topology import Topology

__all__ = ["Config", "Mode", "apply_environment", "configure", "configured", "current"]

# How long the end of a process waits for transfers before it stops them.
_EXIT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _InPlace:
    """An engine and what it was made from.

    Attributes:
      config: what it was made from.
      engine: the C++ engine; None: there is none.
      is_decided: whether the environment has no say any more.
    """

    config: Config = field(default_factory=Config)
    engine: Any = None
    is_decided: bool = False


class _State:
    """What is in place, and what `configured` will put back."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.now = _InPlace()
        self.set_aside: list[_InPlace] = []
        self.is_exit_registered = False


_state = _State()


def _after_fork_in_child() -> None:
    # The engine's threads stayed with the parent; transfers are plain copies here.
    _state.__init__()  # type: ignore[misc]
    _state.now = _InPlace(is_decided=True)


os.register_at_fork(after_in_child=_after_fork_in_child)


def _make_engine(config: Config) -> Any:
    if config.topology is None:
        return None
    return _ffi.core().Engine(
        config.topology.native,
        emulate=config.emulate,
        pooled=config.pooled,
        mode=config.mode,
        block_bytes=config.block_bytes,
        chunk_bytes=config.chunk_bytes,
        rate_scale=config.rate_scale,
        trace_capacity=config.trace_events,
    )


def _wait_until_idle(engine: Any, deadline: float = math.inf) -> None:
    while engine.stats()["num_in_flight"] > 0 and time.monotonic() < deadline:
        time.sleep(0.001)


def _swap(new: _InPlace) -> _InPlace:
    # What was in place is given back with its transfers still under way.
    with _state.lock:
        if new.engine is not None and not _state.is_exit_registered:
            _state.is_exit_registered = True
            atexit.register(_shut_down)
        _ffi.core().set_process_engine(new.engine)
        old, _state.now = _state.now, new
    return old


def _retire(old: _InPlace) -> None:
    """Waits for the transfers of what has been taken out, and writes its trace."""
    # Imported here: `_observe` imports this module.
    from jax_turbobus import _observe

    # No lock is held: others may want it until all is over.
    if old.engine is None:
        return
    _wait_until_idle(old.engine)
    path = old.config.trace_path
    if path is None:
        return
    try:
        _observe.write_trace(old.engine, path)
    except OSError as error:
        warnings.warn(
            f"trace: {path!r} cannot be written: {error.strerror or error}; what was "
            "recorded is lost. Give configure another file",
            RuntimeWarning,
            stacklevel=3,
        )


def configure(
    *,
    topology: Topology | str | os.PathLike[str] | None = None,
    emulate: bool | None = None,
    pooled: bool | None = None,
    mode: Mode | None = None,
    block_bytes: int | None = None,
    chunk_bytes: int | None = None,
    rate_scale: float | None = None,
    trace: bool | int | str | os.PathLike[str] | None = None,
    enabled: bool = True,
) -> Config:
    """Puts an engine in for this process's transfers on CPU devices.

    It replaces what an earlier call has put in, whose statistics are gone and whose
    trace is written to the file asked for: arguments not given come from the
    environment (see the module) or are the defaults, never from that call. Waits
    for transfers that are still on the old engine. May be called at any time, from
    any thread.

    Args:
      topology: a `Topology`, the name of a shipped one or a file; None: every
        device has a link of its own. CPU device i plays its GPU i.
      emulate: whether transfers take as long as on these links; needs a topology; by
        default they take what copying takes. Bytes are copied for real; where this
        machine copies more slowly than the links would, transfers take longer and
        `stats().num_late_copies` counts it.
      pooled: whether blocks may go over idle links of other GPUs; by default they
        may.
      mode: ``"free-running"``, the default: each lane goes on when it can;
        ``"lock-step"``: all lanes take one block and wait for each other.
      block_bytes: what a lane copies at once, in bytes; at least 4096. By default
        16 MiB.
      chunk_bytes: what a large transfer may have queued on relays at once, in
        bytes; at least `block_bytes`, or 0, the default: eight blocks.
      rate_scale: what all rates are multiplied by (by default 1), to make fast links
        slow enough for a small machine: 0.01 makes 55 GB/s 0.55 GB/s; from 1e-9 to
        1e9, and such that every rate stays between 1 and 1e15 bytes per second.
      trace: whether `trace` records blocks: True, how many, or the path of a file
        that is written (over what is there) when the engine is taken out or the
        process ends; as a string, one with a folder or an ending (``./name``).
      enabled: False takes the engine out: transfers are plain copies again.

    Returns:
      What is in place now.

    Raises:
      ValueError: an argument or an environment variable is not as said here, or
        the topology has no GPU.

    Warns:
      RuntimeWarning: the trace of what was in place cannot be written.

    Source: TurboBus, "Executor" and "Scheduler" (the two modes, blocks, chunks).
    """
    new = _make(
        topology=topology,
        emulate=emulate,
        pooled=pooled,
        mode=mode,
        block_bytes=block_bytes,
        chunk_bytes=chunk_bytes,
        rate_scale=rate_scale,
        trace=trace,
        enabled=enabled,
    )
    _retire(_swap(new))
    return new.config


def _make(**arguments: Any) -> _InPlace:
    config = resolve(**arguments)
    return _InPlace(config, _make_engine(config), is_decided=True)


@contextlib.contextmanager
def configured(**arguments: Any) -> Iterator[Config]:
    """Runs its body under `configure(**arguments)`, then restores what was before.

    What was before is put back as it was: the same engine, with its statistics and
    its trace, or an environment that nothing has applied yet. It is the process's:
    blocks of several threads must not overlap.

    Args:
      **arguments: those of `configure`.

    Yields:
      What is in place.

    Raises:
      TypeError: `configure` has no such argument.
      ValueError: as for `configure`.
    """
    if unknown := set(arguments) - {*NOT_GIVEN, "enabled"}:
        raise TypeError(
            f"configured: expected arguments of configure ({', '.join(NOT_GIVEN)}, "
            f"enabled), got {', '.join(sorted(unknown))}"
        )
    new = _make(**NOT_GIVEN | arguments)
    process = os.getpid()
    before = _swap(new)
    with _state.lock:
        _state.set_aside.append(before)
    try:
        yield new.config
    finally:
        if os.getpid() == process:  # The child of a fork has none of these.
            with _state.lock:
                _state.set_aside.remove(before)
            _retire(_swap(before))


def current() -> Config:
    """Returns what is in place for this process."""
    with _state.lock:
        return _state.now.config


def engine() -> Any:
    """Returns the C++ engine of this process, or None."""
    with _state.lock:
        return _state.now.engine


def apply_environment() -> None:
    """Configures this process as its environment says, once, before any transfer.

    Nothing happens if the environment says nothing, or `configure` was called.

    Raises:
      ValueError: as for `configure`.
    """
    if _state.now.is_decided:
        return
    # A mistake in the environment is an error of every call, not of the first.
    _environment.flag("TOP")
    is_asked = is_in_environment()
    new = _make(**NOT_GIVEN) if is_asked else _InPlace(is_decided=True)
    with _state.lock:
        if not _state.now.is_decided:  # Another thread may have been first.
            _swap(new)


def _shut_down() -> None:
    """Ends the engine before the interpreter does: in peace, or after a while."""
    with _state.lock:
        everything = [*_state.set_aside, _state.now]
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for one in everything:
        if one.engine is not None:
            _wait_until_idle(one.engine, deadline)
            one.engine.abort("the process is ending")
    _swap(_InPlace(is_decided=True))
    for one in everything:
        _retire(one)
        # A program may still go on in what ended its last transfer.
        while one.engine is not None and one.engine.is_held:
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
