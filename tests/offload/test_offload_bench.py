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


def test_the_programs_of_the_gpu_suite_are_right_on_cpu_devices(engine):
    """Tiny arrays: what they move is checked, how fast means nothing."""
    rows = _rows_on_cpu_devices(*offload_gpu.CASES)
    assert len({(row.case, row.metric) for row in rows}) == len(rows)
    bounds = {f"{row.case} | {row.metric}": row.required for row in rows}
    for case, bound in (
        ("h2d 64 MiB, 8 calls in a row | GB/s", ">= 1.7"),
        ("d2h 4 GiB, a single call | GB/s", ">= 1.95"),
        ("h2d + d2h of one GPU at once, 1 GiB each, 4 calls in a row", ">= 1.8"),
        ("both GPUs d2h at once, 1 GiB each, 4 calls in a row", ">= 0.98"),
        ("fetch of 8 x 256 MiB in a scan", ">= 1.7"),
        ("Adam state, 4 GiB in and out", ">= 1.7"),
        ("donor: matmul loop while it lends", "<= 1.01"),
        ("donor's own 1 MiB jax.device_put while it lends | p99", "<= 1.0"),
        ("donor's own 256 MiB through us while it lends", "<= 1.06"),
        ("4 MiB behind 4 GiB, with yields | p50", "<= 0.5"),
        ("1 GiB, relay busy half the time (5 ms on, 5 off), mean", ">= 1.3"),
        ("h2d 4 GiB against the sum of links", ">= 0.97"),
        ("CPU use when idle", "<= 0.01"),
    ):
        assert [b for name, b in bounds.items() if name.startswith(case)] == [bound]
    assert {"split": "direct"} in engine.seen
    assert engine.now["split"] == "finish-time"


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
