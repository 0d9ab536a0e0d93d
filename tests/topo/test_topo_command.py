"""`topo` and `doctor` as a user runs them, and doctor's findings by cause."""

import json
import re
import subprocess
import sys

import pytest
from _fakes import FakeGpu, FakeNvml, add_device, add_numa

import jax_turbobus
import jax_turbobus.moe
from jax_turbobus.__main__ import main
from jax_turbobus._discovery.limits import HostLimits, read_limits
from jax_turbobus.commands import doctor
from jax_turbobus.topology import Topology, discover, names


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


def gpu_findings(tmp_path, nvml, **changes):
    arguments = {
        "num_jax_gpus": len(nvml.gpus),
        "has_cuda": True,
        "node_cpus": {},
        "own_cpus": frozenset({0}),
        "environ": {},
    } | changes
    found = discover(environ={}, nvml_module=nvml, sysfs_root=tmp_path)
    return list(doctor.gpu_checks(found, **arguments))


def texts(checks, status=None):
    return "\n".join(f"{c.text} {c.hint}" for c in checks if status in (None, c.status))


def pair(tmp_path, nvlink=18, **kwargs):
    add_numa(tmp_path)
    addresses = ["0000:01:00.0", "0000:02:00.0"]
    for address in addresses:
        add_device(tmp_path, [f"0000:{address[5:7]}:01.0", address])
    gpus = [
        FakeGpu(address, bricks=[(True, 4, other)] * nvlink)
        for address, other in zip(addresses, addresses[::-1], strict=True)
    ]
    return FakeNvml(gpus, **({"nvlink_peers": [(0, 1)]} | kwargs))


def test_doctor_says_which_links_a_gpu_can_borrow(tmp_path):
    found = texts(gpu_findings(tmp_path, pair(tmp_path)), "ok")
    assert "gpu0: can borrow the links of gpu1; to the device up to 111 GB/s" in found
    assert "driver 580.159.04" in found


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (lambda path: pair(path, nvlink_peers=[]), "no GPU has peer access"),
        (lambda path: pair(path, nvlink=1), "less than twice a PCIe link's rate"),
        (lambda _: FakeNvml([FakeGpu("0000:01:00.0")]), "there is no other GPU"),
    ],
)
def test_doctor_says_why_a_gpu_borrows_no_link(tmp_path, nvml, reason):
    assert reason in texts(gpu_findings(tmp_path, nvml(tmp_path)), "note")


def test_doctor_warns_about_what_makes_gpus_slower_or_unused(tmp_path):
    nvml = pair(tmp_path)
    assert "JAX does not use them" in texts(
        gpu_findings(tmp_path, nvml, num_jax_gpus=0)
    )
    assert "JAX sees 1 of 2" in texts(gpu_findings(tmp_path, nvml, num_jax_gpus=1))
    assert "nvcc" in texts(gpu_findings(tmp_path, nvml, has_cuda=False), "broken")
    unused = gpu_findings(tmp_path, nvml, has_cuda=False, num_jax_gpus=0)
    assert "nvcc" in texts(unused, "warn")
    asynchronous = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
    assert "another process" in texts(
        gpu_findings(tmp_path, nvml, environ=asynchronous)
    )
    # Bound to the other socket's processors.
    far = gpu_findings(tmp_path, nvml, node_cpus={"numa0": frozenset({4, 5})})
    assert "numactl" in texts(far, "warn")
    near = gpu_findings(tmp_path, nvml, node_cpus={"numa0": frozenset({0, 1})})
    assert "numactl" not in texts(near)
    assert not texts(near, "warn")


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:  268435456 kB\nMemAvailable: 200000000 kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/box/inner\n",
            "sys/fs/cgroup/box/inner/memory.max": "max\n",
            "sys/fs/cgroup/box/memory.max": f"{8 << 30}\n",
            "sys/fs/cgroup/box/memory.current": "1000\n",
        },
        {
            "proc/self/cgroup": "3:cpu:/\n4:hugetlb,memory:/box\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{8 << 30}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1000\n",
        },
        {  # a container: the path is the host's, the mount is the container's
            "proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
            "sys/fs/cgroup/memory.max": f"{8 << 30}\n",
            "sys/fs/cgroup/memory.current": "1000\n",
        },
    ],
    ids=["v2", "v1", "container"],
)
def test_the_cgroup_limits_what_can_be_pinned_on_a_larger_machine(tmp_path, files):
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    limits = read_limits({}, tmp_path)
    assert limits.memory == 256 << 30
    assert (limits.cgroup, limits.cgroup_used) == (8 << 30, 1000)
    assert limits.pinnable() == (8 << 30, "the cgroup")
    found = texts(doctor.host_checks(limits, thp="madvise", uses_gpus=True))
    assert "at most 8.0 GiB (the cgroup" in found
    assert "64.0 GiB of host memory, which is more than there is" in found


def test_limits_that_cannot_be_read_are_none(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "rubbish\n0\n", "proc/meminfo": "x\ny: z\n"})
    limits = read_limits({"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "7"}, tmp_path)
    assert (limits.memory, limits.cgroup, limits.shm_total) == (None, None, None)
    assert limits.pinnable() is None
    assert limits.xla_pinned == 7 << 30
    assert "/dev/shm: not there" in texts(
        doctor.host_checks(limits, thp="", uses_gpus=False), "warn"
    )


def test_small_shm_and_missing_huge_pages_are_warned_about():
    limits = HostLimits(
        memory=1 << 40,
        available=1 << 39,
        cgroup=None,
        cgroup_used=None,
        memlock=None,
        shm_total=64 << 20,
        shm_free=1 << 20,
        xla_pinned=64 << 30,
    )
    warnings = texts(doctor.host_checks(limits, thp="never", uses_gpus=True), "warn")
    assert "/dev/shm: 64.0 MiB, 1.0 MiB free" in warnings
    assert "huge pages are off" in warnings
    assert "--shm-size" in warnings
