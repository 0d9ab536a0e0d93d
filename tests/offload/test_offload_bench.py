"""The offload benchmark runs and asks for what it should."""

import argparse
import itertools
import types

import jax
import jax.numpy as jnp
import pytest

import jax_turbobus as tb
from jax_turbobus import gpu
from jax_turbobus.bench import offload, offload_gpu
from jax_turbobus.bench._report import Timing
from jax_turbobus.bench.offload_gpu import _setup, behind, programs


def test_rows_of_small_and_large_transfers():
    parser = argparse.ArgumentParser()
    offload.add_arguments(parser)
    rows = offload.run(parser.parse_args(["--rounds", "1", "--max-mib", "16"]))
    bounds = {row.metric: row.required for row in rows if row.required}
    assert bounds == {"own time, us": "< 30", "GB/s": ">= 0.9"}
    assert sum(row.metric == "GB/s" for row in rows) == 5
    assert all(row.ours > 0 for row in rows if row.metric != "own time, us")


class _Engine(gpu.Engine):
    """Stands in for an engine of two GPUs on CPU devices, which have none."""

    def __init__(self):
        super().__init__(self, ())
        self.now = {
            "block_bytes": 16 << 20,
            "split": "finish-time",
            "has_yields": True,
        }
        self.small_late_ns = 0
        self.seen = []
        self.ids = itertools.count(1)

    def settings(self):
        return dict(self.now)

    def set(self, **settings):
        self.now.update(settings)
        self.seen.append(settings)

    def measure(self, links, size_bytes, block_bytes):
        assert size_bytes > 0
        assert block_bytes > 0
        return [50e9] * len(links)

    def raw(self):
        return {
            "paths": [
                {"gpu": g, "relay": relay, "direction": direction, "num_blocks": 3}
                for g in range(2)
                for direction in ("h2d", "d2h")
                for relay in (None, 1 - g)
            ],
            "handler_ns": [50_000] * 20,
            "recent_transfers": [*self.transfers()],
        }

    def transfers(self):
        """Of the sizes, and the order, that `small_behind_large` looks for."""
        # Without yields the first small one waits for all of the large one.
        late_ns = 0 if self.now["has_yields"] else 38_000_000
        for run in range(behind.RUNS):
            began_ns = 100_000_000 * run
            for i in range(1 + behind.COUNT):
                is_large = i == 0
                submitted_ns = began_ns + 100_000 * i
                yield {
                    "id": next(self.ids),
                    "size_bytes": (4 << 30) // 8192 if is_large else 4096,
                    "submitted_ns": submitted_ns,
                    "started_ns": submitted_ns,
                    "ended_ns": began_ns + 40_000_000
                    if is_large
                    else submitted_ns + 100_000 + late_ns + self.small_late_ns,
                }


@pytest.fixture
def engine(monkeypatch):
    stand_in = _Engine()
    monkeypatch.setattr(gpu, "_engine", stand_in)
    return stand_in


def _run_on_cpu_devices(*only):
    parser = argparse.ArgumentParser()
    offload_gpu.add_arguments(parser)
    options = ["--platform", "cpu", "--shrink", "8192", "--rounds", "2"]
    return offload_gpu.run(parser.parse_args([*options, "--only", *only]))


def _rows_on_cpu_devices(*only):
    rows = _run_on_cpu_devices(*only)
    assert [row for row in rows if row.metric == "failed"] == []
    return rows


