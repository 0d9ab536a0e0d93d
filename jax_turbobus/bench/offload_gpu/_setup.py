"""What the cases of the GPU offload benchmark share: arrays, checks, clocks."""

import contextlib
import dataclasses
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
from jax_turbobus.bench._report import Row

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
    "configured",
    "incoming",
    "is_same",
    "latencies",
    "meanwhile",
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
    devices: Sequence[Any]
    rounds: int
    shrink: int

    def host(self, size_bytes: int, device: int = 0, dtype: Any = np.float32) -> Any:
        """Returns random bytes in pinned host memory."""
        return jax.device_put(
            self.numbers(size_bytes, dtype), self.sharding(device, "pinned_host")
        )

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
        if size_bytes <= 4 * MIB:
            return 15 * self.rounds
        return self.rounds if size_bytes < 2 * GIB else max(self.rounds // 2, 3)


def incoming(setup: Setup, device: int = 0) -> tuple[Any, Any]:
    """Returns our H2D program and JAX's."""
    where = setup.sharding(device, "device")
    return (
        jax.jit(tb.to_device, out_shardings=where),
        jax.jit(lambda h: jax.device_put(h, DEVICE), out_shardings=where),
    )


class Outgoing:
    """D2H programs: ours writes into the buffer that the call before returned."""

    def __init__(self, setup: Setup, x: Any, device: int = 0) -> None:
        where = setup.sharding(device, "pinned_host")
        self._x = x
        self._ours = jax.jit(
            lambda v, out: tb.to_host(v, out=out), donate_argnums=1, out_shardings=where
        )
        self._peer = jax.jit(lambda v: jax.device_put(v, HOST), out_shardings=where)
        self._out = jax.device_put(np.zeros(x.shape, x.dtype), where)

    def start_ours(self) -> Any:
        self._out = self._ours(self._x, self._out)
        return self._out

    def ours(self) -> Any:
        return self.start_ours().block_until_ready()

    def start_peer(self) -> Any:
        return self._peer(self._x)

    def peer(self) -> Any:
        return self.start_peer().block_until_ready()


@jax.jit
def is_same(a: Any, b: Any) -> Any:
    return jnp.array_equal(jax.device_put(a, DEVICE), jax.device_put(b, DEVICE))


def check(ours: Any, expected: Any) -> None:
    if not is_same(ours, expected):
        raise ValueError("the bytes are wrong")


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
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Repeats `work` on a thread of its own while the body runs."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        time.sleep(0.05)
        yield
    finally:
        stop.set()
        thread.join()


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
