"""What the cases of the GPU offload benchmark share: arrays, checks, clocks."""

import collections
import contextlib
import dataclasses
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import jax_turbobus as tb
from jax_turbobus import gpu
from jax_turbobus.bench._report import Row, Timing

__all__ = [
    "DEVICE",
    "GIB",
    "HOST",
    "KIB",
    "MIB",
    "PEER",
    "Outgoing",
    "Setup",
    "check",
    "check_close",
    "configured",
    "in_a_row",
    "incoming",
    "is_same",
    "latencies",
    "meanwhile",
    "needs_engine",
    "needs_gpus",
    "noise",
    "percentile",
    "rate",
    "size_name",
    "speedup",
    "wait_for",
]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
PEER = "jax.device_put"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every case gets.

    Attributes:
      devices: JAX's devices; the first one transfers, the others lend.
      rounds: measured rounds of a large transfer; smaller ones get more.
      shrink: divides every size, to try the programs out.
      least_bytes: the smallest transfer of the cases that take sizes in turn.
      most_bytes: the largest one.
    """

    devices: Sequence[Any]
    rounds: int
    shrink: int
    least_bytes: int = 0
    most_bytes: int = 1 << 60
    _kept: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def host(self, size_bytes: int, device: int = 0, dtype: Any = np.float32) -> Any:
        """Returns random bytes in pinned host memory. Not to be donated.

        Up to 1 GiB, the next caller gets the same array: page-locking takes long.
        """
        key = size_bytes, device, np.dtype(dtype)
        if key in self._kept:
            return self._kept[key]
        array = jax.device_put(
            self.numbers(size_bytes, dtype), self.sharding(device, "pinned_host")
        )
        if size_bytes <= GIB:
            self._kept[key] = array
        return array

    def device(self, size_bytes: int, device: int = 0, dtype: Any = np.float32) -> Any:
        """Returns random bytes in device memory."""
        return jax.device_put(
            self.numbers(size_bytes, dtype), self.sharding(device, "device")
        )

    def numbers(self, size_bytes: int, dtype: Any = np.float32) -> Any:
        """Returns numbers that repeat nowhere."""
        size = max(size_bytes // self.shrink, 4096) // np.dtype(dtype).itemsize
        chunk = np.random.default_rng(size).random(min(size, 1 << 22), np.float32)
        out = np.empty(size, dtype)
        for i in range(0, size, chunk.size):
            part = out[i : i + chunk.size]
            np.add(chunk[: part.size], i // chunk.size, out=part, casting="unsafe")
        return out

    def sharding(self, device: int, kind: str) -> Any:
        return SingleDeviceSharding(self.devices[device], memory_kind=kind)

    def rounds_for(self, size_bytes: int) -> int:
        """Returns how often to measure transfers of so many bytes in all."""
        if self.shrink > 1:
            return self.rounds
        for most, times in ((8 * MIB, 100), (64 * MIB, 20), (512 * MIB, 4)):
            if size_bytes <= most:
                return times * self.rounds
        return self.rounds if size_bytes < 2 * GIB else max(self.rounds // 2, 3)

    def count(self, samples: int) -> int:
        """Returns how many samples to take: fewer where only programs are tried."""
        return samples if self.shrink == 1 else 3

    def pause(self, seconds: float) -> None:
        """Sleeps, but where only programs are tried."""
        time.sleep(seconds if self.shrink == 1 else 0.0)


def incoming(setup: Setup, device: int = 0) -> tuple[Any, Any]:
    """Returns our H2D program and JAX's."""
    where = setup.sharding(device, "device")
    return (
        jax.jit(tb.to_device, out_shardings=where),
        jax.jit(lambda h: jax.device_put(h, DEVICE), out_shardings=where),
    )


class Outgoing:
    """D2H programs: ours writes into a buffer that an earlier call returned."""

    def __init__(self, setup: Setup, x: Any, device: int = 0, count: int = 1) -> None:
        """Makes the programs and the host memory.

        Args:
          setup: whose devices.
          x: what goes to the host.
          device: where it is.
          count: into how many buffers ours writes in turn. A call that is queued
            behind others must not get one that somebody still waits for.
        """
        where = setup.sharding(device, "pinned_host")
        self._x = x
        self._ours = jax.jit(
            lambda v, out: tb.to_host(v, out=out), donate_argnums=1, out_shardings=where
        )
        self._without_out = jax.jit(tb.to_host, out_shardings=where)
        self._peer = jax.jit(lambda v: jax.device_put(v, HOST), out_shardings=where)
        self._outs = collections.deque(
            jax.device_put(np.zeros(x.shape, x.dtype), where) for _ in range(count)
        )

    def start_ours(self) -> Any:
        self._outs.append(self._ours(self._x, self._outs.popleft()))
        return self._outs[-1]

    def start_without_out(self) -> Any:
        return self._without_out(self._x)

    def start_peer(self) -> Any:
        return self._peer(self._x)


