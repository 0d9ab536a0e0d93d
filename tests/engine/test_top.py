"""`python -m jax_turbobus top` sees what other processes move, live."""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jax_turbobus
from jax_turbobus.commands import _live_pages, doctor, top

pytestmark = pytest.mark.usefixtures("folder")

ROOT = pathlib.Path(__file__).parent.parent.parent
# Moves 8 MiB over and over; "ready" comes after the first time, with its page.
MOVES = """
import sys, jax, jax.numpy as jnp, jax_turbobus
host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
x = jax.device_put(jnp.zeros(2 << 20), host)
move = jax.jit(lambda x: jax_turbobus.to_device(x) * 2)
if sys.argv[1] == "emulated":
    jax_turbobus.configure(
        topology="2xh200", emulate=True, rate_scale=0.002, block_bytes=1 << 20)
move(x).block_until_ready()
print("ready", flush=True)
while True:
    move(x).block_until_ready()
"""


def run_top(capsys, *arguments):
    parser = argparse.ArgumentParser()
    top.add_arguments(parser)
    assert top.run(parser.parse_args(arguments)) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "option", ["--interval=nan", "--interval=inf", "--interval=-1", "--count=-1"]
)
def test_an_option_that_cannot_be_is_named(capsys, option):
    parser = argparse.ArgumentParser()
    top.add_arguments(parser)
    assert top.run(parser.parse_args([option, "--json"])) == 2
    printed = capsys.readouterr()
    assert f"top: {option.partition('=')[0]}: expected" in printed.err
    assert not printed.out


def updates(capsys, count=2):
    out = run_top(capsys, "--json", "--count", str(count), "--interval", "0.4")
    return [json.loads(line) for line in out]


@pytest.fixture
def moving():
    """Starts processes that move bytes until the test is over."""
    started = []

    def start(kind):
        process = subprocess.Popen(
            [sys.executable, "-c", MOVES, kind],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.stdout.close()
        process.wait()


def of(update, pid):
    return [one for one in update["processes"] if one["pid"] == pid]


def test_another_processes_emulated_links_show_their_rates(capsys, folder, moving):
    process = moving("emulated")
    first, second = updates(capsys)
    [before], [now] = of(first, process.pid), of(second, process.pid)
    assert now["kind"] == "emulated"
    assert "jax_turbobus.configure" in now["command"]
    elapsed_s = second["time_s"] - first["time_s"]
    lanes = {lane["name"]: lane for lane in now["lanes"]}
    old = {lane["name"]: lane for lane in before["lanes"]}
    for name, relay in (("gpu0 h2d", None), ("gpu0 h2d via gpu1", 1)):
        lane = lanes[name]
        assert (lane["gpu"], lane["relay"], lane["direction"]) == (0, relay, "h2d")
        # Not faster than the link, give or take some blocks, and really moving.
        limit = 1.5 * lane["bandwidth_bytes_per_s"] + (3 << 20) / elapsed_s
        assert 0.1 * lane["bandwidth_bytes_per_s"] < lane["bytes_per_s"] < limit
        moved = lane["num_bytes"] - old[name]["num_bytes"]
        assert moved == pytest.approx(lane["bytes_per_s"] * elapsed_s, rel=0.5)
    assert lanes["gpu0 d2h"]["num_bytes"] == 0
    links = {link["name"]: link for link in now["links"]}
    assert (
        links["pcie1 numa0>gpu1"]["num_bytes"]
        == (lanes["gpu0 h2d via gpu1"]["num_bytes"])
    )
    assert now["num_ended"] > 0

    lines = run_top(capsys, "--count", "1")
    assert lines[0].startswith(("no rates of GPUs: ", "GPU "))
    heading = next(line for line in lines if f"process {process.pid}" in line)
    assert "emulated links" in heading
    assert any("gpu0 h2d via gpu1" in line and "GB/s" in line for line in lines)

    # It is gone at once when it is killed, and so is its file.
    assert any(name.startswith(f"{process.pid}.") for name in os.listdir(folder))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not of(updates(capsys, 1)[0], process.pid)
    assert not any(name.startswith(f"{process.pid}.") for name in os.listdir(folder))


def test_plain_copies_of_another_process_show_too(capsys, moving):
    process = moving("plain")
    [one] = of(updates(capsys)[1], process.pid)
    assert one["kind"] == "plain"
    lane = one["lanes"][0]
    assert (lane["gpu"], lane["direction"]) == (0, "h2d")
    assert lane["bytes_per_s"] > 0
    assert sum(lane["num_bytes"] for lane in one["lanes"][1:]) == 0


def test_a_process_that_ends_leaves_nothing(folder):
    # Plain copies, an engine that is taken out, one that is there at the end.
    program = MOVES.replace("while True:", "for _ in range(3):") + (
        "assert len(os.listdir(folder)) == 1\n"
        "for i in range(2):\n"
        "    jax_turbobus.configure(topology='2xh200')\n"
        "    move(x).block_until_ready()\n"
        "    assert len(os.listdir(folder)) == 2\n"
    )
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os\nfolder = {str(folder)!r}\n{program}",
            "plain",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=120,
    )
    assert os.listdir(folder) == []


