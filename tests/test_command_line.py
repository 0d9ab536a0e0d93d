"""`python -m jax_turbobus` as a newcomer types it."""

import os
import subprocess
import sys

import pytest

import jax_turbobus
from jax_turbobus.__main__ import main
from jax_turbobus.commands import COMMANDS
from jax_turbobus.commands.bench import SUITES


def printed(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("argv", [[], ["--help"]], ids=["nothing", "help"])
def test_commands_are_listed(argv, capsys):
    text = printed(argv, capsys)
    for name, (_, line) in COMMANDS.items():
        assert f"{name} {line}" in text


def test_version(capsys):
    text = printed(["--version"], capsys)
    assert text == f"jax_turbobus {jax_turbobus.__version__}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_names_no_empty_default(name, capsys):
    text = printed([name, "--help"], capsys)
    for default in ("None", "False", ")", "[]"):
        assert f"(default: {default}" not in text


@pytest.mark.parametrize("suite", SUITES)
def test_help_of_a_suite_tells_its_options(suite, capsys):
    assert "--no-check" in printed(["bench", suite, "--help"], capsys)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["volume"], "ranks that share experts (default: 4)"),
        (["sim"], "neighbours: 64 GiB to GPU 0"),
        (["demo"], "of weights and batches (default: 0)"),
        (["bench", "offload"], "measured rounds (default: 11)"),
        (["bench", "placement"], "(default: 4xrtx4090,8xh800)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_help_tells_defaults(argv, expected, capsys):
    assert expected in printed([*argv, "--help"], capsys)


def test_help_of_the_demo_knows_how_many_steps_there_are(capsys):
    train = pytest.importorskip("jax_turbobus.demo.train")
    steps = train.TrainConfig().num_steps
    assert f"updates to make (default: {steps})" in printed(["demo", "--help"], capsys)


@pytest.mark.parametrize("argv", [["volume"], ["demo", "--steps", "1"]])
def test_a_reader_that_has_seen_enough_is_no_error(argv, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "jax_turbobus", *argv],
            stdout=nobody,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            text=True,
            timeout=60,
        )
    assert done.returncode == 141
    assert "roken" not in done.stderr


def test_experts_are_found_at_the_top():
    assert "moe" in jax_turbobus.__all__
    assert jax_turbobus.moe.dispatch
