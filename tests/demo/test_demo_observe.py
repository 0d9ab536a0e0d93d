"""What the demo says about links is what the engine and the exchange counted."""

import jax
import numpy as np
import pytest

import jax_turbobus as jtb
from jax_turbobus import gpu, moe
from jax_turbobus.demo import (
    backends,
    compare,
    emulate,
    model,
    report,
    text,
    timeline,
)
from jax_turbobus.demo.observe import Recorder
from jax_turbobus.demo.traffic import ExchangeBytes
from jax_turbobus.demo.train import TrainConfig, Trainer

SMALL = model.ModelConfig(
    num_layers=1,
    hidden=128,  # next to its rows, an exchange's metadata is little
    num_heads=2,
    expert_hidden=48,
    context=32,
    capacity_factor=4.0,
)


def test_bytes_of_a_run_are_those_counted_while_it_ran(tmp_path):
    steps = 4
    config = TrainConfig(num_steps=steps, batch=8, eval_every=100, eval_batches=0)
    corpus = text.load_standard_library(SMALL.context)
    backend = backends.get("turbobus")
    trainer = Trainer(SMALL, config, backend, corpus, jax.devices()[:4])
    trainer.held_out_loss = lambda: None  # its exchanges are no part of the steps
    exchanged = ExchangeBytes(SMALL, 4, backend.peer)
    moe.reset_exchange_stats()
    with Recorder(tmp_path / "trace.json") as recorder:
        for step in trainer.run():
            exchanged.add(step)
    jax.block_until_ready(trainer.opt_state)
    # Adam's two moments, each device its quarter, in and out every step.
    size = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.params)) // 4
    assert len(recorder.bytes_by_link) == 8
    assert set(recorder.bytes_by_link.values()) == {steps * size}
    assert {span.link for span in recorder.spans} == set(recorder.bytes_by_link)
    measured = sum(kind.total_bytes for kind in moe.exchange_stats())
    assert {kind.schedule for kind in moe.exchange_stats()} == {exchanged._schedule}
    used = exchanged.by_peer["turbobus"]
    assert used == pytest.approx(measured, rel=0.02)
    assert sum(exchanged.by_link.values()) == pytest.approx(2 * used)


def test_bytes_of_a_run_whose_exchanges_were_not_counted(monkeypatch):
    # Then the schedule that the model would choose stands for the one that ran.
    monkeypatch.setattr(moe, "exchange_stats", list)
    config = TrainConfig(num_steps=1, batch=8, eval_every=100, eval_batches=0)
    corpus = text.load_standard_library(SMALL.context)
    trainer = Trainer(
        SMALL, config, backends.get("turbobus"), corpus, jax.devices()[:2]
    )
    trainer.held_out_loss = lambda: 0.0
    exchanged = ExchangeBytes(SMALL, 2, None)
    for step in trainer.run():
        exchanged.add(step)
    assert exchanged.by_peer["turbobus"] > 0


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_relayed_blocks_are_laid_over_the_links_they_cross(tmp_path, direction):
    sharding = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    values = np.arange(1 << 20, dtype=np.float32)
    host = jax.device_put(values, sharding)
    on_device = jax.device_put(values, jax.devices()[0])
    path = tmp_path / "trace.json"
    arguments = {"rate_scale": 0.01, "block_bytes": 128 << 10, "emulate": True}
    recorder = Recorder(path, topology="8xh800", **arguments)
    with recorder:
        move = jtb.to_device if direction == "h2d" else jtb.to_host
        jax.block_until_ready(move(host if direction == "h2d" else on_device))
    assert {span.gpu for span in recorder.spans} == {0}
    counted = {}
    for span in recorder.spans:
        counted[span.link] = counted.get(span.link, 0) + (128 << 10)
    assert counted == recorder.bytes_by_link
    assert set(counted) <= set(recorder.links)
    own = "pcie0 numa0>gpu0" if direction == "h2d" else "pcie0 gpu0>numa0"
    assert not any(s.is_relayed for s in recorder.spans if s.link == own)
    assert any(span.is_relayed for span in recorder.spans)


