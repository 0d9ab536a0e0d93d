"""Offload on GPUs against JAX's own transfers: `python -m jax_turbobus bench offload`.

What is timed: a jitted program from its call until its result is ready, bytes
checked once before. Medians of rounds in which both sides take turns, in one
process, with every other GPU idle unless a case says otherwise.
"""

import argparse
import contextlib
import dataclasses
import functools
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
from jax_turbobus import _ffi, gpu
from jax_turbobus.bench._report import Row, alternate

__all__ = ["CASES", "add_arguments", "run"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_PEER = "jax.device_put"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's arguments."""
    parser.add_argument("--only", nargs="*", choices=CASES, default=[*CASES])
    parser.add_argument("--skip", nargs="*", choices=CASES, default=[])
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds")
    parser.add_argument(
        "--platform", default="cuda", help="cpu: only to try the programs themselves"
    )
    parser.add_argument(
        "--shrink", type=int, default=1, help="divides every size, for trying out"
    )


@dataclasses.dataclass(frozen=True)
class _Setup:
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
        if size_bytes <= 4 * _MIB:
            return 15 * self.rounds
        return self.rounds if size_bytes < 2 * _GIB else max(self.rounds // 2, 3)


def _in(setup: _Setup, device: int = 0) -> tuple[Any, Any]:
    """Returns our H2D program and JAX's."""
    where = setup.sharding(device, "device")
    return (
        jax.jit(tb.to_device, out_shardings=where),
        jax.jit(lambda h: jax.device_put(h, _DEVICE), out_shardings=where),
    )


class _Out:
    """D2H programs: ours writes into the buffer that the call before returned."""

    def __init__(self, setup: _Setup, x: Any, device: int = 0) -> None:
        where = setup.sharding(device, "pinned_host")
        self._x = x
        self._ours = jax.jit(
            lambda v, out: tb.to_host(v, out=out), donate_argnums=1, out_shardings=where
        )
        self._peer = jax.jit(lambda v: jax.device_put(v, _HOST), out_shardings=where)
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
def _is_same(a: Any, b: Any) -> Any:
    return jnp.array_equal(jax.device_put(a, _DEVICE), jax.device_put(b, _DEVICE))


def _check(ours: Any, expected: Any) -> None:
    if not _is_same(ours, expected):
        raise ValueError("the bytes are wrong")


def _wait_for(program: Callable[..., Any], x: Any) -> Any:
    return jax.block_until_ready(program(x))


def _name(size_bytes: int) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def _speedup(
    case: str, ours: float, peer: float, required: str | None, peer_name: str = _PEER
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


_SIZES = (
    (4 * _KIB, 1.0),
    (64 * _KIB, 1.0),
    (1 * _MIB, 1.0),
    (4 * _MIB, 1.0),
    (8 * _MIB, 1.0),
    (16 * _MIB, 1.3),
    (32 * _MIB, 1.5),
    (64 * _MIB, 1.7),
    (256 * _MIB, 1.85),
    (1 * _GIB, 1.95),
    (4 * _GIB, 1.95),
)


def _one_way(setup: _Setup) -> Iterator[Row]:
    """H2D and D2H of one GPU, the others idle.

    From 32 MiB to 1 GiB, four calls are made in a row and waited for once, as a program
    that does not look at every result would: a host thread that sleeps through a
    long transfer wakes up to a millisecond late, whoever's transfer it is. The time
    of a single call is there as well.
    """
    for size, least in _SIZES:
        h = setup.host(size)
        ours, peer = _in(setup)
        _check(ours(h), h)
        yield from _rates(setup, f"h2d {_name(size)}", size, least, ours, peer, h)
        x = ours(h)
        del h
        out = _Out(setup, x)
        _check(out.ours(), x)
        yield from _rates(
            setup,
            f"d2h {_name(size)}",
            size,
            least,
            lambda _, out=out: out.start_ours(),  # type: ignore[misc]
            lambda _, out=out: out.start_peer(),  # type: ignore[misc]
            x,
        )


def _rates(
    setup: _Setup,
    case: str,
    size: int,
    least: float,
    ours: Callable[[Any], Any],
    peer: Callable[[Any], Any],
    x: Any,
) -> Iterator[Row]:
    def calls(program: Callable[[Any], Any], count: int) -> Callable[[], Any]:
        def run() -> Any:
            results = [program(x) for _ in range(count)]
            return results[-1].block_until_ready()

        return run

    in_a_row = 4 if 32 * _MIB <= size <= _GIB else 1
    for count in sorted({in_a_row, 1}, reverse=True):
        times = alternate(
            {"ours": calls(ours, count), "peer": calls(peer, count)},
            rounds=setup.rounds_for(size),
        )
        yield _rate(
            case if count == in_a_row else f"{case}, a single call",
            count * size,
            times,
            f">= {least}" if count == in_a_row else None,
        )


def _rate(case: str, size: int, times: Any, required: str | None) -> Row:
    return Row.make(
        case,
        "GB/s",
        size / times["ours"].median / 1e9,
        peer=size / times["peer"].median / 1e9,
        peer_name=_PEER,
        required=required,
    )


def _both_ways(setup: _Setup) -> Iterator[Row]:
    """H2D and D2H of one GPU at once."""
    h, x = setup.host(_GIB), setup.device(_GIB)
    outs = [
        jax.device_put(np.zeros(x.shape, x.dtype), setup.sharding(0, "pinned_host"))
    ]
    token = jnp.zeros(8)

    @functools.partial(
        jax.jit,
        donate_argnums=2,
        out_shardings=(setup.sharding(0, "pinned_host"), setup.sharding(0, "device")),
    )
    def ours(h: Any, x: Any, out: Any) -> Any:
        _, came, went = tb.overlap(lambda t: t + 1, token, fetch=h, offload=x, out=out)
        # What `out` becomes comes first: JAX gives a donated buffer to the first
        # result of its shape, whatever memory that is in.
        return went, came

    peer = jax.jit(
        lambda h, x: (jax.device_put(h, _DEVICE), jax.device_put(x, _HOST)),
        out_shardings=(setup.sharding(0, "device"), setup.sharding(0, "pinned_host")),
    )

    def run_ours() -> Any:
        outs[0], came = jax.block_until_ready(ours(h, x, outs[0]))
        return came

    _check(run_ours(), h)
    _check(outs[0], x)
    times = alternate(
        {"ours": run_ours, "peer": lambda: jax.block_until_ready(peer(h, x))},
        rounds=setup.rounds,
    )
    yield _rate("h2d + d2h of one GPU at once, 1 GiB each", 2 * _GIB, times, ">= 1.8")


def _two_gpus(setup: _Setup) -> Iterator[Row]:
    """Both GPUs at once: nothing to gain, and nothing may be lost."""
    if len(setup.devices) < 2:
        return
    hosts = [setup.host(_GIB, i) for i in range(2)]
    programs = [_in(setup, i) for i in range(2)]
    out = _Out(setup, setup.device(_GIB, 1), 1)

    def same(which: int) -> Any:
        return jax.block_until_ready([programs[i][which](hosts[i]) for i in range(2)])

    times = alternate(
        {"ours": lambda: same(0), "peer": lambda: same(1)}, rounds=setup.rounds
    )
    yield _rate("both GPUs h2d at once, 1 GiB each", 2 * _GIB, times, ">= 0.98")
    times = alternate(
        {
            "ours": lambda: jax.block_until_ready(
                [programs[0][0](hosts[0]), out.start_ours()]
            ),
            "peer": lambda: jax.block_until_ready(
                [programs[0][1](hosts[0]), out.start_peer()]
            ),
        },
        rounds=setup.rounds,
    )
    yield _rate("GPU 0 h2d, GPU 1 d2h at once, 1 GiB each", 2 * _GIB, times, ">= 0.98")


def _fetch(setup: _Setup) -> Iterator[Row]:
    """Rows of a host stack in a scan."""
    layers, size = 8, 256 * _MIB
    flat = setup.numbers(layers * size)
    stack = jax.device_put(flat.reshape(layers, -1), setup.sharding(0, "pinned_host"))

    def total(fetch: Callable[..., Any]) -> Any:
        def body(carry: Any, i: Any) -> Any:
            return carry + fetch(stack_of[0], i), None

        stack_of: list[Any] = [None]

        def program(stack: Any) -> Any:
            stack_of[0] = stack
            zeros = jnp.zeros(stack.shape[1:], stack.dtype)
            return jax.lax.scan(body, zeros, jnp.arange(layers, dtype=jnp.int32))[0]

        return jax.jit(program, out_shardings=setup.sharding(0, "device"))

    def slice_in_xla(stack: Any, i: Any) -> Any:
        row = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
        return jax.device_put(row, _DEVICE)

    ours, peer = total(tb.fetch), total(slice_in_xla)
    _check(ours(stack), peer(stack))
    times = alternate(
        {
            "ours": lambda: ours(stack).block_until_ready(),
            "peer": lambda: peer(stack).block_until_ready(),
        },
        rounds=setup.rounds,
    )
    yield _rate("fetch of 8 x 256 MiB in a scan", layers * size, times, ">= 1.7")


def _adam(setup: _Setup) -> Iterator[Row]:
    """4 GiB of Adam state in and out, leaf by leaf."""
    leaves, size = 16, 128 * _MIB
    state = [
        [setup.host(size) for _ in range(leaves)] for _ in range(2)
    ]  # first and second moments
    grads = [setup.device(size) for _ in range(leaves)]

    def update(m: Any, v: Any, g: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return m, v, g * 1e-3 + m / (jnp.sqrt(v) + 1e-8)

    def ours(state: Any, grads: Any) -> Any:
        (ms, vs), steps = state, []
        out_m, out_v = [], []
        here = [tb.to_device(ms[0]), tb.to_device(vs[0])]
        leaving: Any = ()
        room: Any = ()
        for i in range(leaves):
            following = [ms[i + 1], vs[i + 1]] if i + 1 < leaves else []
            (m, v, step), came, gone = tb.overlap(
                update, *here, grads[i], fetch=following, offload=leaving, out=room
            )
            if i:
                out_m.append(gone[0])
                out_v.append(gone[1])
            steps.append(step)
            here, leaving, room = came, (m, v), (ms[i], vs[i])
        out_m.append(tb.to_host(leaving[0], out=room[0]))
        out_v.append(tb.to_host(leaving[1], out=room[1]))
        return [out_m, out_v], steps

    def peer(state: Any, grads: Any) -> Any:
        (ms, vs), steps = state, []
        out: Any = ([], [])
        for m, v, g in zip(ms, vs, grads, strict=True):
            m, v, step = update(
                jax.device_put(m, _DEVICE), jax.device_put(v, _DEVICE), g
            )
            out[0].append(jax.device_put(m, _HOST))
            out[1].append(jax.device_put(v, _HOST))
            steps.append(step)
        return [out[0], out[1]], steps

    where = (setup.sharding(0, "pinned_host"), setup.sharding(0, "device"))
    programs = {
        name: jax.jit(f, donate_argnums=0, out_shardings=where)
        for name, f in (("ours", ours), ("peer", peer))
    }
    states = {
        name: jax.tree.map(lambda x: jax.device_put(np.asarray(x), where[0]), state)
        for name in programs
    }
    del state

    def step(name: str) -> None:
        states[name], _ = jax.block_until_ready(programs[name](states[name], grads))

    for name in programs:
        step(name)
    for a, b in zip(*map(jax.tree.leaves, states.values()), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    times = alternate(
        {name: functools.partial(step, name) for name in programs},
        rounds=max(setup.rounds // 2, 3),
    )
    yield _rate("Adam state, 4 GiB in and out", 4 * leaves * size, times, ">= 1.7")


def _beside_matmuls(setup: _Setup) -> Iterator[Row]:
    """A 1 GiB fetch beside matmuls."""
    n = 16384 if setup.shrink == 1 else 256
    a = jax.device_put(
        (np.random.default_rng(1).random((n, n), np.float32) * 0.01).astype(
            jnp.bfloat16
        ),
        setup.sharding(0, "device"),
    )
    h = setup.host(_GIB)
    square = jax.jit(lambda a: a @ a)
    alone_in, _ = _in(setup)
    ours = jax.jit(lambda a, h: tb.overlap(lambda a: a @ a, a, fetch=h)[:2])
    peer = jax.jit(lambda a, h: (a @ a, jax.device_put(h, _DEVICE)))
    _check(ours(a, h)[1], h)
    times = alternate(
        {
            "matmul": lambda: square(a).block_until_ready(),
            "fetch": lambda: alone_in(h).block_until_ready(),
            "ours": lambda: jax.block_until_ready(ours(a, h)),
            "peer": lambda: jax.block_until_ready(peer(a, h)),
        },
        rounds=setup.rounds,
    )
    longer = max(times["matmul"].median, times["fetch"].median)
    yield Row.make(
        "1 GiB fetch in overlap beside a matmul",
        "ms",
        times["ours"].median * 1e3,
        peer=longer * 1e3,
        peer_name="the longer of the two alone",
        required="<= 1.05",
    )
    yield _speedup(
        "1 GiB fetch in overlap beside a matmul, program",
        times["ours"].median,
        times["peer"].median,
        ">= 1.7",
    )


def _layers(setup: _Setup) -> Iterator[Row]:
    """scan_layers with compute of half the plain fetch time."""
    layers = 16 if setup.shrink == 1 else 4
    d, batch = (16384, 6144) if setup.shrink == 1 else (128, 64)
    row = (np.random.default_rng(2).random((d, d), np.float32) * 2 - 1) / np.sqrt(d)
    w = np.broadcast_to(row.astype(jnp.bfloat16), (layers, d, d))
    stack = jax.device_put(w, setup.sharding(0, "pinned_host"))
    x = jax.device_put(
        np.ones((batch, d), np.float32).astype(jnp.bfloat16),
        setup.sharding(0, "device"),
    )
    size = layers * d * d * 2

    def f(layer: Any, x: Any) -> Any:
        return x @ layer

    def plain(stack: Any, x: Any) -> Any:
        def body(x: Any, i: Any) -> Any:
            row = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
            return f(jax.device_put(row, _DEVICE), x), None

        return jax.lax.scan(body, x, jnp.arange(layers, dtype=jnp.int32))[0]

    ours = jax.jit(lambda s, x: tb.scan_layers(f, s, x))
    peer = jax.jit(plain)
    np.testing.assert_allclose(
        np.asarray(ours(stack, x), np.float32),
        np.asarray(peer(stack, x), np.float32),
        rtol=2e-2,
        atol=1e-3,
    )
    times = alternate(
        {
            "ours": lambda: ours(stack, x).block_until_ready(),
            "peer": lambda: peer(stack, x).block_until_ready(),
        },
        rounds=max(setup.rounds // 2, 3),
    )
    yield _rate("scan_layers forward, 16 x 512 MiB", size, times, ">= 1.8")

    def train(run: Callable[..., Any]) -> Any:
        def loss(stack: Any, x: Any) -> Any:
            return jnp.sum(run(stack, x).astype(jnp.float32)) * 1e-3

        return jax.jit(
            jax.grad(loss),
            out_shardings=setup.sharding(0, "pinned_host"),
        )

    def plain_xs(stack: Any, x: Any) -> Any:
        def body(x: Any, layer: Any) -> Any:
            return f(jax.device_put(layer, _DEVICE), x), None

        return jax.lax.scan(jax.checkpoint(body), x, stack)[0]

    ours, peer = train(lambda s, x: tb.scan_layers(f, s, x)), train(plain_xs)
    np.testing.assert_allclose(
        np.asarray(ours(stack, x)[0], np.float32),
        np.asarray(peer(stack, x)[0], np.float32),
        rtol=5e-2,
        atol=1e-2,
    )
    times = alternate(
        {
            "ours": lambda: ours(stack, x).block_until_ready(),
            "peer": lambda: peer(stack, x).block_until_ready(),
        },
        rounds=3,
    )
    yield _rate("scan_layers training step, 16 x 512 MiB", 3 * size, times, ">= 1.6")


@contextlib.contextmanager
def _meanwhile(work: Callable[[], Any]) -> Iterator[None]:
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


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def _latencies(work: Callable[[], Any], count: int, pause_s: float) -> list[float]:
    times = []
    for _ in range(count):
        time.sleep(pause_s)
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def _donor(setup: _Setup) -> Iterator[Row]:
    """What lending its link costs the lender's own programs."""
    if len(setup.devices) < 2:
        return
    h = setup.host(_GIB)
    lend_in, _ = _in(setup)

    def lend() -> Any:
        return lend_in(h).block_until_ready()

    n = 8192 if setup.shrink == 1 else 128
    a = jax.device_put(
        np.full((n, n), 1e-2, np.float32).astype(jnp.bfloat16),
        setup.sharding(1, "device"),
    )
    big = setup.device(2 * _GIB, 1)

    def matmuls(a: Any) -> Any:
        for _ in range(20):
            a = (a @ a) * jnp.bfloat16(0.01)
        return a

    def adds(x: Any) -> Any:
        for i in range(10):
            x = jax.lax.optimization_barrier(x + i)
        return x

    programs = {
        "matmul loop": (jax.jit(matmuls), a, "<= 1.01"),
        "memory-bound loop": (jax.jit(adds), big, None),
    }
    for name, (program, x, required) in programs.items():

        def once(program: Any = program, x: Any = x) -> Any:
            return program(x).block_until_ready()

        once()
        alone: list[float] = []
        lending: list[float] = []
        for _ in range(4):
            alone += _latencies(once, 8, 0.0)
            with _meanwhile(lend):
                lending += _latencies(once, 8, 0.0)
        yield Row.make(
            f"donor: {name} while it lends",
            "ms",
            statistics.median(lending) * 1e3,
            peer=statistics.median(alone) * 1e3,
            peer_name="alone",
            required=required,
        )

    settings = engine.library.settings() if (engine := gpu.engine()) else {}
    block = settings.get("block_bytes", 16 * _MIB)
    block_ms = block / 54e9 * 1e3
    for size in (1 * _MIB, 16 * _MIB, 256 * _MIB):
        own = setup.host(size, 1)
        for name, program in zip(("through us", _PEER), _in(setup, 1), strict=True):

            def move(program: Any = program, own: Any = own) -> Any:
                return program(own).block_until_ready()

            move()
            count = 60 if size < 100 * _MIB else 20
            # Alone on its own link: the other one is taken while it lends.
            with _configured(split="direct"):
                alone = _latencies(move, count, 1e-4)
            with _meanwhile(lend):
                lending = _latencies(move, count, 1e-4)
            case = f"donor's own {_name(size)} {name} while it lends"
            if size > 100 * _MIB:
                yield Row.make(
                    case,
                    "p50, ms",
                    statistics.median(lending) * 1e3,
                    peer=statistics.median(alone) * 1e3,
                    peer_name="alone",
                    required="<= 1.06",
                )
            else:
                bound = _percentile(alone, 0.99) * 1e3 + block_ms
                yield Row.make(
                    case,
                    "p99, ms",
                    _percentile(lending, 0.99) * 1e3,
                    peer=bound,
                    peer_name=f"alone and a block of {_name(block)}",
                    required="<= 1.0",
                )


def _small_behind_large(setup: _Setup) -> Iterator[Row]:
    """Small transfers of a program while its 4 GiB are on their way.

    The device's own times: from the moment when the small one may begin to its end.
    """
    engine = gpu.engine()
    if engine is None:
        return
    size, count = 4 * _MIB, 12
    h, smalls = setup.host(4 * _GIB), [setup.host(size) for _ in range(count)]

    def chain(smalls: Any) -> Any:
        total = jnp.zeros_like(smalls[0], device=setup.sharding(0, "device"))
        for small in smalls:
            small, total = jax.lax.optimization_barrier((small, total))
            total = total + tb.to_device(small)
        return total

    beside = jax.jit(lambda h, smalls: tb.overlap(chain, smalls, fetch=h)[:2])
    alone = jax.jit(chain)
    whole, _ = _in(setup)

    def spans_ms(run: Callable[[], Any]) -> list[float]:
        jax.block_until_ready(run())
        seen = max(one["id"] for one in engine.raw()["recent_transfers"])
        for _ in range(3):
            jax.block_until_ready(run())
        return [
            (one["ended_ns"] - one["started_ns"]) / 1e6
            for one in engine.raw()["recent_transfers"]
            if one["id"] > seen and one["size_bytes"] == smalls[0].nbytes
        ]

    large: dict[str, float] = {}
    base = 0.0
    for name, has_yields in (("with yields", True), ("without yields", False)):
        # So that the small ones are transfers of the engine's, whose times it has.
        with _configured(has_yields=has_yields, min_pooled_bytes=smalls[0].nbytes):
            base = base or statistics.median(spans_ms(lambda: alone(smalls)))
            behind = spans_ms(lambda: beside(h, smalls))
            jax.block_until_ready(whole(h))
            large[name] = statistics.median(
                _latencies(lambda: jax.block_until_ready(whole(h)), 5, 0.0)
            )
        yield Row.make(
            f"4 MiB behind 4 GiB, {name}",
            "p50, ms more than alone",
            statistics.median(behind) - base,
            required="<= 0.5" if has_yields else None,
        )
    yield Row.make(
        "what yields cost the 4 GiB",
        "ms",
        large["with yields"] * 1e3,
        peer=large["without yields"] * 1e3,
        peer_name="without yields",
        required="<= 1.04",
    )


def _host_time(setup: _Setup) -> Iterator[Row]:
    """What handlers cost the host, and an idle engine."""
    engine = gpu.engine()
    if engine is None:
        return
    for size in (16 * _MIB, 256 * _MIB, _GIB):
        h = setup.host(size)
        ours, _ = _in(setup)
        ours(h).block_until_ready()
        before = _relayed_blocks(engine)
        for _ in range(20):
            ours(h).block_until_ready()
        raw = engine.raw()
        blocks = (_relayed_blocks(engine) - before) / 20
        yield Row.make(
            f"host time in the handler, {_name(size)}, {blocks:.0f} relayed blocks",
            "p50, us",
            statistics.median(raw["handler_ns"][-20:]) / 1e3,
            required=f"<= {60 + 10 * blocks:.0f}",
        )
    cpu = time.process_time()
    time.sleep(1.0)
    yield Row.make(
        "CPU use when idle", "cores", time.process_time() - cpu, required="<= 0.01"
    )


def _relayed_blocks(engine: gpu.Engine) -> int:
    return sum(p["num_blocks"] for p in engine.raw()["paths"] if p["relay"] is not None)


def _busy_half(setup: _Setup) -> Iterator[Row]:
    """A relay whose link is busy half the time with XLA's own copies."""
    if len(setup.devices) < 2 or gpu.engine() is None:
        return
    own, (_, copy) = setup.host(256 * _MIB, 1), _in(setup, 1)
    copy(own).block_until_ready()

    def half_busy() -> None:
        start = time.perf_counter()
        copy(own).block_until_ready()
        time.sleep(time.perf_counter() - start)

    h = setup.host(_GIB)
    ours, _ = _in(setup)
    times: dict[str, list[float]] = {}
    policies = {
        "finish-time": {},
        "even": {"split": "even"},
        "direct": {"split": "direct"},
    }
    with _meanwhile(half_busy):
        for _ in range(4):
            for name, settings in policies.items():
                with _configured(**settings):
                    times.setdefault(name, []).extend(
                        _latencies(lambda: ours(h).block_until_ready(), 20, 0.0)
                    )
    mean = {name: statistics.fmean(values) for name, values in times.items()}
    yield _speedup(
        "1 GiB, relay busy half the time, mean",
        mean["finish-time"],
        mean["direct"],
        ">= 1.3",
        "direct",
    )
    yield _speedup(
        "1 GiB, relay busy half the time, slowest tenth",
        _percentile(times["finish-time"], 0.9),
        _percentile(times["direct"], 0.9),
        ">= 0.98",
        "direct",
    )
    yield _speedup(
        "1 GiB, relay busy half the time, dynamic against static halves",
        mean["finish-time"],
        mean["even"],
        None,
        "static halves",
    )


def _sweep(setup: _Setup) -> Iterator[Row]:
    """Block sizes, and both ways to drive lanes."""
    engine = gpu.engine()
    if engine is None:
        return
    h = setup.host(_GIB)
    ours, _ = _in(setup)
    default = engine.library.settings()["block_bytes"]
    variants: dict[str, dict[str, Any]] = {
        f"blocks of {_name(n * _MIB)}": {"block_bytes": n * _MIB}
        for n in (1, 2, 4, 8, 16)
        if n * _MIB <= default
    }
    variants["lock-step slots"] = {"is_lock_step": True}
    variants["free-running lanes"] = {}
    variants["direct lane only"] = {"split": "direct"}

    def timed(settings: dict[str, Any]) -> float:
        with _configured(**settings):
            return statistics.median(
                _latencies(lambda: ours(h).block_until_ready(), 5, 0.0)
            )

    timed({})
    for name, settings in variants.items():
        yield Row.make(f"h2d 1 GiB, {name}", "GB/s", _GIB / timed(settings) / 1e9)
    rates = engine.library.measure
    paths = engine.raw()["paths"]
    links = [
        next(
            i
            for i, path in enumerate(paths)
            if (path["gpu"], path["relay"], path["direction"]) == (g, None, "h2d")
        )
        for g in range(len(setup.devices))
    ]
    total = sum(rates(links, 256 * _MIB, default))
    yield Row.make(
        "h2d 1 GiB against the sum of links",
        "GB/s",
        _GIB / timed({}) / 1e9,
        peer=total / 1e9,
        peer_name="all links at once",
        required=">= 0.97",
    )
    four_ways = [i for i, path in enumerate(paths) if path["relay"] is None]
    yield Row.make(
        "host memory, both directions of all links",
        "GB/s",
        sum(rates(four_ways, 256 * _MIB, default)) / 1e9,
    )


def _configured(**settings: Any) -> Any:
    return gpu.configured(**settings) if gpu.engine() else contextlib.nullcontext()


CASES: dict[str, Callable[[_Setup], Iterator[Row]]] = {
    "one-way": _one_way,
    "both-ways": _both_ways,
    "two-gpus": _two_gpus,
    "fetch": _fetch,
    "adam": _adam,
    "overlap": _beside_matmuls,
    "layers": _layers,
    "donor": _donor,
    "small-behind-large": _small_behind_large,
    "host-time": _host_time,
    "busy-half": _busy_half,
    "sweep": _sweep,
}


def run(args: argparse.Namespace) -> list[Row]:
    """Returns the rows of all cases that were asked for.

    A case that fails is a row that says so; the others still run.

    Args:
      args: what `add_arguments` defines.
    """
    _ffi.register()
    setup = _Setup(jax.devices(args.platform), args.rounds, args.shrink)
    rows: list[Row] = []
    for name, case in CASES.items():
        if name not in args.only or name in args.skip:
            continue
        start = time.perf_counter()
        try:
            for row in case(setup):
                rows.append(row)
                _say(_line(row))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            _say(f"{name}: {type(error).__name__}: {str(error)[:2000]}")
            rows.append(Row.make(name, "failed", 0.0, required=">= 1"))
        _say(f"  ({name}: {time.perf_counter() - start:.1f} s)")
        jax.clear_caches()
    return rows


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _line(row: Row) -> str:
    peer = "" if row.peer is None else f" / {row.peer:.3f} ({row.peer_name})"
    ratio = "" if row.ratio is None else f" = {row.ratio:.3f}"
    verdict = {True: "ok", False: "NOT REACHED", None: ""}[row.ok]
    return (
        f"{row.case}, {row.metric}: {row.ours:.3f}{peer}{ratio} "
        f"{row.required or ''} {verdict}"
    )


def main() -> None:
    """Runs the suite by itself: `python -m jax_turbobus.bench.offload_gpu`."""
    from jax_turbobus.bench import _report

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--json", help="write header and rows here")
    args = parser.parse_args()
    head = _report.header()
    rows = run(args)
    if args.json:
        _report.write_json(args.json, rows, head)


if __name__ == "__main__":
    main()
