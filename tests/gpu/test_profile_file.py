"""Profiles of other machines, old drivers and broken files are not used."""

import itertools
import json
import pathlib

import pytest
from gpu_programs import gpus

from jax_turbobus import _gpu_paths, _profile_file, profile, topology
from jax_turbobus._profile_file import PathRate, Profile
from jax_turbobus._version import __version__
from jax_turbobus.commands import top

A, B = "aaaa", "bbbb"


def make(**changes):
    fields = {
        "made_by": __version__,
        "driver": "580.1",
        "gpus": (A, B),
        "date": "2026-11-30T00:00:00+00:00",
        "block_bytes": 16 << 20,
        "yield_kind": "word",
        "paths": (PathRate(A, None, "h2d", 54e9), PathRate(A, B, "h2d", 53e9)),
        "groups": ((A, B),),
        "sweep": ({"block_bytes": 1, "bytes_per_s": 2.0, "yield": "none"},),
    }
    return Profile(**{**fields, **changes})


def test_what_was_saved_is_loaded(tmp_path):
    path = tmp_path / "deep" / "profile.json"
    _profile_file.save(make(), path)
    loaded, reason = _profile_file.load(path, driver="580.1", gpus=[B, A])
    assert loaded == make()
    assert not reason
    assert loaded.rate(A, B, "h2d") == 53e9
    assert loaded.rate(B, None, "h2d") is None
    assert loaded.is_one_group(A, B)


def test_a_process_that_sees_fewer_gpus_uses_it(tmp_path):
    path = tmp_path / "profile.json"
    _profile_file.save(make(), path)
    assert _profile_file.load(path, driver="580.1", gpus=[B])[0] is not None


@pytest.mark.parametrize(
    ("driver", "gpus", "reason"),
    [("590.0", [A, B], "driver"), ("580.1", [A, "cccc"], "cccc")],
)
def test_a_stale_or_foreign_profile_is_ignored_with_a_reason(
    tmp_path, driver, gpus, reason
):
    """https://github.com/vllm-project/vllm/issues/57555."""
    path = tmp_path / "profile.json"
    _profile_file.save(make(), path)
    loaded, why = _profile_file.load(path, driver=driver, gpus=gpus)
    assert loaded is None
    assert reason in why


@pytest.mark.parametrize("version", ["0.0.9", ""])
def test_a_profile_of_another_version_is_ignored_with_a_reason(tmp_path, version):
    path = tmp_path / "profile.json"
    _profile_file.save(make(made_by=version), path)
    loaded, why = _profile_file.load(path, driver="580.1", gpus=[A])
    assert loaded is None
    assert f"jax_turbobus {version or 'without a version'}, this is" in why


def broken_files():
    whole = json.dumps({"format": "jax_turbobus/profile", "version": 1})
    yield "cut", "{" + '"format": "jax_turbobus/pro'
    yield "empty", ""
    yield "list", "[]"
    yield "fields", whole
    yield "version", '{"format": "jax_turbobus/profile", "version": 99}'
    yield "binary", "\udcff"
    yield "deep", "[" * 200_000
    fields = '"driver": "1", "gpus": ["aaaa"], "date": "", "paths": []'
    yield "block", whole[:-1] + f', {fields}, "block_bytes": Infinity}}'


@pytest.mark.parametrize(("_", "text"), list(broken_files()))
def test_a_broken_file_is_ignored_with_a_reason(tmp_path, _, text):
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    loaded, why = _profile_file.load(path, driver="", gpus=[A])
    assert loaded is None
    assert str(path) in why


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), 10**400, "9"])
def test_impossible_rates_are_refused(tmp_path, rate):
    path = tmp_path / "profile.json"
    _profile_file.save(make(paths=(PathRate(A, None, "h2d", rate),)), path)
    assert _profile_file.load(path, driver="", gpus=[A])[0] is None


def test_a_missing_file_says_what_to_run(tmp_path):
    _, why = _profile_file.load(tmp_path / "none.json", driver="", gpus=[A])
    assert "python -m jax_turbobus profile" in why


