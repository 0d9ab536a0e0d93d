"""What README shows runs as written, and what it points at is there."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.M | re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def run(code):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_there_is_a_moe_example_of_twenty_lines_and_an_offload_one_of_ten():
    lines = [sum(bool(line.strip()) for line in code.splitlines()) for code in PYTHON]
    assert len(lines) == 2
    assert lines[0] <= 20
    assert lines[1] <= 10


@pytest.mark.parametrize(
    ("code", "printed"),
    [(PYTHON[0], "(1024, 64) (16, 64, 128)\n"), (PYTHON[1], "pinned_host -0.001\n")],
    ids=["moe", "offload"],
)
def test_example_runs_as_written(code, printed):
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_commands_are_those_that_ci_runs():
    commands = [code.strip() for language, code in BLOCKS if language == "sh"]
    assert commands == [
        "pip install '.[demo]' && python -m jax_turbobus demo",
        "pip install '.[test]' && python -m pytest",
    ]


def test_links_lead_to_files_that_are_there():
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    assert len(targets) > 5
    for target in targets:
        assert (ROOT / target).exists(), target


def test_named_subcommands_exist():
    from jax_turbobus.commands import COMMANDS

    for name in re.findall(r"python -m jax_turbobus (\w+)", README):
        assert name in COMMANDS, name