# What is asked, by the beginning of "case | metric"; every row with a bound is here.
BOUNDS = {
    f"{direction} {size}, {calls} | GB/s": bound
    for direction in ("h2d", "d2h")
    for size, calls, bound in (
        ("4 KiB", "a single call", "noise"),
        ("64 KiB", "a single call", "noise"),
        ("1 MiB", "a single call", "noise"),
        ("4 MiB", "a single call", "noise"),
        ("8 MiB", "a single call", "noise"),
        ("16 MiB", "a single call", ">= 1.3"),
        ("32 MiB", "8 calls in a row", ">= 1.5"),
        ("64 MiB", "8 calls in a row", ">= 1.7"),
        ("256 MiB", "8 calls in a row", ">= 1.85"),
        ("1 GiB", "8 calls in a row", ">= 1.95"),
        ("4 GiB", "a single call", ">= 1.95"),
    )
}
BOUNDS |= {
    "h2d + d2h of one GPU at once, 1 GiB each, 4 calls in a row | GB/s": ">= 1.8",
    "both GPUs h2d at once, 1 GiB each, 4 calls in a row | GB/s": ">= 0.98",
    "both GPUs d2h at once, 1 GiB each, 4 calls in a row | GB/s": ">= 0.98",
    "GPU 0 h2d, GPU 1 d2h at once, 1 GiB each, 4 calls in a row | GB/s": ">= 0.98",
    "fetch of 8 x 256 MiB in a scan | GB/s": ">= 1.7",
    "Adam state, 4 GiB in and out | GB/s": ">= 1.7",
    "1 GiB fetch in overlap beside a matmul, 8 calls in a row | ms a call": "<= 1.05",
    "1 GiB fetch in overlap beside a matmul, 8 calls in a row, program | per second": (
        ">= 1.7"
    ),
    "scan_layers forward, 16 x 512 MiB | GB/s": ">= 1.8",
    "scan_layers training step, 16 x 512 MiB | GB/s": ">= 1.6",
    "donor: matmul loop while it lends | ms": "<= 1.01",
    "4 MiB behind 4 GiB, with yields | the first one behind the queue, ms more than"
    " alone": "<= 0.5",
    "4 MiB behind 4 GiB, with yields | p50, ms more than alone": "<= 0.5",
    "4 GiB with 12 times 4 MiB in between | ms": "<= 1.04",
    "what yields cost the 4 GiB | ms": "<= 1.04",
    "CPU use when idle | cores": "<= 0.01",
}
BOUNDS |= {
    f"donor's own {size}{direction} {name} while it lends | {figure}, ms": bound
    for direction in ("", " d2h")
    for name in ("through us", "jax.device_put")
    for size, figure, bound in (
        ("1 MiB", "p99", "<= 1.0"),
        ("16 MiB", "p99", "<= 1.0"),
        ("256 MiB", "p50", "<= 1.06"),
    )
}
BOUNDS |= {
    f"1 GiB, relay busy half the time ({period}), {figure} | per second": bound
    for period, figure, bound in (
        ("5 ms on, 5 off", "mean", ">= 1.3"),
        ("5 ms on, 5 off", "slowest tenth", ">= 0.98"),
        ("1 ms on, 1 off", "mean", ">= 0.98"),
        ("40 ms on, 40 off", "mean", ">= 0.98"),
    )
}
# The stand-in counts as many relayed blocks before as behind.
BOUNDS |= {
    f"host time in the handler, {direction} {size}, 0 relayed blocks | p50, us": (
        "<= 60"
    )
    for direction in ("h2d", "d2h")
    for size in ("16 MiB", "256 MiB", "1 GiB")
}
BOUNDS |= {
    f"{direction} {size} against the sum of links | GB/s": ">= 0.97"
    for direction in ("h2d", "d2h")
    for size in ("1 GiB", "4 GiB")
}


def test_the_programs_of_the_gpu_suite_are_right_on_cpu_devices(engine):
    """Tiny arrays: what they move is checked, how fast means nothing."""
    rows = _rows_on_cpu_devices(*offload_gpu.CASES)
    assert len({(row.case, row.metric) for row in rows}) == len(rows)
    found = {f"{row.case} | {row.metric}": row for row in rows}
    bounds = {name: row.required for name, row in found.items() if row.required}
    for name, bound in BOUNDS.items():
        if bound == "noise":
            assert float(bounds[name].removeprefix(">= ")) <= 1
            bounds[name] = bound
    assert bounds == BOUNDS
    for name in (
        "scan_layers, 16 x 512 MiB: compute alone | ms",
        "d2h 256 MiB without out, 8 calls in a row | GB/s",
        "4 MiB behind 4 GiB, without yields | the first one behind the queue, ms more"
        " than alone",
    ):
        assert found[name].ours >= 0
    assert {"split": "direct"} in engine.seen
    assert engine.now["split"] == "finish-time"


def test_calls_in_a_row_write_into_buffers_in_turn():
    setup = _setup.Setup(offload_gpu.jax.devices("cpu")[:1], 1, 8192)
    x = setup.device(32 << 20)
    out = _setup.Outgoing(setup, x, count=3)
    first = [out.start_ours() for _ in range(3)]
    assert not any(one.is_deleted() for one in first)
    _setup.check(out.start_ours(), x)
    assert [one.is_deleted() for one in first] == [True, False, False]


