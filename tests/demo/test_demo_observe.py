"""What the demo says about links is what the engine and the exchange counted."""

import jax
import numpy as np
import pytest

import jax_turbobus as jtb
from jax_turbobus import moe
from jax_turbobus.demo import backends, emulate, model, report, text, timeline
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
    compared = emulate.compare(emulation, jax.devices()[:2], tmp_path, repeats=3)
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
