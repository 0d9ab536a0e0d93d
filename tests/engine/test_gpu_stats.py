"""What `stats` and `trace` make of the counters of the engine of GPUs."""

import json

import pytest

import jax_turbobus as jtb
from jax_turbobus import _observe, config, gpu
from jax_turbobus.commands import _findings

MIB = 1 << 20


def path(relay, **changes):
    known = {
        "gpu": 0,
        "relay": relay,
        "direction": "h2d",
        "bandwidth_bytes_per_s": 5e10,
        "num_bytes": 7 * MIB,
        "num_blocks": 3,
        "busy_ns": 4,
        "num_late": 1,
        "num_failed": 0,
        "num_bytes_in_flight": 0,
        "is_backed_off": False,
        "has_rival": False,
        "dropped": "",
        "left_out": "",
    }
    return known | changes


class _Library:
    """Stands in for the CUDA library, after a transfer that met a bad relay."""

    paths = (
        path(None),
        path(1, num_failed=1, dropped="refused", left_out="unreachable"),
        path(2, left_out="unreachable", num_bytes_in_flight=MIB),
        path(3, has_rival=True),
        path(4, is_backed_off=True),
        path(5),
    )

    def settings(self):
        return {"is_traced": True}

    def take_messages(self):
        return []

    def take_spans(self):
        span = {"transfer": 9, "call": "h2d", "issued_ns": 90, "status": "OK"}
        return [
            {
                **span,
                "path": 0,
                "offset_bytes": 0,
                "size_bytes": MIB,
                "start_ns": 100,
                "relayed_ns": 0,
                "resumed_ns": 0,
                "end_ns": 300,
            },
            {
                **span,
                "path": 5,
                "offset_bytes": MIB,
                "size_bytes": 2 * MIB,
                "start_ns": 110,
                "relayed_ns": 200,
                "resumed_ns": 220,
                "end_ns": 310,
            },
        ]

    def stats(self):
        transfer = {
            "id": 9,
            "call": "h2d",
            "gpu": 0,
            "direction": "h2d",
            "size_bytes": 3 * MIB,
            "num_blocks": 4,
            "num_relayed_bytes": 2 * MIB,
            "num_reissued_blocks": 2,
            "reissue_reason": "refused",
            "status": "INTERNAL",
            "message": "lost",
            "submitted_ns": 90,
            "started_ns": 100,
            "ended_ns": 310,
        }
        return {
            "now_ns": 400,
            "created_ns": 1,
            "num_completed": 5,
            "completed_bytes": 50,
            "num_plain": 2,
            "plain_bytes": 20,
            "num_failed": 1,
            "num_in_flight": 1,
            "num_blocks_in_flight": 6,
            "num_reissued_blocks": 2,
            "staging_bytes": {1: 64 * MIB, 2: 64 * MIB, 5: 32 * MIB},
            "paths": list(self.paths),
            "recent_transfers": [transfer],
        }


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(config, "engine", lambda: None)
    made = gpu.Engine(_Library(), ())
    monkeypatch.setattr(gpu, "_engine", made)
    return made


def test_counts_are_the_engines(engine):
    stats = jtb.stats()
    assert (stats.num_submitted, stats.num_completed, stats.num_failed) == (9, 7, 1)
    assert (stats.num_in_flight, stats.num_blocks_in_flight) == (1, 6)
    assert stats.num_completed_bytes == 70
    assert stats.num_reissued_blocks == 2
    assert stats.staging_bytes == {1: 64 * MIB, 2: 64 * MIB, 5: 32 * MIB}
    (transfer,) = stats.recent_transfers
    assert (transfer.status, transfer.message) == ("INTERNAL", "lost")
    assert (transfer.num_reissued_blocks, transfer.reissue_reason) == (2, "refused")
    assert [lane.num_failed_blocks for lane in stats.lanes] == [0, 1, 0, 0, 0, 0]
    assert stats.lanes[2].num_bytes_in_flight == MIB
    assert str(stats).startswith("7 transfers, 1 in flight, 1 failed, 2 blocks issued")


def test_what_nobody_knows_is_none(engine):
    for lane in jtb.stats().lanes:
        assert lane.queued_ns is None
        assert lane.numa_node is None


def test_why_a_relay_is_not_used(engine):
    reasons = [lane.reason for lane in jtb.stats().lanes]
    assert reasons[0] == reasons[5] == ""
    assert reasons[1:3] == ["refused", "unreachable"]
    assert reasons[3] == "GPU 3 is busy itself whenever GPU 0 is"
    assert "late" in reasons[4]
    removed = [lane.relay for lane in jtb.stats().lanes if lane.is_removed]
    assert removed == [1]


def test_a_relays_hops_have_tracks_of_their_own(engine, tmp_path):
    assert jtb.trace(tmp_path / "trace.json") == 3
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = {
        tracks[e["tid"]]: (e["ts"], e["dur"], e["args"]["status"])
        for e in events
        if e["ph"] == "X"
    }
    assert bars == {
        "gpu0 h2d": (0.0, 0.22, "INTERNAL"),
        "gpu0 h2d via gpu5, first hop": (0.02, 0.09, "OK"),
        "gpu0 h2d via gpu5, second hop": (0.13, 0.09, "OK"),
    }


def test_doctor_tells_staging_and_relays_that_were_dropped(engine):
    found = list(_findings.engine_checks(jtb.stats()))
    assert [(check.status, check.text) for check in found] == [
        ("ok", "staging: 32.0 MiB on each of gpu5, allocated once"),
        ("ok", "staging: 64.0 MiB on each of gpu1, gpu2, allocated once"),
        ("warn", "gpu0 borrows no link of gpu1: refused"),
    ]
    (none,) = _findings.engine_checks(_observe.Stats())
    assert "no GPU of this process lends" in none.text
