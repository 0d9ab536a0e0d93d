"""What "auto" takes by rates and starts that were measured, against sums by hand."""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_turbobus import gpu, moe
from jax_turbobus._profile_exchange import Exchange, PairRate
from jax_turbobus._profile_file import Profile
from jax_turbobus._version import __version__
from jax_turbobus.moe import _choice, _measured, _routing, _starts, _volume

MIB = 1 << 20
STARTS = {"mail": 100e-6, "packed": 300e-6, "broadcast": 200e-6}


def links(rates=40e9, number=2, starts=STARTS, peers=False):
    return _measured.MeasuredLinks(
        rates=np.broadcast_to(np.asarray(rates, float), (number, number)),
        has_peer_access=peers,
        starts=starts,
        most_mailed_bytes=MIB,
        source="the profile of today",
    )


def choose(measured, **changes):
    sizes = {
        "tokens_per_rank": 4096,
        "hidden": 4096,
        "num_experts": 8,
        "top_k": 1,
        "num_ranks": 2,
        "schedules": ("packed", "broadcast"),
        "topology": measured,
    }
    return moe.choose_schedule(**(sizes | changes))


def by_hand(num_tokens, share, metadata_bytes, memory_bytes, start, rate=40e9):
    """Seconds of two ways of `share` of the tokens, what is told of them, own work."""
    row = 4096 * 2
    sent = num_tokens * share * row
    return 2 * sent / rate + metadata_bytes / rate + memory_bytes / 1.9e12 + start


@pytest.mark.parametrize(
    ("num_tokens", "starts", "want"),
    [
        # Half of 4096 tokens of 8 KiB saved twice: 2 x 419 us for 100 us more to start.
        (4096, STARTS, "packed"),
        # Half of 256 tokens: 2 x 26 us are less than the 100.
        (256, STARTS, "broadcast"),
        (256, STARTS | {"broadcast": 290e-6}, "packed"),
        # By mail they start alike, and fewer bytes win.
        (64, STARTS, "packed"),
    ],
)
def test_auto_weighs_measured_rates_and_starts(num_tokens, starts, want):
    choice = choose(links(starts=starts), tokens_per_rank=num_tokens)
    row, n = 8192, num_tokens
    is_mailed = n * row <= MIB
    start = {k: starts["mail" if is_mailed else k] for k in ("packed", "broadcast")}
    # A token goes to one of two ranks, so half leave theirs; 8 counts of 4 bytes are
    # told, and 8 bytes a token. Packing, expanding and summing: rows read and written.
    counts = 8 * 4
    memory = row * n * 7
    packed = by_hand(n, 1 / 2, counts + n / 2 * 8, memory, start["packed"])
    broadcast = by_hand(n, 1, n * 8, memory, start["broadcast"])
    assert choice.seconds["packed"] == pytest.approx(packed)
    assert choice.seconds["broadcast"] == pytest.approx(broadcast)
    assert choice.schedule == want
    assert "figures: links and starts by the profile of today" in choice.explain()
    assert choice.to_json()["source"] == choice.source


def test_the_slowest_pair_is_what_all_wait_for():
    rates = np.full((3, 3), 40e9)
    rates[2, 0] = 6e9
    choice = choose(links(rates, 3), num_ranks=3, num_experts=9)
    assert choice.bottleneck == "rank 2 to rank 0"
    sent = 4096 / 3 * 8192
    assert choice.seconds["packed"] > 2 * sent / 6e9
    alike = choose(links(40e9, 3), num_ranks=3, num_experts=9)
    assert alike.seconds["packed"] < 2 * 2 * sent / 40e9 + 1.2e-3


def test_ranks_that_are_not_all_gpus_are_taken_to_be_the_slowest():
    rates = np.full((4, 4), 40e9)
    rates[3, 1] = 10e9
    some = choose(links(rates, 4))
    assert some.seconds == choose(links(10e9)).seconds
    more = choose(links(rates, 4), num_ranks=8)
    assert more.seconds == choose(links(10e9, 8), num_ranks=8).seconds


def test_a_broadcast_is_written_once():
    wiring = links(40e9, 4).wiring(4)
    v = _volume.volume(
        tokens_per_rank=100,
        hidden=8,
        num_experts=8,
        top_k=1,
        num_ranks=4,
        topology=links(40e9, 4),
    )
    traffic = v["broadcast"]
    out = wiring.loads(traffic, traffic.dispatch)[0]
    assert out == traffic.dispatch[0, 1]
    assert v.link_bytes("packed")["rank 0 to rank 1"] > 0


def test_gpus_that_reach_each_other_start_alike_under_any_schedule():
    near = links(300e9, starts={"peer": 50e-6}, peers=True)
    choice = choose(near, schedules=("direct", "packed"))
    assert choice.schedule == "direct"
    assert near.start_seconds(1)["packed"] == near.start_seconds(1 << 40)["direct"]