def test_the_environment_names_another_file(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_TURBOBUS_PROFILE", str(tmp_path / "x.json"))
    assert _profile_file.default_path([A]) == tmp_path / "x.json"
    monkeypatch.delenv("JAX_TURBOBUS_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _profile_file.default_path([A, B]) == _profile_file.default_path([B, A])
    assert _profile_file.default_path([A]) != _profile_file.default_path([B])


def test_links_that_do_not_add_up_are_one_group():
    uuids = ["a", "b", "c", "d"]
    shares = dict.fromkeys(itertools.combinations(uuids, 2), 0.98) | {("a", "b"): 0.52}
    assert profile.link_groups(uuids, shares) == (("a", "b"),)
    shares["c", "d"] = 0.5
    assert profile.link_groups(uuids, shares) == (("a", "b"), ("c", "d"))
    shares["b", "c"] = 0.5
    assert profile.link_groups(uuids, shares) == (("a", "b", "c", "d"),)


def test_the_smallest_block_within_two_percent_is_taken():
    rates = {1: 40.0, 4: 53.2, 16: 54.0}
    assert profile.smallest_good_block(rates) == 4
    # Every kind of path counts.
    assert profile.smallest_good_block(rates, {1: 50.0, 4: 52.0, 16: 54.0}) == 16


class Links:
    """Two GPUs that share a link for what comes out, on which blocks pay otherwise."""

    def __init__(self):
        self.kinds = []

    def gpus(self):
        return [{"uuid": A}, {"uuid": B}]

    def settings(self):
        return {"block_bytes": 8 << 20}

    def stats(self):
        ways = ("h2d", "d2h")
        pairs = ((0, None), (0, 1), (1, None), (1, 0))
        return {
            "paths": [
                {"gpu": gpu, "relay": relay, "direction": way, "dropped": ""}
                for gpu, relay in pairs
                for way in ways
            ]
        }

    def yield_kind(self):
        return "word"

    def set_yield_kind(self, kind):
        self.kinds.append(kind)

    def measure(self, indices, size, block):
        paths = [self.stats()["paths"][i] for i in indices]
        share = 0.5 if [p["direction"] for p in paths] == ["d2h", "d2h"] else 1.0
        good = (4 << 20) if paths[0]["relay"] is None else (8 << 20)
        rate = 50e9 * (1.0 if block >= good else 0.7)
        rate *= 1.0 if self.kinds[-1] == "word" else 0.9
        return [share * rate] * len(paths)


def test_what_links_do_is_found(monkeypatch):
    library = Links()
    monkeypatch.setattr(profile._ffi, "cuda", lambda: library)
    monkeypatch.setattr(profile.gpu, "engine", lambda: object())
    monkeypatch.setattr(profile, "_exchange", lambda *_: (None, "not asked"))
    found = profile.measure(repeats=1)
    # They add up inwards, not outwards: neither helps the other.
    assert found.groups == ((A, B),)
    # Own links would do with 4 MiB.
    assert (found.block_bytes, found.yield_kind) == (8 << 20, "word")
    assert {row["path"] for row in found.sweep if "path" in row} == {
        "h2d",
        "d2h",
        "h2d relayed",
        "d2h relayed",
    }
    assert library.kinds[-1] == "word"
    assert all(rate.bytes_per_s == pytest.approx(50e9) for rate in found.paths)
    assert len(found.paths) == 8


def test_a_rate_leaves_out_what_starting_and_ending_take():
    def rate_of(size):
        return size / (size / 50e9 + 100e-6)

    small, large = 256 << 20, 512 << 20
    found = profile.slope(small, rate_of(small), large, rate_of(large))
    assert found == pytest.approx(50e9)
    # Noise: the larger one seems to have taken no longer, or as good as.
    assert profile.slope(small, 20e9, large, 45e9) == 45e9
    assert profile.slope(small, 30e9, large, 45e9) == pytest.approx(1.1 * 45e9)


@pytest.mark.skipif(bool(gpus()), reason="there are GPUs")
def test_without_gpus_there_is_nothing_to_measure():
    with pytest.raises(ValueError, match="no CUDA device"):
        profile.measure()


def test_top_finds_who_lends_a_gpu(tmp_path):
    lock = tmp_path / f"jax_turbobus-lender-{A}.lock"
    lock.touch()
    inode = lock.stat().st_ino
    locks = f"1: FLOCK  ADVISORY  WRITE 4711 08:01:{inode} 0 EOF\n2: POSIX x\n"
    assert top.lenders(locks, pathlib.Path(tmp_path)) == {A: 4711}
    assert top.lenders("", pathlib.Path(tmp_path)) == {}


def test_top_draws_a_line_a_gpu():
    samples = [top.Sample(0, "H200", 32e9, 0.0, 64e9, None, 7)]
    heading, line = top.table(samples)
    assert "NVLink" in heading
    assert line.count("█") == 10
    assert "process 7" in line


def _given_topology(tmp_path, uuids):
    # gpu0 and gpu1 of the shipped machine, with UUIDs.
    content = json.loads(topology.Topology.load("2xh200").to_json())
    for one, uuid in zip(content["gpus"], uuids, strict=True):
        one["uuid"] = uuid
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_given_topology_is_told_apart_by_uuid(monkeypatch, tmp_path):
    path = _given_topology(tmp_path, ["GPU-BBBB", "GPU-AAAA"])
    monkeypatch.setenv("JAX_TURBOBUS_TOPOLOGY", path)
    remarks = []
    rates, _ = _gpu_paths.estimated([A, B, "cccc"], remarks)
    assert remarks == []
    assert {key for key in rates if key[2] == "h2d"} == {
        (0, None, "h2d"),
        (0, 1, "h2d"),
        (1, None, "h2d"),
        (1, 0, "h2d"),
    }
    assert all(rate > 50e9 for rate in rates.values())


def test_a_given_topology_must_not_name_gpus_that_are_not_there(monkeypatch, tmp_path):
    path = _given_topology(tmp_path, ["GPU-AAAA", "GPU-dddd"])
    monkeypatch.setenv("JAX_TURBOBUS_TOPOLOGY", path)
    with pytest.raises(ValueError, match=r"'gpu1' with UUID 'GPU-dddd'.* aaaa, bbbb"):
        _gpu_paths.estimated([A, B], [])


def test_a_topology_without_uuids_is_for_cpu_devices(monkeypatch):
    monkeypatch.setenv("JAX_TURBOBUS_TOPOLOGY", "2xh200")
    remarks = []
    _gpu_paths.estimated([A, B], remarks)
    assert any("CPU devices only" in remark for remark in remarks)
