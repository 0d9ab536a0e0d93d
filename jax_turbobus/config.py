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
``JAX_TURBOBUS_RATE_SCALE`` and ``JAX_TURBOBUS_TRACE`` (a file that is written when
the engine is taken out or the process ends, or 1). If any of the first two or the
last is set, the first transfer of the process configures it so.
``JAX_TURBOBUS_DISABLE=1`` overrides everything: no engine.
"""

import atexit
import contextlib
import math
import numbers
import os
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from jax_turbobus import _ffi
from jax_turbobus.topology import Topology

__all__ = ["Config", "Mode", "apply_environment", "configure", "configured", "current"]

Mode = Literal["free-running", "lock-step"]

_PREFIX = "JAX_TURBOBUS_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")
_DEFAULT_BLOCK_BYTES = 16 << 20
_DEFAULT_TRACE_EVENTS = 1 << 16
_MOST_TRACE_EVENTS = 1 << 26
# No machine has more memory; sums of such sizes and rates stay exact in the core.
_MOST_BYTES = 1 << 46
_RATE_SCALES = (1e-9, 1e9)
# What the scheduler takes for a rate, in bytes per second.
_SCALED_RATES = (1.0, 1e15)
# What a lane of a machine without a topology is taken to carry.
_NOMINAL_BYTES_PER_S = 10e9
# How long the end of a process waits for transfers before it stops them.
_EXIT_TIMEOUT_S = 2.0
_NOT_GIVEN: dict[str, Any] = dict.fromkeys(
    (
        "topology",
        "emulate",
        "pooled",
        "mode",
        "block_bytes",
        "chunk_bytes",
        "rate_scale",
        "trace",
    )
)


@dataclass(frozen=True, slots=True)
class Config:
    """What `configure` has put in place.

    Attributes:
      topology: whose links are used; None: there is no engine.
      emulate: whether transfers take the time that these links would need.
      pooled: whether idle links of other GPUs are used, too.
      mode: how lanes go on: each when it can, or all in common slots.
      block_bytes: what a lane copies at once.
      chunk_bytes: what a large transfer may have queued on relays at once; 0:
        eight blocks.
      rate_scale: what all rates of the topology are multiplied by.
      trace_events: how many blocks and transfers the trace keeps; 0: no trace.
      trace_path: where the trace goes when this is taken out or the process ends;
        None: nowhere.
    """

    topology: Topology | None = None
    emulate: bool = False
    pooled: bool = True
    mode: Mode = "free-running"
    block_bytes: int = _DEFAULT_BLOCK_BYTES
    chunk_bytes: int = 0
    rate_scale: float = 1.0
    trace_events: int = 0
    trace_path: str | None = None

    @property
    def is_enabled(self) -> bool:
        """Whether transfers go through an engine."""
        return self.topology is not None


@dataclass(frozen=True, slots=True)
class _InPlace:
    """An engine and what it was made from.

    Attributes:
      config: what it was made from.
      engine: the C++ engine; None: there is none.
      is_decided: whether the environment has no say any more.
    """

    config: Config = Config()
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


def _from_environment(name: str) -> str | None:
    value = os.environ.get(_PREFIX + name)
    return value.strip() if value is not None and value.strip() else None


def _environment_flag(name: str) -> bool | None:
    text = os.environ.get(_PREFIX + name)
    if text is None:
        return None
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise ValueError(f"{_PREFIX}{name}: expected 1 or 0, got {text!r}")


def _environment_number(name: str, kind: type) -> Any:
    text = _from_environment(name)
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{_PREFIX}{name}: expected {wanted}, got {text!r}") from None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _as_topology(topology: Any) -> Topology:
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str | os.PathLike):
        return Topology.load(topology)
    raise ValueError(
        "topology: expected a Topology, the name of a shipped one or the path of a "
        f"file, got {topology!r}"
    )


def _separate_links(num_gpus: int) -> Topology:
    """Returns a machine where each device has a link of its own and no other."""
    gpus = ", ".join(
        f'{{"id": "cpu{i}", "numa_node": "numa0"}}' for i in range(num_gpus)
    )
    links = ", ".join(
        f'{{"id": "memory{i}", "type": "pcie", "a": "numa0", "b": "cpu{i}", '
        f'"a_to_b_bytes_per_s": {_NOMINAL_BYTES_PER_S:.0f}, '
        f'"b_to_a_bytes_per_s": {_NOMINAL_BYTES_PER_S:.0f}, "latency_ns": 1000}}'
        for i in range(num_gpus)
    )
    return Topology.from_json(
        '{"format": "jax_turbobus/topology", "version": 1, "name": "cpu devices", '
        f'"numa_nodes": [{{"id": "numa0"}}], "gpus": [{gpus}], "links": [{links}]}}',
        "<cpu devices>",
    )


def _whole(name: str, value: Any, least: int, most: int) -> int:
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ValueError(
            f"{name}: expected a whole number from {least} to {most}, got {value!r}"
        )
    return int(value)


def _between(name: str, value: Any, least: float, most: float) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ValueError(
            f"{name}: expected a number from {least:g} to {most:g}, got {value!r}"
        )
    return float(value)


def _check_rates(topology: Topology, pooled: bool, rate_scale: float) -> None:
    plan = topology.lanes(relays=pooled)
    rates = [r.bandwidth_bytes_per_s for r in (*plan.paths, *plan.caps)]
    if not rates:
        return  # The engine says that there is no GPU.
    slowest, fastest = min(rates), max(rates)
    least, most = _SCALED_RATES
    if slowest * rate_scale >= least and fastest * rate_scale <= most:
        return
    # Three digits, rounded to the inside.
    smallest = max(least / slowest * 1.005, _RATE_SCALES[0])
    largest = min(most / fastest * 0.995, _RATE_SCALES[1])
    raise ValueError(
        f"rate_scale: expected a number from {smallest:.3g} to {largest:.3g} for "
        f"topology {topology.name!r}, whose rates of {slowest:.3g} to {fastest:.3g} "
        f"bytes/s it must leave between {least:g} and {most:g}, got {rate_scale!r}"
    )


def _writable_path(path: str | os.PathLike[str]) -> str:
    found = os.path.abspath(os.fsdecode(path))
    folder = os.path.dirname(found)
    is_file = "\0" not in found and not os.path.isdir(found)
    target = found if is_file and os.path.exists(found) else folder
    if not is_file or not os.access(target, os.W_OK):
        raise ValueError(
            f"trace: expected True, False, a number of events or the path of a file in"
            f" a folder that can be written to, got {os.fspath(path)!r}"
        )
    return found


def _resolve(
    topology: Any,
    emulate: bool | None,
    pooled: bool | None,
    mode: Mode | None,
    block_bytes: int | None,
    chunk_bytes: int | None,
    rate_scale: float | None,
    trace: bool | int | str | os.PathLike[str] | None,
) -> Config:
    topology = _first(topology, _from_environment("TOPOLOGY"))
    emulate = bool(_first(emulate, _environment_flag("EMULATE"), False))
    if topology is None and emulate:
        raise ValueError(
            "topology: expected one to emulate, got None; give topology=..., for "
            "example a name of jax_turbobus.topology.names()"
        )
    if topology is None:
        topology = _separate_links(jax.local_device_count(backend="cpu"))
    mode = _first(mode, _from_environment("MODE"), "free-running")
    if mode not in get_args(Mode):
        raise ValueError(f"mode: expected 'free-running' or 'lock-step', got {mode!r}")
    trace = _first(trace, _from_environment("TRACE"), False)
    if isinstance(trace, str) and trace.lower() in (*_TRUE, *_FALSE):
        trace = trace.lower() in _TRUE
    trace_path = None
    if isinstance(trace, str | os.PathLike):
        trace_path = _writable_path(trace)
        trace = True
    if isinstance(trace, bool):
        trace = _DEFAULT_TRACE_EVENTS if trace else 0
    topology = _as_topology(topology)
    pooled = bool(_first(pooled, _environment_flag("POOLED"), True))
    rate_scale = _between(
        "rate_scale",
        _first(rate_scale, _environment_number("RATE_SCALE", float), 1.0),
        *_RATE_SCALES,
    )
    _check_rates(topology, pooled, rate_scale)
    return Config(
        topology=topology,
        emulate=emulate,
        pooled=pooled,
        mode=mode,
        block_bytes=_whole(
            "block_bytes",
            _first(
                block_bytes,
                _environment_number("BLOCK_BYTES", int),
                _DEFAULT_BLOCK_BYTES,
            ),
            4096,
            _MOST_BYTES,
        ),
        chunk_bytes=_whole(
            "chunk_bytes",
            _first(chunk_bytes, _environment_number("CHUNK_BYTES", int), 0),
            0,
            _MOST_BYTES,
        ),
        rate_scale=rate_scale,
        trace_events=_whole("trace", trace, 0, _MOST_TRACE_EVENTS),
        trace_path=trace_path,
    )


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
      emulate: whether transfers take as long as on these links; needs a topology.
        Bytes are copied
        for real; where this machine copies more slowly than the links would,
        transfers take longer and `stats().num_late_copies` counts it.
      pooled: whether blocks may go over idle links of other GPUs.
      mode: ``"free-running"``: each lane goes on when it can; ``"lock-step"``: all
        lanes take one block and wait for each other.
      block_bytes: what a lane copies at once, in bytes; at least 4096.
      chunk_bytes: what a large transfer may have queued on relays at once, in
        bytes; at least `block_bytes`, or 0: eight blocks.
      rate_scale: what all rates are multiplied by, to make fast links slow enough
        for a small machine: 0.01 makes 55 GB/s 0.55 GB/s; from 1e-9 to 1e9, and
        such that every rate stays between 1 and 1e15 bytes per second.
      trace: whether `trace` records blocks: True, how many, or the path of a file
        that is written (over what is there) when the engine is taken out or the
        process ends.
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


def _make(*, enabled: bool = True, **arguments: Any) -> _InPlace:
    # What `configure` with these arguments puts in place.
    for name in ("emulate", "pooled", "enabled"):
        flag = enabled if name == "enabled" else arguments[name]
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"{name}: expected True or False, got {flag!r}")
    if not enabled or _environment_flag("DISABLE"):
        config = Config()
    else:
        config = _resolve(**arguments)
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
    if unknown := set(arguments) - {*_NOT_GIVEN, "enabled"}:
        raise TypeError(
            f"configured: expected arguments of configure ({', '.join(_NOT_GIVEN)}, "
            f"enabled), got {', '.join(sorted(unknown))}"
        )
    new = _make(**_NOT_GIVEN | arguments)
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
    is_set = any(_from_environment(name) for name in ("TOPOLOGY", "EMULATE", "TRACE"))
    new = _make(**_NOT_GIVEN) if is_set else _InPlace(is_decided=True)
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