@jax.jit
def is_same(a: Any, b: Any) -> Any:
    return jnp.array_equal(jax.device_put(a, DEVICE), jax.device_put(b, DEVICE))


def check(ours: Any, expected: Any) -> None:
    if not is_same(ours, expected):
        raise ValueError("the bytes are wrong")


@jax.jit
def _largest_error(a: Any, b: Any) -> Any:
    a, b = (jax.device_put(x, DEVICE).astype(jnp.float32) for x in (a, b))
    return jnp.abs(a - b).max() / jnp.abs(b).max()


def check_close(ours: Any, expected: Any, most: float) -> None:
    """Refuses values that are further off than so much of the largest one.

    Args:
      ours: an array.
      expected: one of its shape that is not all zeros.
      most: the largest difference over the largest value expected.

    Raises:
      ValueError: they are, or some are no numbers.
    """
    error = float(_largest_error(ours, expected))
    if not error <= most:
        raise ValueError(
            f"the values are wrong: the largest error is {error:.3g} of the largest"
            f" value, expected at most {most:g}"
        )


def needs_gpus(setup: Setup, case: str, count: int = 2) -> Iterator[Row]:
    """Yields a row that says why a case was not measured, where that is so."""
    if len(setup.devices) < count:
        reason = f"not measured: needs {count} GPUs, JAX sees {len(setup.devices)}"
        yield Row.make(case, reason, 0.0)


def needs_engine(case: str) -> Iterator[Row]:
    """Yields a row that says that a case was not measured for want of an engine."""
    reason = "not measured: this process has no engine for its devices"
    yield Row.make(case, reason, 0.0)


def in_a_row(start: Callable[[], Any], count: int) -> Callable[[], Any]:
    """Returns a function that starts so many calls and waits for the last one.

    All results stay alive until then, as in a program that uses them. On one stream the
    last call ends last.
    """

    def run() -> Any:
        results = [start() for _ in range(count)]
        return jax.block_until_ready(results[-1])

    return run


def noise(a: Timing, b: Timing) -> float:
    """Returns by how much two measurements of one program differ, as a part of it.

    That of their medians, and two standard errors of a median.
    """
    quarters = statistics.quantiles(a.seconds, n=4)
    deviation = (quarters[2] - quarters[0]) / 1.35
    error = 1.25 * deviation / math.sqrt(len(a.seconds))
    return abs(b.median / a.median - 1) + 2 * error / a.median


def wait_for(program: Callable[..., Any], x: Any) -> Any:
    return jax.block_until_ready(program(x))


def size_name(size_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def speedup(
    case: str, ours: float, peer: float, required: str | None, peer_name: str = PEER
) -> Row:
    """Returns a row of rates: its ratio is how many times faster we are."""
    return Row.make(
        case,
        "per second",
        1 / ours,
        peer=1 / peer,
        peer_name=peer_name,
        required=required,
    )


def rate(case: str, size: int, times: Any, required: str | None) -> Row:
    return Row.make(
        case,
        "GB/s",
        size / times["ours"].median / 1e9,
        peer=size / times["peer"].median / 1e9,
        peer_name=PEER,
        required=required,
    )


@contextlib.contextmanager
def meanwhile(work: Callable[[], Any], queued: int = 1) -> Iterator[None]:
    """Repeats `work` on a thread of its own while the body runs.

    Args:
      work: starts something and returns its result.
      queued: so many results are being waited for at any time; the oldest is waited
        for before the next one is started, so that a link never falls idle in between.

    Yields:
      Nothing.

    Raises:
      Exception: what `work` raised; what was measured beside it is worth nothing.
    """
    stop = threading.Event()
    failures: list[Exception] = []

    def loop() -> None:
        started: collections.deque[Any] = collections.deque()
        try:
            while not stop.is_set():
                started.append(work())
                if len(started) >= queued:
                    jax.block_until_ready(started.popleft())
            jax.block_until_ready([*started])
        except Exception as error:  # noqa: BLE001, raised again where it is waited for
            failures.append(error)

    thread = threading.Thread(target=loop)
    # A thread that starts a call must not keep the other one from its clock for long.
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        time.sleep(0.05)
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    if failures:
        raise failures[0]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def latencies(work: Callable[[], Any], count: int, pause_s: float) -> list[float]:
    times = []
    for _ in range(count):
        time.sleep(pause_s)
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def configured(**settings: Any) -> Any:
    return gpu.configured(**settings) if gpu.engine() else contextlib.nullcontext()
