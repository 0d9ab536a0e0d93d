"""`topo` and `doctor` as a user runs them."""

import json
import re
import subprocess
import sys

import pytest

import jax_turbobus
import jax_turbobus.moe
from jax_turbobus.__main__ import main
from jax_turbobus.topology import Topology, names


def test_topo_prints_links_pairs_groups_and_pooled_rates(capsys):
    assert main(["topo", "dgx-v100"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"uplink0 +numa0 - plx0 +PCIe 3.0 x16 +12.3 +12.9", out)
    assert re.search(r"gpu0 +\. +nvlink 24.5 +by gpu3 49.0 +nvlink 49.0", out)
    assert re.search(r"gpu0\+gpu1 +gpu0, gpu1 +12.3 +12.9", out)
    assert re.search(r"gpu0 +12.3 +24.6 +2.00x +12.9 +25.8 +2.00x +gpu2, gpu3", out)


def test_topo_marks_degraded_links(capsys):
    assert main(["topo", "4xrtx4090"]) == 0
    lines = capsys.readouterr().out.splitlines()
    degraded = [line for line in lines if "DEGRADED" in line]
    assert len(degraded) == 1
    assert "PCIe 4.0 x4 of x16" in degraded[0]


def test_topo_of_this_machine_says_something_sensible(capsys):
    assert main(["topo"]) == 0
    out = capsys.readouterr().out
    assert "Host memory: numa0" in out
    assert "GPUs: none" in out or "gpu0" in out


@pytest.mark.parametrize("name", [None, *names()])
def test_topo_json_is_a_file_that_loads(capsys, tmp_path, name):
    assert main(["topo", "--json", *([name] if name else [])]) == 0
    (tmp_path / "t.json").write_text(capsys.readouterr().out)
    topology = Topology.load(tmp_path / "t.json")
    if name:
        assert topology == Topology.load(name)
    assert main(["topo", str(tmp_path / "t.json")]) == 0


@pytest.mark.parametrize("content", ["", "{", '{"format": 3}', "\0\xff"])
def test_topo_of_a_bad_file_is_one_line_and_exit_status_2(capsys, tmp_path, content):
    (tmp_path / "bad.json").write_text(content, encoding="latin-1")
    assert main(["topo", str(tmp_path / "bad.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: topology ")
    assert error.count("\n") == 1
    assert "bad.json" in error


def test_topo_of_an_unknown_name_lists_those_there_are(capsys):
    assert main(["topo", "h100"]) == 2
    assert "2xh200, 4xrtx4090" in capsys.readouterr().err


def test_doctor_finds_nothing_broken_here(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("every bit right") == 2
    assert "expert exchange over 8 device(s)" in out
    assert "pinned_host" in out
    assert "/dev/shm" in out
    assert "BROKEN" not in out


def test_doctor_json_holds_the_same_findings(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"status", "text", "hint"} == set(findings[0])
    assert all(f["status"] in ("ok", "note", "warn", "broken") for f in findings)


def test_doctor_reports_what_fails_and_goes_on(capsys, monkeypatch):
    def fails(*args):
        raise RuntimeError("no bits today\nmore")

    monkeypatch.setattr("jax_turbobus.to_device", fails)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN round trip: RuntimeError: no bits today\n" in out
    assert "/dev/shm" in out


def test_doctor_passes_on_what_to_do_when_the_core_is_missing(capsys, monkeypatch):
    def missing():
        raise ImportError(
            "jax_turbobus: the C++ core is not built; run `pip install .`"
        )

    monkeypatch.setattr("jax_turbobus._ffi.core", missing)
    assert main(["doctor"]) == 1
    assert "BROKEN software: ImportError: jax_turbobus: the" in capsys.readouterr().out


def test_doctor_sees_wrong_bits(capsys, monkeypatch):
    monkeypatch.setattr("jax_turbobus.to_device", lambda x: x * 0)
    monkeypatch.setattr("jax_turbobus.to_host", lambda x: x)
    assert main(["doctor"]) == 1
    assert "words wrong" in capsys.readouterr().out


def test_doctor_says_when_pooling_is_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("JAX_TURBOBUS_DISABLE", "1")
    assert main(["doctor"]) == 0
    assert "because JAX_TURBOBUS_DISABLE is set" in capsys.readouterr().out


def test_doctor_says_over_which_links_transfers_go(capsys):
    with jax_turbobus.configured(topology="8xh800"):
        assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "transfers: pooled over the links of '8xh800'" in out
    assert out.count("every bit right") == 2


def test_doctor_sees_tokens_that_come_back_wrong(capsys, monkeypatch):
    real = jax_turbobus.moe.combine
    monkeypatch.setattr(
        "jax_turbobus.moe.combine", lambda rows, state: real(rows * 2, state)
    )
    assert main(["doctor"]) == 1
    assert re.search(r"BROKEN expert exchange.*: 25\d of 256", capsys.readouterr().out)


@pytest.mark.slow
def test_the_commands_run_in_a_process_of_their_own():
    for command, status in (["doctor"], 0), (["topo", "x"], 2):
        done = subprocess.run(
            [sys.executable, "-m", "jax_turbobus", *command],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == status, done.stderr
        # JAX's own plugins may complain there about a missing GPU.
        assert "jax_turbobus/" not in done.stderr
