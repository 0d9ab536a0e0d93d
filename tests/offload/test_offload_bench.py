"""The offload benchmark runs and asks for what it should."""

import argparse
import itertools

import pytest

from jax_turbobus import gpu
from jax_turbobus.bench import offload, offload_gpu
from jax_turbobus.bench._report import Timing
from jax_turbobus.bench.offload_gpu import _setup


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
        self.now = {"block_bytes": 16 << 20, "split": "finish-time"}
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
            # Of the sizes that `small_behind_large` looks for.
            "recent_transfers": [
                {
                    "id": (i := next(self.ids)),
                    "size_bytes": size,
                    "started_ns": 0,
                    "ended_ns": 1_000_000 * i,
                }
                for size, count in ((4096, 3 * 12), ((4 << 30) // 8192, 3))
                for _ in range(count)
            ],
        }


@pytest.fixture
def engine(monkeypatch):
    stand_in = _Engine()
    monkeypatch.setattr(gpu, "_engine", stand_in)
    return stand_in


def _rows_on_cpu_devices(*only):
    parser = argparse.ArgumentParser()
    offload_gpu.add_arguments(parser)
    options = ["--platform", "cpu", "--shrink", "8192", "--rounds", "2"]
    rows = offload_gpu.run(parser.parse_args([*options, "--only", *only]))
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


def test_what_needs_two_gpus_says_so(monkeypatch, engine):
    only_one = offload_gpu.jax.devices("cpu")[:1]
    monkeypatch.setattr(offload_gpu.jax, "devices", lambda _: only_one)
    rows = _rows_on_cpu_devices("two-gpus", "donor", "busy-half")
    assert [row.metric for row in rows] == [
        "not measured: needs 2 GPUs, JAX sees 1"
    ] * 3


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
