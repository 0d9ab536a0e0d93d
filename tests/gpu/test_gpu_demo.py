"""The demo on GPUs: what it prints, counts and leaves."""

import json
import re
import subprocess
import sys

import pytest
from gpu_programs import PLATFORM, environment, gpus

pytestmark = pytest.mark.slow

STEPS = 3


def run_demo(folder, *arguments):
    """Returns what a short run printed, and its figures."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jax_turbobus", "demo", "--steps", str(STEPS)),
            *("--out", str(folder / "out"), "--json", str(folder / "figures.json")),
            *arguments,
        ],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout, json.loads((folder / "figures.json").read_text())


def assert_moments_moved(printed, figures):
    """All of Adam's moments came in and went out, over links of GPUs."""
    (kind,) = {device.device_kind for device in gpus()}
    assert f"devices   {figures['devices']} x {kind}" in printed
    mib = float(re.search(r"on host +([\d.]+) MiB of Adam's moments", printed)[1])
    ways = (r"pcie gpu\d+ h2d", r"pcie gpu\d+ d2h")
    if PLATFORM == "cpu":
        ways = (r"(memory|pcie)\d+ numa0>\S+", r"(memory|pcie)\d+ \S+>numa0")
    for way in ways:
        links = figures["bytes_by_link"].items()
        moved = [size for name, size in links if re.fullmatch(way, name)]
        assert sum(moved) == pytest.approx(STEPS * mib * 2**20, rel=0.01), links


@pytest.mark.gpu
def test_one_gpu_trains_and_counts_what_crossed_its_link(tmp_path):
    printed, figures = run_demo(tmp_path, "--devices", "1")
    assert figures["devices"] == 1
    assert figures["eval_loss_last"] < figures["eval_loss_first"]
    assert_moments_moved(printed, figures)
    assert (tmp_path / "out" / "loss.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.multigpu
def test_own_links_are_compared_with_all_links(tmp_path):
    emulation = ["--emulate", "2xh200"] if PLATFORM == "cpu" else []
    printed, figures = run_demo(tmp_path, "--devices", "2", *emulation)
    assert_moments_moved(printed, figures)
    assert figures["bytes_by_peer"]["turbobus"] > 0
    whose = "emulated links" if emulation else "this machine's links"
    assert re.search(rf"the same \d+ MiB a device over {whose}, best of \d", printed)
    for who in ("device 0 alone", "all 2 devices at once"):
        for where in ("to the device", "to the host"):
            row = re.search(rf"{who}, {where} +([\d.]+) ms +([\d.]+) ms", printed)
            assert float(row[1]) > 0
            assert float(row[2]) > 0
    for mode in ("direct", "pooled"):
        trace = json.loads((tmp_path / "out" / f"trace-{mode}.json").read_text())
        assert any(event.get("cat") == "block" for event in trace["traceEvents"])
    assert (tmp_path / "out" / "pooling.png").read_bytes()[1:4] == b"PNG"
