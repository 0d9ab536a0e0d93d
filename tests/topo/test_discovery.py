"""Discovery against faked NVML objects and faked sysfs trees."""

import json

import pytest
from topo_fakes import FakeGpu, FakeNvml, add_device, add_numa, find

from jax_turbobus._discovery import rates
from jax_turbobus._discovery.sysfs import Sysfs, parse_list
from jax_turbobus.topology import Topology


def two_h200(tmp_path, *, numa=0, remote="peer", **gpu):
    """Two GPUs on root ports of their own, 18 NVLink 4 bricks each."""
    addresses = ["0000:19:00.0", "0000:3b:00.0"]
    add_numa(tmp_path)
    for address in addresses:
        add_device(tmp_path, [f"0000:{address[5:7]}:01.0", address], numa=numa)
    ends = {
        "peer": addresses[::-1],
        "switch": ["switch"] * 2,
        "hidden": [None] * 2,
        "not a GPU": ["0000:ff:00.0"] * 2,
    }
    gpus = [
        FakeGpu(address, bricks=[(True, 4, ends[remote][i])] * 18, **gpu)
        for i, address in enumerate(addresses)
    ]
    return FakeNvml(gpus, nvlink_peers=[(0, 1)])


def test_two_h200_are_found_as_the_shipped_file_has_them(tmp_path):
    nvml = two_h200(tmp_path)
    found = find(tmp_path, nvml)
    topology, shipped = found.topology, Topology.load("2xh200")
    assert found.remarks == ()
    assert found.driver == "580.159.04"
    assert [g.pci_address for g in topology.gpus] == ["0000:19:00.0", "0000:3b:00.0"]
    assert topology.gpus[0].uuid == nvml.gpus[0].uuid
    for ours, theirs in zip(topology.links, shipped.links, strict=True):
        assert (ours.id, ours.type, ours.a, ours.b) == (
            theirs.id,
            theirs.type,
            theirs.a,
            theirs.b,
        )
        assert ours.rate_source == "estimated"
        assert ours.a_to_b_bytes_per_s == pytest.approx(
            theirs.a_to_b_bytes_per_s, rel=0.02
        )
        assert (ours.width, ours.generation) == (theirs.width, theirs.generation)
    assert topology.can_relay(0, 1)
    assert nvml.num_open == 0, "NVML is shut down again"


@pytest.mark.parametrize("remote", ["switch", "hidden", "not a GPU"])
def test_nvlinks_to_a_switch_or_to_somewhere_hidden_join_the_fabric(tmp_path, remote):
    topology = find(tmp_path, two_h200(tmp_path, remote=remote)).topology
    assert [s.type for s in topology.switches] == ["nvswitch"]
    assert topology.peer_paths(0, 1)[0].links == (2, 3)
    assert topology.can_relay(1, 0)


def test_bricks_that_lead_nowhere_known_are_no_link(tmp_path):
    nvml = two_h200(tmp_path, remote="hidden")
    nvml.nvlink_peers = set()
    nvml.peers = set()
    topology = find(tmp_path, nvml).topology
    assert {link.type for link in topology.links} == {"pcie"}
    assert not topology.has_peer_access(0, 1)


def test_nvlink_bricks_that_are_down_are_a_degraded_link(tmp_path):
    nvml = two_h200(tmp_path)
    for gpu in nvml.gpus:
        gpu.bricks = gpu.bricks[:12] + [(False, 4, None)] * 6
    found = find(tmp_path, nvml)
    nvlink = found.topology.links[2]
    assert (nvlink.width, nvlink.max_width, nvlink.is_degraded) == (12, 18, True)
    assert "gpu0 (0000:19:00.0): 6 of its 18 NVLinks are down" in found.remarks


def test_a_virtual_machine_that_hides_the_tree_says_so(tmp_path):
    """numa_node -1 and no bridges, as cloud machines show it."""
    add_numa(tmp_path)
    for address in ("0000:01:00.0", "0000:02:00.0"):
        add_device(tmp_path, [address], numa=-1)
    gpus = [FakeGpu("0000:01:00.0"), FakeGpu("0000:02:00.0")]
    found = find(tmp_path, FakeNvml(gpus))
    assert [gpu.numa_node for gpu in found.topology.gpus] == [0, 0]
    assert len(found.topology.link_groups) == 2
    assert sum("tree above it is hidden" in remark for remark in found.remarks) == 2


def test_without_sysfs_nvml_alone_gives_a_topology(tmp_path):
    nvml = two_h200(tmp_path)
    found = find(tmp_path / "nothing", nvml)
    assert len(found.topology.gpus) == 2
    assert found.topology.links[0].generation == 5
    assert found.topology.pooled_bandwidth(0, "h2d") == pytest.approx(110.6e9, rel=0.02)


