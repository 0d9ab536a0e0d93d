"""Which GPUs a process sees, in which order: CUDA_VISIBLE_DEVICES."""

import pytest
from topo_fakes import FakeGpu, FakeNvml, find


def four_gpus(tmp_path):
    gpus = [FakeGpu(f"0000:0{i}:00.0", uuid=f"GPU-{i}{i}aa-{i}") for i in range(1, 5)]
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for i, gpu in enumerate(gpus):
        others = [other.address for j, other in enumerate(gpus) if j != i]
        gpu.bricks = [(True, 4, other) for other in others for _ in range(6)]
    return FakeNvml(gpus, nvlink_peers=pairs)


@pytest.mark.parametrize(
    ("value", "expected", "remark"),
    [
        (None, [1, 2, 3, 4], None),
        ("2,0", [3, 1], None),
        (" 1 , 3 ", [2, 4], None),
        ("GPU-33aa-3,GPU-1", [3, 1], None),
        ("3,GPU-22", [4, 2], None),
        ("", [], None),
        ("-1", [], None),
        ("1,-1,2", [2], None),
        ("NoDevFiles", [], None),
        ("0,9,1", [1], "'9' is no GPU here"),
        ("1,GPU-,2", [2], "'GPU-' is no GPU here"),
        ("GPU-77", [], "'GPU-77' is no GPU here"),
        ("0,0", [], "already in the list"),
        ("0,GPU-1", [], "already in the list"),
        ("MIG-4-5,1", [], "a MIG slice"),
        ("all", [], "'all' is no GPU here"),
    ],
)
def test_cuda_visible_devices_chooses_and_orders(tmp_path, value, expected, remark):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    found = find(tmp_path, four_gpus(tmp_path), environ)
    buses = [int(gpu.pci_address[5:7], 16) for gpu in found.topology.gpus]
    assert buses == expected
    about = [r for r in found.remarks if "CUDA_VISIBLE_DEVICES" in r]
    assert (len(about) == 1) == (remark is not None)
    if remark:
        assert remark in about[0]


def test_a_permutation_keeps_links_and_peers_with_their_gpus(tmp_path):
    nvml = four_gpus(tmp_path)
    nvml.nvlink_peers.discard(frozenset((0, 2)))
    nvml.peers.discard(frozenset((0, 2)))
    environ = {"CUDA_VISIBLE_DEVICES": "2,3,0"}
    topology = find(tmp_path, nvml, environ).topology
    assert not topology.has_peer_access(0, 2)
    assert topology.has_peer_access(0, 1)
    assert topology.has_peer_access(2, 1)
    between = {(link.a, link.b) for link in topology.links if link.type == "nvlink"}
    assert between == {("gpu0", "gpu1"), ("gpu0", "gpu2"), ("gpu1", "gpu2")}


def test_mixed_gpus_warn_about_the_order_of_numbers(tmp_path):
    gpus = [FakeGpu("0000:01:00.0"), FakeGpu("0000:02:00.0", name="NVIDIA A2")]

    def warned(**environ):
        return any(
            "PCI_BUS_ID" in remark
            for remark in find(tmp_path, FakeNvml(gpus), environ).remarks
        )

    assert warned()
    assert warned(CUDA_VISIBLE_DEVICES="1")
    assert not warned(CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert not warned(CUDA_VISIBLE_DEVICES=gpus[1].uuid)