class _TwoGpus:
    """Stands in for the CUDA library: 3 MiB direct, 2 MiB over the neighbour."""

    def __init__(self):
        self.now = {"is_traced": False, "split": "finish-time"}
        self.num_transfers = 0

    def settings(self):
        return dict(self.now)

    def set_settings(self, settings):
        self.now.update(settings)

    def take_messages(self):
        return []

    def take_spans(self):
        kind = {"transfer": self.num_transfers, "call": "to_device", "status": "OK"}
        times = {"issued_ns": 4, "start_ns": 5}
        return [
            {
                **kind,
                **times,
                "path": i,
                "offset_bytes": 0,
                "size_bytes": size,
                "relayed_ns": 8 * i,  # over NVLink then
                "resumed_ns": 8 * i,
                "end_ns": 9 + i,
            }
            for i, size in enumerate((3 << 20, 2 << 20))
            if self.num_transfers
        ]

    def stats(self):
        counts = "in_flight", "failed", "reissued_blocks", "blocks_in_flight"
        zeros = dict.fromkeys((f"num_{name}" for name in counts), 0)
        zeros |= {"now_ns": 0, "created_ns": 0}
        paths = [
            {
                "gpu": 0,
                "relay": relay,
                "direction": "h2d",
                "bandwidth_bytes_per_s": 5e10,
                "num_bytes": self.num_transfers * size,
                "num_blocks": self.num_transfers,
                "busy_ns": 4,
                "num_late": 0,
                "num_failed": 0,
                "num_bytes_in_flight": 0,
                "is_backed_off": False,
                "has_rival": False,
                "dropped": "",
                "left_out": "",
            }
            for relay, size in ((None, 3 << 20), (1, 2 << 20))
        ]
        plain = {"num_plain": 0, "plain_bytes": 0}
        done = {"num_completed": self.num_transfers, "completed_bytes": 0}
        others = {"paths": paths, "recent_transfers": [], "staging_bytes": {}}
        return {**zeros, **plain, **done, **others}


def test_what_the_engine_of_gpus_moves_is_laid_over_their_links(tmp_path, monkeypatch):
    library = _TwoGpus()
    library.num_transfers = 1  # earlier ones are not this recorder's
    monkeypatch.setattr(gpu, "_engine", gpu.Engine(library, ()))
    recorder = Recorder(tmp_path / "trace.json", on_gpus=True, split="direct")
    with recorder:
        assert library.now == {"is_traced": True, "split": "direct"}
        library.num_transfers += 1
    assert library.now == {"is_traced": False, "split": "finish-time"}
    assert recorder.bytes_by_link == {
        "pcie gpu0 h2d": 3 << 20,
        "pcie gpu1 h2d": 2 << 20,
    }
    assert [(s.link, s.gpu, s.is_relayed) for s in recorder.spans] == [
        ("pcie gpu0 h2d", 0, False),
        ("pcie gpu1 h2d", 0, True),
    ]
    assert recorder.links == ["pcie gpu0 h2d", "pcie gpu1 h2d"]
    assert (tmp_path / "trace.json").exists()


def test_newest_counts_from_its_first_span():
    found = [timeline.Span("a", 0, False, start, 1.0) for start in (5.0, 8.0, 9.0)]
    assert [span.start_ms for span in timeline.newest(found)] == [0.0, 3.0, 4.0]
    assert [span.start_ms for span in timeline.newest(found, 2.0)] == [0.0, 1.0]
    assert timeline.newest([]) == []


def test_fullest_burst_ends_where_all_links_pause():
    starts = [0.0, 10.0, 10.5, 12.4, 20.0, 21.0]
    found = [timeline.Span("a", 0, False, start, 1.0) for start in starts]
    burst = timeline.fullest_burst(found[::-1])
    assert [span.start_ms for span in burst] == pytest.approx([0.0, 0.5, 2.4])
    long = [timeline.Span("b", 1, False, 0.0, 30.0)]
    assert len(timeline.fullest_burst(found + long)) == 7
    assert timeline.fullest_burst([]) == []


def test_pooling_helps_one_device_and_not_all(tmp_path):
    emulation = emulate.Emulation.load("2xh200")
    assert emulation.rate_scale < 0.1
    compared = compare.over_emulated_links(emulation, jax.devices()[:2], tmp_path)
    names = [timing.name for timing in compared.timings]
    assert len(names) == 4
    for timing in compared.timings:
        # Not below: the links' own pace. A busy machine only adds to it.
        floor = compared.size_bytes / (55.3e9 * emulation.rate_scale)
        assert timing.direct_s >= 0.95 * floor
        assert timing.pooled_s >= 0.45 * floor
        if "all" in timing.name:
            assert timing.pooled_s >= 0.95 * floor
    direct, pooled = compared.panels.values()
    assert {span.link for span in direct} == {"pcie0 numa0>gpu0"}
    assert {span.link for span in pooled} == {
        "pcie0 numa0>gpu0",
        "pcie1 numa0>gpu1",
        "nvlink0-1 gpu1>gpu0",
    }
    printed = report.comparison(compared)
    assert all(name in printed for name in names)
    assert jtb.stats().is_enabled is False


def test_topology_without_gpus_is_refused():
    with pytest.raises(ValueError, match=r"--emulate: cpu has no GPUs"):
        emulate.Emulation.load("cpu")