def test_starts_that_were_not_measured_are_assumed():
    choice = choose(links(starts={}))
    assert choice.source == "links by the profile of today, steps assumed"
    partly = dataclasses.replace(_choice.GPU_COSTS, starts={"packed": 1.0})
    assert choose(None, costs=partly).seconds["packed"] > 1.0
    assert choose(None, costs=partly).schedule == "broadcast"


def test_measured_links_have_no_other_gpus():
    with pytest.raises(ValueError, match="gpus: expected None with measured links"):
        choose(links(), gpus=[0, 1])


# What a process with GPUs does, on one without.

A, B = "aaaa", "bbbb"


def engine(exchange):
    library = types.SimpleNamespace(
        gpus=lambda: [{"uuid": A}, {"uuid": B}],
        can_access_peer=lambda a, b: False,
        most_mailed_bytes=MIB,
    )
    profile = Profile(
        made_by=__version__,
        driver="1",
        gpus=(A, B),
        date="2026-12-01",
        block_bytes=1,
        yield_kind="word",
        paths=(),
        groups=(),
        exchange=exchange,
    )
    return gpu.Engine(library, (), profile, "" if exchange else "file is older")


def measured_exchange(**starts):
    pairs = (PairRate(A, B, "host", 40e9), PairRate(B, A, "host", 40e9))
    return Exchange(2, 8 * MIB, pairs, STARTS | starts)


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(_routing._compat, "has_cuda_devices", lambda: True)
    return lambda exchange: monkeypatch.setattr(gpu, "_engine", engine(exchange))


def layer(num_tokens=256, **options):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))

    def run(x, ids, w):
        rows, _, state = moe.dispatch(
            x, ids, w, num_experts=8, axis_name="x", **options
        )
        return moe.combine(rows, state)

    fun = jax.shard_map(run, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"))
    shape = jax.ShapeDtypeStruct
    return jax.make_jaxpr(fun)(
        shape((2 * num_tokens, 4096), jnp.bfloat16),
        shape((2 * num_tokens, 1), jnp.int32),
        shape((2 * num_tokens, 1), jnp.float32),
    )


def test_a_process_with_gpus_goes_by_its_profile(process, caplog, capsys):
    process(measured_exchange())
    with caplog.at_level(logging.INFO, "jax_turbobus"):
        layer()
    assert "schedule: broadcast" in caplog.text
    assert "links and starts by the profile of 2026-12-01" in caplog.text
    process(measured_exchange(broadcast=1.0))
    layer(explain=True)
    text = capsys.readouterr().out
    assert text.startswith("dispatch over axis 'x': schedule: packed")
    assert "links and starts by the profile of 2026-12-01" in text
    layer(schedule="direct", explain=True)
    assert "schedule: direct, as the call says" in capsys.readouterr().out
    layer()
    assert not capsys.readouterr().out


def test_without_figures_it_assumes_and_says_why(process, capsys):
    process(None)
    layer(explain=True)
    text = capsys.readouterr().out
    assert "all links alike, assumed: file is older" in text


def test_on_cpu_devices_profiles_do_not_count(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_engine", engine(measured_exchange()))
    layer(explain=True)
    assert "without a topology: all links alike" in capsys.readouterr().out


def test_layers_explain_their_first_chunk_only(capsys):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))

    def run(x, ids, w):
        return moe.expert_parallel(
            lambda rows, _: rows,
            x,
            ids,
            w,
            num_experts=8,
            axis_name="x",
            num_chunks=4,
            explain=True,
        )

    fun = jax.shard_map(run, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"))
    jax.make_jaxpr(fun)(jnp.ones((64, 8)), jnp.ones((64, 1), int), jnp.ones((64, 1)))
    assert capsys.readouterr().out.count("schedule:") == 1


@pytest.mark.parametrize("peers", [False, True])
def test_starts_are_what_the_model_leaves_of_real_exchanges(monkeypatch, peers):
    asked = []

    def spent(devices, schedule, ids):
        asked.append((schedule, ids.shape))
        return 1e-3

    monkeypatch.setattr(_starts, "seconds_of_exchange", spent)
    near = links(peers=peers)
    found = _starts.measure(near, ["gpu0", "gpu1"])
    assert set(found) == ({"peer"} if peers else {"mail", "packed", "broadcast"})
    assert all(0.5e-3 < seconds < 1e-3 for seconds in found.values())
    if not peers:
        assert ("packed", (2, 256, 2)) in asked, "2 MiB: more than goes by mail"
        ids = _starts._ids(256, 2)
        again = choose(
            dataclasses.replace(near, starts=found),
            tokens_per_rank=256,
            top_k=2,
            expert_ids=ids,
        )
        assert again.seconds == pytest.approx({"packed": 1e-3, "broadcast": 1e-3})


def test_an_exchange_can_be_timed():
    devices = jax.devices()[:2]
    assert _starts.seconds_of_exchange(devices, "packed", _starts._ids(8, 2)) > 0