def test_gpus_behind_one_switch_are_one_group(tmp_path):
    """Root port, then a switch's upstream and downstream ports, then the GPU."""
    add_numa(tmp_path)
    for i, address in enumerate(["06", "07", "0a", "0b"]):
        switch = 4 + 4 * (i // 2)
        add_device(
            tmp_path,
            [
                f"0000:00:0{1 + i // 2}.0",
                f"0000:{switch:02x}:00.0",
                f"0000:{switch + 1:02x}:0{i % 2}.0",
                f"0000:{address}:00.0",
            ],
            speed="8.0 GT/s PCIe",
            uplink=("8.0", 16),
        )
    bricks = [
        [(True, 2, f"0000:{other}:00.0") for other in ("06", "07", "0a", "0b")]
        for _ in range(4)
    ]
    gpus = [
        FakeGpu(f"0000:{a}:00.0", "Tesla V100", generation=3, system_max_generation=3)
        for a in ("06", "07", "0a", "0b")
    ]
    for i, gpu in enumerate(gpus):
        gpu.max_generation = 3
        gpu.bricks = [b for j, b in enumerate(bricks[i]) if j != i]
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    topology = find(tmp_path, FakeNvml(gpus, nvlink_peers=pairs)).topology
    assert [g.gpus for g in topology.link_groups] == [(0, 1), (2, 3)]
    assert [s.id for s in topology.switches] == [
        "switch-0000:04:00.0",
        "switch-0000:08:00.0",
    ]
    assert {p.relay for p in topology.paths(0, "h2d")} == {None, 2, 3}
    assert topology.pooled_bandwidth(0, "h2d") == pytest.approx(
        2 * rates.pcie_bytes_per_s(3, 16)
    )


def test_nested_switches_share_the_narrowest_uplink(tmp_path):
    add_numa(tmp_path)
    for leaf in (0, 1):
        add_device(
            tmp_path,
            [
                "0000:00:01.0",
                "0000:01:00.0",
                *(f"0000:{bus}:0{leaf}.0" for bus in ("02", "03", "04")),
                f"0000:3{leaf}:00.0",
            ],
        )
    gpus = [FakeGpu(f"0000:3{leaf}:00.0") for leaf in (0, 1)]
    topology = find(tmp_path, FakeNvml(gpus)).topology
    assert len(topology.switches) == 3
    assert [g.gpus for g in topology.link_groups] == [(0, 1)]


def test_two_sockets_with_a_gpu_each(tmp_path):
    add_numa(
        tmp_path,
        has_cpu="0-1",
        online="0-1",
        distances=((10, 21), (21, 10)),
        cpus=("0-3", "4-7"),
    )
    add_device(tmp_path, ["0000:00:01.0", "0000:01:00.0"], numa=0)
    add_device(tmp_path, ["0000:80:01.0", "0000:81:00.0"], numa=1)
    gpus = [FakeGpu("0000:01:00.0"), FakeGpu("0000:81:00.0")]
    found = find(tmp_path, FakeNvml(gpus))
    topology = found.topology
    assert found.remarks == ()
    assert [gpu.numa_node for gpu in topology.gpus] == [0, 1]
    assert topology.links[-1].type == "upi"
    assert len(topology.paths(0, "h2d", 1)[0].links) == 2


def test_memory_only_numa_nodes_hold_no_host_buffers(tmp_path):
    add_numa(
        tmp_path,
        has_cpu="0",
        online="0-1",
        distances=((10, 80), (80, 10)),
        cpus=("0-3", ""),
    )
    add_device(tmp_path, ["0000:00:01.0", "0000:01:00.0"], numa=1)
    found = find(tmp_path, FakeNvml([FakeGpu("0000:01:00.0")]))
    assert [node.id for node in found.topology.numa_nodes] == ["numa0"]
    assert found.topology.gpus[0].numa_node == 0


def test_a_narrow_slot_is_degraded(tmp_path):
    """An x16 card in a slot with four lanes: 4090 machines have them."""
    add_numa(tmp_path)
    add_device(tmp_path, ["0000:00:01.0", "0000:01:00.0"], width=4)
    card = FakeGpu("0000:01:00.0", width=4, system_max_width=4)
    card.generation = card.system_max_generation = card.max_generation = 4
    found = find(tmp_path, FakeNvml([card]))
    link = found.topology.links[0]
    assert (link.width, link.max_width, link.is_degraded) == (4, 16, True)
    assert link.a_to_b_bytes_per_s == pytest.approx(6.56e9)
    assert "x4" in found.remarks[0]
    assert "check the slot" in found.remarks[0]


def test_an_old_slot_is_degraded(tmp_path):
    card = FakeGpu("0000:01:00.0", generation=3, system_max_generation=3)
    add_device(tmp_path, ["0000:00:01.0", "0000:01:00.0"], speed="8.0 GT/s PCIe")
    link = find(tmp_path, FakeNvml([card])).topology.links[0]
    assert (link.generation, link.max_generation, link.is_degraded) == (3, 5, True)


def test_an_idle_gpu_that_saves_power_is_not_degraded(tmp_path):
    """The link of an idle GPU drops to generation 1 and comes back under load."""
    add_device(tmp_path, ["0000:00:01.0", "0000:01:00.0"], speed="2.5 GT/s PCIe")
    found = find(tmp_path, FakeNvml([FakeGpu("0000:01:00.0", generation=1, pstate=8)]))
    link = found.topology.links[0]
    assert (link.generation, link.is_degraded) == (5, False)
    assert found.remarks == ()
    busy = find(tmp_path, FakeNvml([FakeGpu("0000:01:00.0", generation=1, pstate=0)]))
    assert busy.topology.links[0].is_degraded


def test_what_nvml_does_not_say_is_taken_from_sysfs_or_guessed(tmp_path):
    silent = {
        "generation": None,
        "system_max_generation": None,
        "max_generation": None,
        "width": None,
        "system_max_width": None,
        "pstate": None,
    }
    add_device(tmp_path, ["0000:00:01.0", "0000:01:00.0"], speed="16.0 GT/s PCIe")
    link = find(tmp_path, FakeNvml([FakeGpu("0000:01:00.0", **silent)])).topology.links[
        0
    ]
    assert (link.generation, link.width) == (5, 16), "what it reaches under load"
    found = find(tmp_path / "none", FakeNvml([FakeGpu("0000:01:00.0", **silent)]))
    assert found.topology.links[0].generation == 0
    assert any("generation or width unknown" in r for r in found.remarks)


def test_pcie_peer_access_is_listed_but_does_not_relay(tmp_path):
    nvml = FakeNvml([FakeGpu("0000:01:00.0"), FakeGpu("0000:02:00.0")], peers=[(0, 1)])
    topology = find(tmp_path, nvml).topology
    assert topology.has_peer_access(0, 1)
    assert not topology.can_relay(0, 1)
    assert topology.peer_paths(0, 1)[0].kind == "peer"


def test_a_mig_gpu_neither_lends_nor_borrows(tmp_path):
    nvml = two_h200(tmp_path, mig=(1, 1))
    found = find(tmp_path, nvml)
    assert not found.topology.has_peer_access(0, 1)
    assert sum("MIG is on" in remark for remark in found.remarks) == 2


def test_a_lost_gpu_is_left_out_with_its_reason(tmp_path):
    nvml = two_h200(tmp_path)
    nvml.lost = (0,)
    found = find(tmp_path, nvml)
    assert [gpu.pci_address for gpu in found.topology.gpus] == ["0000:3b:00.0"]
    assert any("GPU is lost" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    "nvml",
    [
        FakeNvml([], init_error="Driver Not Loaded"),
        FakeNvml([]),
        None,
    ],
    ids=["no driver", "no GPU", "this machine or none"],
)
def test_without_gpus_there_is_still_an_answer(tmp_path, nvml):
    found = find(tmp_path, nvml)
    if nvml is not None:
        assert found.topology.gpus == ()
        assert found.topology.lanes().paths == []
    assert Topology.from_json(found.topology.to_json()) == found.topology
    if nvml is not None and nvml.init_error:
        assert found.remarks == ("NVML: Driver Not Loaded",)


def test_kernel_lists_are_read_whatever_they_hold():
    assert parse_list("0-2,5\n") == [0, 1, 2, 5]
    assert parse_list("") == []
    assert parse_list("x,1-y,3") == [3]


def test_sysfs_that_holds_rubbish_reads_as_unknown(tmp_path):
    add_device(tmp_path, ["0000:00:01.0", "0000:01:00.0"], numa="\xff", speed="Unknown")
    device = tmp_path / "bus/pci/devices/0000:01:00.0"
    (device / "current_link_width").write_text("255\n")
    (device / "max_link_speed").unlink()
    facts = Sysfs(tmp_path).pci("0000:01:00.0")
    assert facts.numa_node is None
    assert (facts.endpoint.generation, facts.endpoint.max_generation) == (0, 0)
    assert facts.endpoint.width == 0
    assert facts.is_tree_visible
    loop = tmp_path / "bus/pci/devices/0000:05:00.0"
    loop.symlink_to(loop)
    assert not Sysfs(tmp_path).pci("0000:05:00.0").is_tree_visible
    assert len(Sysfs(tmp_path).numa_nodes()) == 1


def test_what_was_found_can_be_saved_and_loaded(tmp_path):
    topology = find(tmp_path, two_h200(tmp_path)).topology
    topology.save(tmp_path / "here.json")
    assert Topology.load(tmp_path / "here.json") == topology
    assert json.loads((tmp_path / "here.json").read_text())["peer_access"] == [
        ["gpu0", "gpu1"]
    ]


def test_estimates_follow_generation_and_width():
    assert rates.pcie_bytes_per_s(5, 16) == pytest.approx(55.3e9, rel=0.01)
    assert rates.pcie_bytes_per_s(0, 0) == rates.pcie_bytes_per_s(3, 16)
    assert rates.pcie_bytes_per_s(9, 1) == rates.pcie_bytes_per_s(6, 1)
    assert 18 * rates.nvlink_bytes_per_s(4) == pytest.approx(395.5e9, rel=0.01)
    assert rates.nvlink_bytes_per_s(3, 14.062e9) < 14.062e9
    assert rates.upi_bytes_per_s(12) > rates.upi_bytes_per_s(21)
    assert rates.upi_bytes_per_s(None) == rates.upi_bytes_per_s(32)
