"""Stand-ins for pynvml, sysfs and topology files."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from jax_turbobus.topology import Topology, discover

NVLINK_VERSION = {2: 2, 3: 5, 4: 6}  # generation -> nvmlDeviceGetNvLinkVersion


class NVMLError(Exception):
    pass


@dataclass
class FakeGpu:
    """One GPU as NVML shows it; None in a field: NVML refuses to say."""

    address: str
    name: str = "NVIDIA H200"
    uuid: str = ""
    generation: int | None = 5
    system_max_generation: int | None = 5
    max_generation: int | None = 5
    width: int | None = 16
    system_max_width: int | None = 16
    pstate: int | None = 0
    mig: tuple[int, int] = (0, 0)
    # (is up, NVLink generation, remote: a PCI address, "switch" or None)
    bricks: list = field(default_factory=list)

    def __post_init__(self):
        self.uuid = self.uuid or f"GPU-{self.address.replace(':', '').replace('.', '')}"


class FakeNvml:
    """The part of pynvml that discovery uses."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, gpus, peers=(), nvlink_peers=(), driver="580.159.04", **broken):
        self.gpus = gpus
        self.peers = {frozenset(pair) for pair in (*peers, *nvlink_peers)}
        self.nvlink_peers = {frozenset(pair) for pair in nvlink_peers}
        self.driver = driver
        self.init_error = broken.get("init_error")
        self.lost = broken.get("lost", ())
        self.num_open = 0

    def nvmlInit(self):
        if self.init_error:
            raise NVMLError(self.init_error)
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.lost:
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle):
        return self.gpus[handle].uuid.encode()  # older pynvml returns bytes

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId="0000" + self.gpus[handle].address.upper())

    def nvmlDeviceGetName(self, handle):
        return self.gpus[handle].name

    def _say(self, handle, attribute):
        value = getattr(self.gpus[handle], attribute)
        if value is None:
            raise NVMLError("Not Supported")
        return value

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return self._say(handle, "generation")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return self._say(handle, "system_max_generation")

    def nvmlDeviceGetGpuMaxPcieLinkGeneration(self, handle):
        return self._say(handle, "max_generation")

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return self._say(handle, "width")

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return self._say(handle, "system_max_width")

    def nvmlDeviceGetPerformanceState(self, handle):
        return self._say(handle, "pstate")

    def nvmlDeviceGetMigMode(self, handle):
        return list(self.gpus[handle].mig)

    def _brick(self, handle, link):
        bricks = self.gpus[handle].bricks
        if link >= len(bricks):
            raise NVMLError("Invalid Argument")
        return bricks[link]

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return int(self._brick(handle, link)[0])

    def nvmlDeviceGetNvLinkVersion(self, handle, link):
        return NVLINK_VERSION[self._brick(handle, link)[1]]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        remote = self._brick(handle, link)[2]
        if remote is None:
            raise NVMLError("Not Supported")
        return {"switch": 2, "0000:ff:00.0": 255}.get(remote, 0)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        remote = self._brick(handle, link)[2]
        if remote is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(busId="0000" + remote)

    def nvmlDeviceGetP2PStatus(self, a, b, capability):
        assert isinstance(capability, int)  # pynvml's own constant is a tuple
        peers = self.nvlink_peers if capability == 2 else self.peers
        return 0 if frozenset((a, b)) in peers else 5


def _write(folder: Path, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def add_numa(root, *, has_cpu="0", online="0", distances=((10,),), cpus=("0-3",)):
    folder = root / "devices/system/node"
    _write(folder, has_cpu=has_cpu, online=online)
    for node, (row, cpulist) in enumerate(zip(distances, cpus, strict=True)):
        _write(
            folder / f"node{node}", distance=" ".join(map(str, row)), cpulist=cpulist
        )


def add_device(
    root, chain, *, numa=0, speed="32.0 GT/s PCIe", width=16, uplink=("16.0", 16)
):
    """Adds the device at the end of `chain`, below the ports before it."""
    folder = root / "devices/pci0000:00"
    for i, address in enumerate(chain):
        folder = folder / address
        is_end = i == len(chain) - 1
        now = speed if is_end else f"{uplink[0]} GT/s PCIe"
        lanes = width if is_end else uplink[1]
        _write(
            folder,
            numa_node=numa,
            current_link_speed=now,
            max_link_speed="32.0 GT/s PCIe" if is_end else now,
            current_link_width=lanes,
            max_link_width=16,
        )
    links = root / "bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / chain[-1]).symlink_to(folder, target_is_directory=True)


def valid():
    """A file that uses every field, as Python data."""
    rate = {"a_to_b_bytes_per_s": 1e10, "b_to_a_bytes_per_s": 1.1e10}
    return {
        "format": "jax_turbobus/topology",
        "version": 1,
        "name": "m",
        "description": "two sockets",
        "numa_nodes": [{"id": "numa0", "memory_bytes_per_s": 1e11}, {"id": "numa1"}],
        "switches": [{"id": "sw", "type": "pcie"}],
        "gpus": [
            {"id": "gpu0", "name": "G", "uuid": "GPU-a", "pci_address": "0000:01:00.0"},
            {"id": "gpu1", "numa_node": "numa1"},
        ],
        "links": [
            {"id": "up", "type": "pcie", "a": "numa0", "b": "sw", **rate},
            {"id": "p0", "type": "pcie", "a": "sw", "b": "gpu0", **rate}
            | {"generation": 3, "max_generation": 4, "width": 8, "max_width": 16}
            | {"duplex_bytes_per_s": 2e10, "latency_ns": 5, "rate_source": "measured"},
            {"id": "p1", "type": "pcie", "a": "numa1", "b": "gpu1", **rate},
            {"id": "nv", "type": "nvlink", "a": "gpu0", "b": "gpu1", **rate},
            {"id": "upi", "type": "upi", "a": "numa0", "b": "numa1", **rate},
        ],
        "link_groups": [
            {"id": "g", "gpus": ["gpu0", "gpu1"]}
            | {"h2d_bytes_per_s": 1e10, "d2h_bytes_per_s": 1e10}
        ],
        "peer_access": [["gpu0", "gpu1"]],
    }


def load(data):
    return Topology.from_json(json.dumps(data), "m.json")


def find(tmp_path, nvml, environ=None):
    """Returns what is found of these GPUs and the sysfs tree in a folder."""
    return discover(environ=environ or {}, nvml_module=nvml, sysfs_root=tmp_path)
