"""What a profile says of exchanges is kept, checked, used, and may be missing."""

import json
import types

import jax
import pytest
from gpu_programs import run_python

from jax_turbobus import __main__, _ffi, _measure_exchange, _profile_file, gpu, profile
from jax_turbobus._profile_exchange import Exchange, PairRate
from jax_turbobus._profile_file import PathRate, Profile
from jax_turbobus._version import __version__
from jax_turbobus.commands import _findings
from jax_turbobus.commands import profile as command
from jax_turbobus.moe import _measured, _starts

A, B = "aaaa", "bbbb"
MIB = 1 << 20


def exchange(**changes):
    fields = {
        "num_slots": 2,
        "slot_bytes": 8 * MIB,
        "pairs": (PairRate(A, B, "host", 45e9), PairRate(B, A, "host", 44e9)),
        "starts": {"mail": 1e-4, "packed": 3e-4, "broadcast": 2e-4},
        "sweep": ({"num_slots": 2, "slot_bytes": 8 * MIB, "bytes_per_s": 45e9},),
        "remarks": ("a remark",),
    }
    return Exchange(**(fields | changes))


def make(part):
    return Profile(
        made_by=__version__,
        driver="580.1",
        gpus=(A, B),
        date="2026-11-30T00:00:00+00:00",
        block_bytes=16 * MIB,
        yield_kind="word",
        paths=(PathRate(A, None, "h2d", 54e9),),
        groups=(),
        exchange=part,
        why_no_exchange="" if part else "no room",
    )


def kept(tmp_path, part):
    path = tmp_path / "profile.json"
    _profile_file.save(make(part), path)
    return path


def load(path):
    return _profile_file.load(path, driver="580.1", gpus=[A, B])


def test_what_was_measured_of_exchanges_is_loaded(tmp_path):
    found, reason = load(kept(tmp_path, exchange()))
    assert not reason
    assert found == make(exchange())
    assert not found.why_no_exchange
    assert found.exchange.rate(B, A, "host") == 44e9
    assert found.exchange.rate(B, A, "peer") is None


def test_an_older_file_serves_offload_and_says_so(tmp_path):
    path = kept(tmp_path, exchange())
    content = json.loads(path.read_text())
    del content["exchange"], content["why_no_exchange"]
    path.write_text(json.dumps(content))
    found, reason = load(path)
    assert not reason
    assert found.rate(A, None, "h2d") == 54e9
    assert found.exchange is None
    assert "older than such measurements" in found.why_no_exchange
    assert "jax_turbobus profile` again" in found.why_no_exchange


def test_a_file_keeps_why_nothing_was_measured(tmp_path):
    found, _ = load(kept(tmp_path, None))
    assert found.exchange is None
    assert "(no room)" in found.why_no_exchange


@pytest.mark.parametrize(
    "damage",
    [
        {"num_slots": 0},
        {"num_slots": 65},
        {"num_slots": True},
        {"num_slots": "2"},
        {"slot_bytes": 4095},
        {"slot_bytes": 2.5},
        {"pairs": [{"source": A}]},
        {"pairs": [{"source": A, "reader": B, "path": "air", "bytes_per_s": 1.0}]},
        {"pairs": [{"source": A, "reader": B, "path": "host", "bytes_per_s": 0}]},
        {"pairs": [{"source": A, "reader": B, "path": "host", "bytes_per_s": "x"}]},
        {"pairs": [{"source": A, "reader": B, "path": "host", "bytes_per_s": 10**400}]},
        {"pairs": [{"source": None, "reader": B, "path": "host", "bytes_per_s": 1}]},
        {"pairs": None},
        {"starts": {"mail": -1.0}},
        {"starts": {"mail": float("nan")}},
        {"starts": {"mail": 10**400}},
        {"starts": {"pigeon": 1.0}},
        {"starts": [1]},
        {"sweep": [1]},
        {"remarks": 3},
    ],
    ids=lambda damage: str(damage)[:60],
)
def test_a_damaged_part_is_ignored_and_the_rest_used(tmp_path, damage):
    path = kept(tmp_path, exchange())
    content = json.loads(path.read_text())
    content["exchange"].update(damage)
    path.write_text(json.dumps(content))
    found, reason = load(path)
    assert not reason
    assert found.rate(A, None, "h2d") == 54e9
    assert found.exchange is None
    assert "damaged" in found.why_no_exchange
    assert str(path) in found.why_no_exchange


@pytest.mark.parametrize("part", [7, "x", [], {}, False], ids=repr)
def test_a_part_of_another_kind_is_damaged(tmp_path, part):
    path = kept(tmp_path, exchange())
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"exchange": part}))
    assert load(path)[0].exchange is None