def test_what_is_measured_beside_work_that_fails_is_no_figure():
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), _setup.meanwhile(fail):
        pass


def test_the_first_small_one_shows_what_yields_are_for(engine):
    rows = {
        (row.case, row.metric): row
        for row in _rows_on_cpu_devices("small-behind-large")
    }
    first = "the first one behind the queue, ms more than alone"
    with_yields = rows["4 MiB behind 4 GiB, with yields", first]
    assert (with_yields.ours, with_yields.required) == (0, "<= 0.5")
    without = rows["4 MiB behind 4 GiB, without yields", first]
    assert (without.ours, without.required) == (pytest.approx(38), None)
    # Those after it find the link free.
    p50 = rows["4 MiB behind 4 GiB, without yields", "p50, ms more than alone"]
    assert p50.ours == pytest.approx(0)


def test_small_ones_that_end_after_the_large_one_are_no_figure(engine):
    engine.small_late_ns = 50_000_000
    setup = _setup.Setup(offload_gpu.jax.devices("cpu")[:2], 1, 8192)
    with pytest.raises(ValueError, match="ms after the large one"):
        list(behind.small_behind_large(setup))


def test_without_an_engine_cases_say_that_they_measured_nothing(monkeypatch):
    monkeypatch.setattr(gpu, "_engine", None)
    rows = _rows_on_cpu_devices(
        "small-behind-large", "busy-half", "host-time", "sweep", "both-ways"
    )
    assert [row.case for row in rows if row.metric.startswith("not measured")] == [
        "bound of h2d + d2h",
        "4 MiB behind 4 GiB",
        "relay busy half the time",
        "host time in the handler",
        "block sizes and sums of links",
    ]


def test_what_needs_two_gpus_says_so(monkeypatch, engine):
    only_one = offload_gpu.jax.devices("cpu")[:1]
    monkeypatch.setattr(offload_gpu.jax, "devices", lambda _: only_one)
    rows = _rows_on_cpu_devices("two-gpus", "donor", "busy-half")
    assert [row.metric for row in rows] == [
        "not measured: needs 2 GPUs, JAX sees 1"
    ] * 3


def _zeros(f, stack, x):
    return tb.scan_layers(f, stack, x) * 0


def _no_gradient(f, stack, x):
    y = tb.scan_layers(f, stack, x)
    return jax.lax.stop_gradient(y) + y * 0


@pytest.mark.parametrize(("wrong", "num_kept"), [(_zeros, 1), (_no_gradient, 2)])
def test_layers_of_zeros_are_caught(monkeypatch, engine, wrong, num_kept):
    stand_in = types.SimpleNamespace(scan_layers=wrong)
    monkeypatch.setattr(programs, "tb", stand_in)
    rows = _run_on_cpu_devices("layers")
    assert len(rows) == num_kept + 1
    assert rows[-1].failed
    assert "the largest error is 1 of the largest value" in rows[-1].note


def test_a_wrong_product_beside_a_fetch_is_caught(monkeypatch, engine):
    def overlap(f, a, fetch):
        # Each row is another one's.
        return jnp.roll(f(a), 1, axis=0), tb.to_device(fetch), ()

    monkeypatch.setattr(programs, "tb", types.SimpleNamespace(overlap=overlap))
    (row,) = _run_on_cpu_devices("overlap")
    assert row.failed
    assert "the values are wrong" in row.note


def test_noise_is_what_one_program_differs_from_itself_by():
    steady = Timing((1.0,) * 9)
    assert _setup.noise(steady, steady) == 0
    assert _setup.noise(steady, Timing((1.1,) * 9)) == pytest.approx(0.1)
    assert 0 < _setup.noise(Timing((0.9, 1.0, 1.1) * 3), steady) < 0.2


def test_an_interrupted_run_keeps_what_it_has(monkeypatch, engine):
    def interrupted(_):
        yield _setup.Row.make("first", "GB/s", 1.0)
        raise KeyboardInterrupt

    monkeypatch.setitem(offload_gpu.CASES, "fetch", interrupted)
    parser = argparse.ArgumentParser()
    offload_gpu.add_arguments(parser)
    rows = offload_gpu.run(
        parser.parse_args(["--platform", "cpu", "--only", "fetch", "adam"])
    )
    assert [row.metric for row in rows] == ["GB/s", "interrupted"]
    assert rows[-1].failed