def test_an_engine_and_its_page_go_together(folder):
    with jax_turbobus.configured(topology="2xh200"):
        x = jax.device_put(
            jnp.zeros(1 << 20),
            jax.sharding.SingleDeviceSharding(
                jax.devices()[0], memory_kind="pinned_host"
            ),
        )
        jax.jit(lambda x: jax_turbobus.to_device(x) * 2)(x).block_until_ready()
        [page] = [
            page
            for page in _live_pages.read_pages(folder.parent)
            if page.kind == "host"
        ]
        assert page.pid == os.getpid()
        assert sum(row.num_bytes for row in page.rows if not row.is_link) == 4 << 20
        assert sum(lane.num_bytes for lane in jax_turbobus.stats().lanes) == 4 << 20
        assert all(row.num_bytes_in_flight == 0 for row in page.rows)
        assert page.path.exists()
    assert not page.path.exists()


@pytest.mark.parametrize("off", ["0", " Off "])
def test_the_switch_and_a_folder_that_cannot_be(monkeypatch, tmp_path, folder, off):
    monkeypatch.setenv("JAX_TURBOBUS_TOP", off)
    with jax_turbobus.configured(topology="2xh200"):
        assert not folder.exists()
        [check] = doctor._live_counters()
        assert check.status == "note"
        assert "JAX_TURBOBUS_TOP" in check.text
    monkeypatch.setenv("JAX_TURBOBUS_TOP", "maybe")
    [check] = doctor._live_counters()
    assert check.status == "note"
    assert "JAX_TURBOBUS_TOP: expected 1 or 0, got 'maybe'" in check.text
    monkeypatch.delenv("JAX_TURBOBUS_TOP")
    monkeypatch.setenv("JAX_TURBOBUS_LOCK_DIR", str(tmp_path / "none"))
    with jax_turbobus.configured(topology="2xh200"):
        assert jax_turbobus.stats().is_enabled
        [check] = doctor._live_counters()
        assert check.status == "note"
        assert "JAX_TURBOBUS_LOCK_DIR" in check.text
    monkeypatch.setenv("JAX_TURBOBUS_LOCK_DIR", str(tmp_path))
    [check] = doctor._live_counters()
    assert check.status == "ok"


def test_rates_of_gpus_stand_above_what_processes_move(capsys, monkeypatch, moving):
    class NvmlError(Exception):
        pass

    def no_counters(*_):
        raise NvmlError

    is_over = []
    nvml = types.SimpleNamespace(
        NVMLError=NvmlError,
        NVML_PCIE_UTIL_RX_BYTES=1,
        NVML_PCIE_UTIL_TX_BYTES=0,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX=2,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX=3,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: is_over.append(True),
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda _: "GPU-1234",
        nvmlDeviceGetName=lambda _: "NVIDIA X",
        nvmlDeviceGetPcieThroughput=lambda _, counter: 25e6 if counter else 1e6,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda _: 5,
        nvmlDeviceGetMaxPcieLinkWidth=lambda _: 16,
        nvmlDeviceGetFieldValues=no_counters,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    process = moving("plain")
    lines = run_top(capsys, "--count", "1")
    assert "from host GB/s" in lines[0]
    assert "NVIDIA X" in lines[1]
    assert "25.0" in lines[1]
    assert f"process {process.pid}" in lines[2]
    [update] = updates(capsys, 1)
    assert update["remark"] == ""
    assert update["gpus"][0]["in_bytes_per_s"] == 25e9
    assert of(update, process.pid)
    assert len(is_over) == 2


def test_without_anybody_top_says_so(capsys, folder):
    lines = run_top(capsys, "--count", "1")
    assert "no process of this user" in lines[-1]