def test_the_least_memory_within_two_percent_is_taken():
    # On 2 x H200: docs/gpu_exchange_packed.md.
    table = {
        (2, 1): 32.2, (2, 2): 39.1, (2, 4): 42.7, (2, 8): 45.5,
        (3, 1): 37.3, (3, 2): 42.6, (3, 4): 44.5, (3, 8): 45.5,
        (4, 1): 37.6, (4, 2): 42.7, (4, 4): 45.0, (4, 8): 40.6,
    }  # fmt: skip
    slots = _measure_exchange.smallest_good_slots
    assert slots(table) == (2, 8), "as fast as 4 x 4 or faster, in the same memory"
    assert slots(table | {(3, 4): 44.7}) == (3, 4)
    assert slots({(2, 1): 1.0}) == (2, 1)


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_every_pair_meets_once_and_every_gpu_works_both_ways(number):
    rounds = _measure_exchange.rounds_of(number)
    for ways in rounds:
        for end in (0, 1):
            assert sorted(way[end] for way in ways) == list(range(number))
    ways = [way for one in rounds for way in one]
    if number > 1:
        assert len(set(ways)) == len(ways) == number * (number - 1)
        assert all(a != b for a, b in ways)


class Library:
    """Two GPUs that move bytes at a rate by slots, after a start."""

    most_mailed_bytes = MIB
    start_s = 1e-5

    def __init__(self, peers=False, slots=(3, 4 * MIB)):
        self.peers = peers
        self.slots = slots
        self.asked = []

    def gpus(self):
        return [{"uuid": A}, {"uuid": B}]

    def can_access_peer(self, a, b):
        return self.peers

    def exchange_slots(self):
        return self.slots

    def set_measured_slots(self, number, size):
        self.slots = (number, size)

    def time_ways(self, ways, size, number, slot, repeats):
        self.asked.append((tuple(ways), size, number, slot, repeats))
        rate = 400e9 if ways[0][2] == "peer" else 45e9 * (1 - 0.2 * MIB / slot)
        return [self.start_s + size / rate for _ in ways]


@pytest.mark.parametrize("peers", [False, True])
def test_two_gpus_are_measured_both_ways_at_once(monkeypatch, peers):
    library = Library(peers)
    measured = []
    monkeypatch.setattr(
        _measure_exchange._starts,
        "measure",
        lambda links, devices: measured.append(links) or {"mail": 1.0},
    )
    found = _measure_exchange.measure(library, [0, 1], repeats=2)
    # 8 MiB reach 97.5 % of 45 GB/s, 4 MiB 95 %.
    assert (found.num_slots, found.slot_bytes) == library.slots == (2, 8 * MIB)
    assert len(found.sweep) == 12
    assert {(p.source, p.reader) for p in found.pairs} == {(A, B), (B, A)}
    assert found.rate(A, B, "host") == pytest.approx(44e9, rel=0.02)
    assert (found.rate(A, B, "peer") is not None) == peers
    assert all(len(ways) == 2 for ways, *_ in library.asked)
    assert found.starts == {"mail": 1.0}
    (links,) = measured
    assert links.has_peer_access == peers
    assert links.rates[0, 1] == found.rate(A, B, "peer" if peers else "host")
    assert any("host memory start" in remark for remark in found.remarks) == peers


def test_fewer_devices_than_gpus_are_no_reason_to_fail():
    found = _measure_exchange.measure(Library(), [0], repeats=1)
    assert found.starts == {}
    assert any("JAX uses 1 of 2 GPUs" in remark for remark in found.remarks)


def test_exchanges_that_fail_leave_slots_and_rates(monkeypatch):
    def fail(links, devices):
        raise RuntimeError("rank 1 did not come")

    monkeypatch.setattr(_measure_exchange._starts, "measure", fail)
    found = _measure_exchange.measure(Library(), [0, 1], repeats=1)
    assert found.starts == {}
    assert len(found.pairs) == 2
    assert any("rank 1 did not come" in remark for remark in found.remarks)


def test_rings_take_the_measured_slots_unless_the_environment_says_so(monkeypatch):
    monkeypatch.delenv("JAX_TURBOBUS_EXCHANGE_SLOTS", raising=False)
    monkeypatch.delenv("JAX_TURBOBUS_EXCHANGE_SLOT_BYTES", raising=False)
    library = Library()
    found = make(exchange())
    assert not gpu._use_exchange(library, found, "")
    assert library.slots == (2, 8 * MIB)
    engine = gpu.Engine(library, (), found, "")
    monkeypatch.setenv("JAX_TURBOBUS_EXCHANGE_SLOT_BYTES", " ")  # as if not set
    assert engine.slots() == (2, 8 * MIB, f"the profile of {found.date}")
    monkeypatch.setenv("JAX_TURBOBUS_EXCHANGE_SLOTS", "5")
    assert engine.slots()[2].startswith("JAX_TURBOBUS_EXCHANGE_SLOTS; the profile of")
    monkeypatch.setenv("JAX_TURBOBUS_EXCHANGE_SLOT_BYTES", "65536")
    assert "profile" not in engine.slots()[2]


