"""`trace`: what is recorded, and the file that viewers open."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turbobus
from jax_turbobus._trace_format import chrome_trace

MIB = 1 << 20


def move(num_floats):
    """Moves f32[num_floats] to device 0 inside a jitted program."""
    x = jax.device_put(
        jnp.arange(num_floats, dtype=jnp.float32),
        jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
    )
    y = jax.jit(lambda x: jax_turbobus.to_device(x) * 2)(x)
    np.testing.assert_array_equal(y, 2 * np.arange(num_floats, dtype=np.float32))


def test_trace_writes_what_perfetto_opens(tmp_path):
    jax_turbobus.configure(
        topology="2xh200", emulate=True, rate_scale=0.01, block_bytes=MIB, trace=True
    )
    move(2 * MIB)
    path = tmp_path / "trace.json"
    num_events = jax_turbobus.trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    blocks = [event for event in slices if event["cat"] == "block"]
    (transfer,) = [event for event in slices if event["cat"] == "transfer"]
    assert num_events == 1 + len({b["args"]["offset_bytes"] for b in blocks})
    # One hop each block, or two; together every byte once.
    offsets = {b["args"]["offset_bytes"]: b["args"]["size_bytes"] for b in blocks}
    assert sum(offsets.values()) == transfer["args"]["size_bytes"] == 8 * MIB
    for block in blocks:
        assert block["ts"] >= transfer["ts"]
        assert block["ts"] + block["dur"] <= transfer["ts"] + transfer["dur"] + 1e4
    names = {
        event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert {"gpu0 h2d", "gpu0 h2d via gpu1, first hop"} <= names
    # No two bars of one track overlap, or viewers drop them.
    for key in {(event["pid"], event["tid"]) for event in slices}:
        row = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == key
        )
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(row))
    starts = {event["id"] for event in events if event["ph"] == "s"}
    ends = {event["id"] for event in events if event["ph"] == "f"}
    assert starts == ends
    assert len(starts) == len(offsets)


def test_trace_says_how_to_turn_it_on(tmp_path):
    with pytest.raises(ValueError, match=r"configure\(trace=True"):
        jax_turbobus.trace(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("path", "error"), [(1, TypeError), (None, TypeError), ("a\0b", ValueError)]
)
def test_only_paths_are_written_to(path, error):
    jax_turbobus.configure(topology="2xh200", trace=True)
    with pytest.raises(error, match="path: expected the path of a file"):
        jax_turbobus.trace(path)


def test_a_bounded_trace_keeps_the_newest(tmp_path):
    jax_turbobus.configure(topology="2xh200", block_bytes=4096, trace=10)
    move(MIB)
    assert jax_turbobus.trace(tmp_path / "trace.json") == 10


def event(lane, start_ns, end_ns, **fields):
    known = {
        "transfer": 1,
        "lane": lane,
        "gpu": 0,
        "direction": "h2d",
        "offset_bytes": 0,
        "size_bytes": 10,
        "issued_ns": start_ns,
        "start_ns": start_ns,
        "relayed_ns": 0,
        "resumed_ns": 0,
        "end_ns": end_ns,
        "status": "OK",
    }
    return known | fields


def test_no_events_are_a_trace_too():
    assert all(e["ph"] == "M" for e in chrome_trace([], [])["traceEvents"])


def test_blocks_that_overlap_on_a_lane_get_rows_of_their_own():
    trace = chrome_trace(
        [event(0, 100, 300), event(0, 200, 400), event(0, 300, 500)], ["lane"]
    )
    rows = [e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert rows[0] == rows[2] != rows[1]
    names = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert [e["args"]["name"] for e in names] == ["lane", "lane"]


def test_a_relayed_block_is_a_bar_for_each_hop_and_one_arrow():
    relayed = event(0, 100, 500, relayed_ns=250, resumed_ns=300)
    whole = event(-1, 90, 510)
    trace = chrome_trace([relayed, whole], ["lane"])["traceEvents"]
    bars = {(e["ts"], e["dur"]) for e in trace if e["ph"] == "X"}
    assert bars == {(0.01, 0.15), (0.21, 0.2), (0.0, 0.42)}
    assert [e["ph"] for e in trace if e["ph"] in "sf"] == ["s", "f"]


def test_a_block_whose_transfer_is_forgotten_has_no_arrow():
    trace = chrome_trace([event(0, 1, 2)], ["lane"])["traceEvents"]
    assert not [e for e in trace if e["ph"] in "sf"]
