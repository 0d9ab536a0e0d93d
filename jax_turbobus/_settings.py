"""What `configure` may be asked for: settings, their environment and their checks.

`jax_turbobus.config` says which environment variables there are.
"""

import numbers
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from jax_turbobus import _environment
from jax_turbobus.topology import Topology

__all__ = ["NOT_GIVEN", "Config", "Mode", "is_in_environment", "resolve"]

Mode = Literal["free-running", "lock-step"]

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
NOT_GIVEN: dict[str, Any] = dict.fromkeys(
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


def _from_environment(name: str) -> str | None:
    value = os.environ.get(_environment.PREFIX + name)
    return value.strip() if value is not None and value.strip() else None


def _environment_number(name: str, kind: type) -> Any:
    text = _from_environment(name)
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(
            f"{_environment.PREFIX}{name}: expected {wanted}, got {text!r}"
        ) from None


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


def _with_engine(
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
    emulate = bool(_first(emulate, _environment.flag("EMULATE"), False))
    if topology is None and emulate:
        raise ValueError(
            "topology: expected one to emulate, got None; give topology=... or set "
            "JAX_TURBOBUS_TOPOLOGY, for example to a name of "
            "jax_turbobus.topology.names()"
        )
    if topology is None:
        topology = _separate_links(jax.local_device_count(backend="cpu"))
    mode = _first(mode, _from_environment("MODE"), "free-running")
    if mode not in get_args(Mode):
        raise ValueError(f"mode: expected 'free-running' or 'lock-step', got {mode!r}")
    trace = _first(trace, _from_environment("TRACE"), False)
    if isinstance(trace, str):
        trace = _environment.as_trace("trace", trace)
    trace_path = None
    if isinstance(trace, str | os.PathLike):
        trace_path = _writable_path(trace)
        trace = True
    if isinstance(trace, bool):
        trace = _DEFAULT_TRACE_EVENTS if trace else 0
    if not isinstance(trace, numbers.Integral):
        raise ValueError(
            "trace: expected True, False, a number of events or the path of a file, "
            f"got {trace!r}"
        )
    topology = _as_topology(topology)
    pooled = bool(_first(pooled, _environment.flag("POOLED"), True))
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


def is_in_environment() -> bool:
    """Returns whether the environment asks for an engine."""
    return any(_from_environment(name) for name in ("TOPOLOGY", "EMULATE", "TRACE"))


def resolve(*, enabled: bool = True, **arguments: Any) -> Config:
    """Returns what `configure` with these arguments puts in place.

    Args:
      enabled: False: no engine.
      **arguments: all of `NOT_GIVEN`; None: from the environment, or the default.

    Raises:
      ValueError: as for `configure`.
    """
    for name in ("emulate", "pooled", "enabled"):
        flag = enabled if name == "enabled" else arguments[name]
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"{name}: expected True or False, got {flag!r}")
    _environment.flag("TOP")  # The core reads it: only whether it is one.
    if not enabled or _environment.flag("DISABLE"):
        return Config()
    try:
        return _with_engine(**arguments)
    except ValueError as error:
        name = str(error).replace(":", " ").split()[0]
        is_given = arguments.get(name, ()) is not None
        if is_given or (text := _from_environment(name.upper())) is None:
            raise
        variable = f"{_environment.PREFIX}{name.upper()}={text!r}"
        raise ValueError(f"{error} (the environment says {variable})") from None
