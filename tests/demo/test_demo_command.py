"""`python -m jax_turbobus demo` as a user meets it: output, files, errors."""

import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jax_turbobus import __main__
from jax_turbobus.commands import demo
from jax_turbobus.demo import backends, model, options, session
from jax_turbobus.demo.train import TrainConfig

ROOT = pathlib.Path(__file__).parent.parent.parent
KEYS = {
    "eval_loss_first",
    "eval_loss_last",
    "seconds",
    "tokens_per_s",
    "backend",
    "devices",
    "bytes_by_link",
    "bytes_by_peer",
}


def short(folder, backend, **changes):
    values = {
        "backend": backend,
        "num_devices": 4,
        "out": folder / "out",
        "json": folder / "figures.json",
        "sample_bytes": 8,
        "model": model.ModelConfig(
            num_layers=1, hidden=32, num_heads=2, expert_hidden=48, context=32
        ),
        "train": TrainConfig(num_steps=6, batch=8, eval_every=3, eval_batches=1),
    }
    return options.Options(**{**values, **changes})


@pytest.mark.parametrize("backend", sorted(backends.BACKENDS))
def test_run_reports_figures_and_leaves_pictures(tmp_path, backend):
    stdout = io.StringIO()
    figures = session.run(short(tmp_path, backend), stdout)
    assert figures == json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == KEYS
    assert figures["eval_loss_first"] == pytest.approx(np.log(256), abs=1e-3)
    assert figures["eval_loss_last"] < figures["eval_loss_first"]
    assert figures["backend"] == backend
    assert figures["devices"] == 4
    peers = figures["bytes_by_peer"]
    # So small an exchange may be broadcast, which moves as much as all-gather.
    assert 0 < peers["turbobus"] <= peers["allgather_filter"]
    assert peers["allgather_filter"] < peers["padded_all_to_all"]
    assert min(figures["bytes_by_link"].values()) > 0
    printed = stdout.getvalue()
    assert "  | def" in printed
    assert "all-gather + filter" in printed
    for name in ("loss.png", "links.png")[: 2 if backend == "turbobus" else 1]:
        assert (tmp_path / "out" / name).read_bytes()[1:4] == b"PNG"


def test_emulated_run_shows_direct_beside_pooled(tmp_path):
    stdout = io.StringIO()
    chosen = short(tmp_path, "turbobus", emulate="2xh200", num_devices=None)
    figures = session.run(chosen, stdout)
    assert figures["devices"] == 2
    links = figures["bytes_by_link"]
    # Host transfers and the exchange, on the machine's own links.
    assert links["pcie0 numa0>gpu0"] > 0
    assert links["nvlink0-1 gpu0>gpu1"] > 0
    printed = stdout.getvalue()
    assert "emulated: 2xh200" in printed
    assert re.search(r"device 0 alone, to the device +[\d.]+ ms +[\d.]+ ms", printed)
    for name in ("links.png", "pooling.png"):
        assert (tmp_path / "out" / name).read_bytes()[1:4] == b"PNG"
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]


def error_of(capsys, *arguments):
    assert __main__.main(["demo", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "demo: --text: cannot read nowhere.txt: No such"),
        (["--steps", "0"], "demo: --steps: expected at least 1, got 0"),
        (["--devices", "-1"], "demo: --devices: expected at least 1, got -1"),
        (["--devices", "3"], "demo: --devices: expected one of 1, 2, 4, 8"),
        (["--seed", "-1"], "demo: --seed: expected 0 or more, got -1"),
        (["--emulate", "nowhere"], "nowhere"),
        (["--emulate", "cpu"], "demo: --emulate: cpu has no GPUs"),
        (["--emulate", "2xh200", "--devices", "4"], "--devices: expected one of 1, 2 "),
        (
            ["--emulate", "2xh200", "--backend", "reference"],
            "demo: --emulate: expected --backend turbobus, got reference",
        ),
    ],
)
def test_bad_arguments_are_named(capsys, tmp_path, arguments, message):
    assert message in error_of(capsys, *arguments, "--out", tmp_path)


def test_no_more_cpu_devices_are_made_than_can_be_used(capsys, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(demo, "_make_cpu_devices", made.append)
    error = error_of(capsys, "--devices", "100000", "--out", tmp_path)
    assert "demo: --devices: expected one of 1, 2, 4, 8" in error
    assert made == [8]


def test_out_that_is_a_file_is_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in error_of(capsys, "--out", tmp_path / "file")


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_what_the_system_refuses_to_make_is_named(capsys, tmp_path, option):
    (tmp_path / "text").write_text("some words " * 4000)
    options = {"--out": tmp_path, "--text": tmp_path / "text", option: "/proc/x"}
    words = [str(word) for pair in options.items() for word in pair]
    assert f"demo: {option}: " in error_of(capsys, *words)


def test_unknown_backend_is_refused_with_the_choices(capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["demo", "--backend", "magic"])
    assert stopped.value.code == 2
    assert "'turbobus', 'reference'" in capsys.readouterr().err


def test_missing_extra_says_what_to_install(capsys, monkeypatch):
    real = __import__("importlib").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda n, *a: None if n == "optax" else real(n, *a)
    )
    assert "needs optax; run: pip install" in error_of(capsys)


@pytest.mark.slow
def test_interrupt_ends_it_without_a_traceback(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    # A shell lets what it starts in the background ignore SIGINT, us too.
    code = (
        "import runpy, signal, sys; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.argv[1:] = ['demo', '--out', sys.argv[1]]; "
        "runpy.run_module('jax_turbobus', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = ""
        while not line.startswith("backend"):  # told before the first step
            line = process.stdout.readline()
            assert line, process.stderr.read()
            if line.startswith("devices"):
                assert re.search(r"devices +4 x", line)  # without XLA_FLAGS
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "demo: interrupted" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--out", "--out: expected a folder that can be made or written to, got '"),
        ("--json", "is no folder; give another file"),
    ],
)
def test_results_that_could_not_be_written_are_refused_before_the_training(
    option, message, tmp_path, capsys
):
    file = tmp_path / "file"
    file.touch()
    assert __main__.main(["demo", option, str(file / "x")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"demo: {option}: ")
    assert message in error