def test_without_figures_rings_keep_the_default_and_say_why():
    library = Library()
    assert gpu._use_exchange(library, None, "no file") == "no file"
    assert gpu._use_exchange(library, make(None), "") == "no room"
    assert library.slots == (3, 4 * MIB)
    engine = gpu.Engine(library, (), None, "no file")
    assert engine.slots()[2] == "the default: no file"


def links_of(part, **changes):
    return _measured.links_of(Library(**changes), part, "the profile")


def test_doctor_says_which_figures_exchanges_go_by():
    links, why = links_of(exchange())
    slots = (2, 8 * MIB, "the profile of today")
    text = "\n".join(c.text for c in _findings.exchange_checks(slots, links, why))
    assert "2 slots of 8.0 MiB a pair (the profile of today)" in text
    assert "chosen by the profile" in text
    (_, note) = _findings.exchange_checks(slots, *links_of(exchange(), peers=True))
    assert note.status == "note"
    assert "no rate from GPU 0 to GPU 1 (peer)" in note.text


def test_the_command_prints_all_of_it(capsys):
    command._show(make(exchange()))
    text = capsys.readouterr().out
    assert "exchange by 2 slots of 8 MiB    45.0 GB/s each way" in text
    assert "gpu0 to gpu1, all at once, through host memory    45.0 GB/s" in text
    assert "an exchange (broadcast) takes 200 us beside its bytes" in text
    assert "rings of 2 slots of 8 MiB" in text
    assert "a remark" in text
    command._show(make(None))
    assert "exchanges were not measured: no room" in capsys.readouterr().out


def test_a_measuring_that_fails_leaves_the_rest(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no 64 bytes")

    monkeypatch.setattr(_measure_exchange, "measure", fail)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    assert profile._exchange(types.SimpleNamespace(), print) == (None, "no 64 bytes")


@pytest.mark.gpu
def test_one_gpu_measures_what_it_can(gpu):
    library = _ffi.cuda()
    before = library.exchange_slots()
    found = _measure_exchange.measure(library, jax.local_devices(), repeats=2)
    assert library.exchange_slots() == (found.num_slots, found.slot_bytes)
    library.set_measured_slots(*before)
    assert len(found.sweep) == 12
    for row in found.sweep:
        assert 1e8 < row["bytes_per_s"] < 1e12
    best = max(row["bytes_per_s"] for row in found.sweep)
    assert all(pair.bytes_per_s > 0.3 * best for pair in found.pairs)
    devices = jax.local_devices()
    ids = _starts._ids(16, len(devices))
    # The difference between two times: nothing, on a GPU that others use as well.
    assert 0 <= _starts.seconds_of_exchange(devices, "packed", ids) < 1
    if len(library.gpus()) == 1:
        assert found.starts == {}
        assert any("there is one GPU" in remark for remark in found.remarks)
    else:
        assert all(seconds > 0 for seconds in found.starts.values())


@pytest.mark.gpu
def test_the_command_keeps_what_the_next_process_uses(gpu, tmp_path):
    path = tmp_path / "profile.json"
    environment = {"JAX_TURBOBUS_PROFILE": str(path)}
    run_python(
        "from jax_turbobus.__main__ import main\n"
        "assert main(['profile', '--size-mib', '32']) == 0",
        **environment,
    )
    part = json.loads(path.read_text())["exchange"]
    ask = (
        "import jax, jax_turbobus\n"
        "from jax_turbobus import _ffi, gpu\n"
        "_ffi.register()\n"
        "print(*gpu.engine().slots())"
    )
    used = run_python(ask, **environment)
    assert f"{part['num_slots']} {part['slot_bytes']} the profile of" in used
    used = run_python(ask, JAX_TURBOBUS_EXCHANGE_SLOTS="5", **environment)
    assert f"5 {part['slot_bytes']} JAX_TURBOBUS_EXCHANGE_SLOTS; the pro" in used
    refused = run_python(
        "from jax_turbobus import _ffi, gpu\n"
        "_ffi.register()\n"
        "try:\n    gpu.engine().slots()\n"
        "except ValueError as error:\n    print(error)",
        JAX_TURBOBUS_EXCHANGE_SLOTS="many",
        **environment,
    )
    assert "JAX_TURBOBUS_EXCHANGE_SLOTS: expected a number from 1 to 64" in refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size-mib", "0"], "profile: --size-mib: expected a whole number from 1"),
        (["--output", "."], "profile: --output: expected a file that can be written"),
    ],
)
def test_a_wrong_option_is_told_of_before_anything_is_measured(
    capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr(profile, "measure", lambda **_: pytest.fail("measured"))
    assert __main__.main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_figures_that_cannot_be_kept_are_shown_all_the_same(
    capsys, monkeypatch, tmp_path
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_TURBOBUS_PROFILE", str(tmp_path / "file" / "profile.json"))
    monkeypatch.setattr(profile, "measure", lambda **_: make(None))
    assert __main__.main(["profile"]) == 2
    printed = capsys.readouterr()
    assert "54.0 GB/s" in printed.out
    assert "profile: cannot be kept" in printed.err
    assert "--output" in printed.err
