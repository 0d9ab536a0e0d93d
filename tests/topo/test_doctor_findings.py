"""What doctor finds, by cause: faked GPUs, limits and device trees."""

import pytest
from topo_fakes import FakeGpu, FakeNvml, add_device, add_numa

from jax_turbobus._discovery.limits import HostLimits, read_limits
from jax_turbobus.commands import _findings, doctor
from jax_turbobus.topology import discover


def gpu_findings(tmp_path, nvml, **changes):
    arguments = {
        "num_jax_gpus": len(nvml.gpus),
        "has_cuda": True,
        "node_cpus": {},
        "own_cpus": frozenset({0}),
        "environ": {},
    } | changes
    found = discover(environ={}, nvml_module=nvml, sysfs_root=tmp_path)
    return list(_findings.gpu_checks(found, **arguments))


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
    """Processors far away: https://github.com/deepspeedai/DeepSpeed/issues/1576."""
    nvml = pair(tmp_path)
    assert "JAX does not use them" in texts(
        gpu_findings(tmp_path, nvml, num_jax_gpus=0)
    )
    assert "JAX sees 1 of 2" in texts(gpu_findings(tmp_path, nvml, num_jax_gpus=1))
    assert "nvcc" in texts(gpu_findings(tmp_path, nvml, has_cuda=False), "broken")
    unused = gpu_findings(tmp_path, nvml, has_cuda=False, num_jax_gpus=0)
    assert "nvcc" in texts(unused, "warn")
    for name in ("cuda_async", "CUDA_ASYNC"):
        asynchronous = {"XLA_PYTHON_CLIENT_ALLOCATOR": name}
        assert "exchanges go through host memory" in texts(
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
    """https://github.com/sgl-project/sglang/pull/35641."""
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    limits = read_limits({}, tmp_path)
    assert limits.memory == 256 << 30
    assert (limits.cgroup, limits.cgroup_used) == (8 << 30, 1000)
    assert limits.pinnable() == (8 << 30, "the cgroup")
    found = texts(_findings.host_checks(limits, thp="madvise", uses_gpus=True))
    assert "at most 8.0 GiB (the cgroup" in found
    assert "64.0 GiB of host memory, which is more than there is" in found


def test_limits_that_cannot_be_read_are_none(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "rubbish\n0\n", "proc/meminfo": "x\ny: z\n"})
    limits = read_limits({"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "7"}, tmp_path)
    assert (limits.memory, limits.cgroup, limits.shm_total) == (None, None, None)
    assert limits.pinnable() is None
    assert limits.xla_pinned == 7 << 30
    assert "/dev/shm: not there" in texts(
        _findings.host_checks(limits, thp="", uses_gpus=False), "warn"
    )


def test_small_shm_and_missing_huge_pages_are_warned_about():
    """Small /dev/shm: https://github.com/jax-ml/jax/issues/26465."""
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
    warnings = texts(_findings.host_checks(limits, thp="never", uses_gpus=True), "warn")
    assert "/dev/shm: 64.0 MiB, 1.0 MiB free" in warnings
    assert "huge pages are off" in warnings
    assert "--shm-size" in warnings


def test_doctor_refuses_words_that_are_no_switch(monkeypatch):
    monkeypatch.setenv("JAX_TURBOBUS_PEER_ACCESS", "maybe")
    [check] = doctor._guarded(doctor._settings)
    assert check.status == "broken"
    assert "JAX_TURBOBUS_PEER_ACCESS: expected 1 or 0, got 'maybe'" in check.text
