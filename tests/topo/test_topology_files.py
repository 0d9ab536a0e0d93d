"""Files: the shipped ones, what is refused and how, reading back what was written."""

import copy
import importlib.resources
import json
import math
import os
import pathlib
import pickle

import pytest
from topo_fakes import load, valid

from jax_turbobus import topology as topology_lib
from jax_turbobus.topology import Topology, names

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", names())
def test_shipped_files_load_and_are_written_as_they_are(name):
    topology = Topology.load(name)
    assert topology.name == name
    shipped = importlib.resources.files("jax_turbobus") / "topologies"
    file = shipped / f"{name}.json"
    assert topology.to_json() == file.read_text(encoding="utf-8")
    assert json.loads(topology.to_json())["version"] == 1


def test_the_papers_machines_are_shipped():
    assert {"dgx-v100", "rtx3090-pairs", "8xh800", "4xrtx4090", "2xh200", "cpu"} <= set(
        names()
    )


def test_dgx_v100_has_two_links_to_pool():
    topology = Topology.load("dgx-v100")
    assert [group.gpus for group in topology.link_groups] == [(0, 1), (2, 3)]
    assert {path.relay for path in topology.paths(0, "h2d")} == {None, 2, 3}
    assert topology.pooled_bandwidth(0, "h2d") == pytest.approx(2 * 12.3e9)


def test_rtx3090_pairs_relay_within_a_pair_only():
    topology = Topology.load("rtx3090-pairs")
    assert topology.can_relay(0, 1)
    assert topology.can_relay(3, 2)
    assert not topology.has_peer_access(1, 2)
    assert topology.peer_paths(1, 2)[0].kind == "host"
    assert topology.pooled_bandwidth(0, "d2h") == pytest.approx(2 * 26.2e9)


def test_8xh800_pools_to_what_one_sockets_memory_gives():
    topology = Topology.load("8xh800")
    paths = topology.paths(0, "h2d")
    assert len(paths) == 8
    assert [p.relay for p in paths[:4]] == [None, 1, 2, 3], "its own socket first"
    assert topology.pooled_bandwidth(0, "h2d") == pytest.approx(3.6 * 55e9)
    remote = topology.paths(0, "h2d", numa_node=1)
    assert "upi" in {topology.links[link].type for link in remote[0].links}


def test_4xrtx4090_has_one_slow_link_and_nothing_to_pool():
    topology = Topology.load("4xrtx4090")
    assert [link.is_degraded for link in topology.links] == [False] * 3 + [True]
    assert all(len(topology.paths(gpu, "h2d")) == 1 for gpu in range(4))
    assert topology.peer_paths(0, 3)[0].bandwidth_bytes_per_s == 6.5e9


def test_2xh200_carries_the_measured_figures():
    topology = Topology.load("2xh200")
    assert topology.paths(0, "h2d")[0].bandwidth_bytes_per_s == 55.3e9
    assert topology.pooled_bandwidth(0, "h2d") == pytest.approx(110.6e9)
    assert topology.peer_paths(0, 1)[0].bandwidth_bytes_per_s == 395.5e9


def test_the_cpu_file_has_no_lanes():
    topology = Topology.load("cpu")
    assert topology.gpus == ()
    assert topology.lanes().paths == []


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.json")), ids=lambda p: p.stem)
def test_golden_plans_are_unchanged(file):
    """Paths, groups and lanes of the shipped machines, as first reviewed."""
    assert describe(Topology.load(file.stem)) == json.loads(file.read_text())


def test_every_shipped_machine_has_a_golden_plan():
    assert {file.stem for file in GOLDEN.glob("*.json")} == set(names())


def describe(topology):
    def way(path):
        links = " ".join(topology.links[link].id for link in path.links)
        return [links, path.bandwidth_bytes_per_s, path.latency_ns]

    plan = topology.lanes()
    ends = {topology.gpus[0], topology.gpus[-1]} if topology.gpus else set()
    shown = sorted(ends, key=lambda gpu: gpu.index)
    return {
        "link_groups": [list(group.gpus) for group in topology.link_groups],
        "paths": {
            f"gpu{gpu.index} {direction} numa{node.index}": [
                ["direct" if p.relay is None else f"by gpu{p.relay}", *way(p)]
                for p in topology.paths(gpu.index, direction, node.index)
            ]
            for gpu in shown
            for direction in ("h2d", "d2h")
            for node in topology.numa_nodes
        },
        "best_peer_path": {
            f"gpu{a.index} gpu{b.index}": [p.kind, p.via, *way(p)]
            for a in shown
            for b in topology.gpus
            if a != b
            for p in topology.peer_paths(a.index, b.index)[:1]
        },
        "num_lanes": len(plan.paths),
        "caps": {cap.name: cap.bandwidth_bytes_per_s for cap in plan.caps},
        "pooled": {
            direction: [
                topology.pooled_bandwidth(g.index, direction) for g in topology.gpus
            ]
            for direction in ("h2d", "d2h")
        },
    }


def test_a_full_file_reads_back_as_itself(tmp_path):
    topology = load(valid())
    assert topology.links[1].is_degraded
    assert topology.gpus[0].numa_node == 0
    topology.save(tmp_path / "t.json")
    again = Topology.load(tmp_path / "t.json")
    assert again == topology
    assert hash(again) == hash(topology)
    assert again != Topology.load("cpu")
    assert (again.gpus, again.links, again.link_groups) == (
        topology.gpus,
        topology.links,
        topology.link_groups,
    )


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda topology: pickle.loads(pickle.dumps(topology))],
)
def test_a_topology_can_be_copied_and_pickled(again):
    topology = Topology.load("dgx-v100")
    assert again(topology) == topology
    assert again(topology).links == topology.links


def test_what_has_no_end_is_not_read(tmp_path):
    for path in ("/dev/zero", tmp_path / "pipe.json"):
        if path == tmp_path / "pipe.json":
            os.mkfifo(path)
        with pytest.raises(ValueError, match="cannot be read: it is not a regular fi"):
            Topology.load(path)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 33)  # sparse: more than there is memory for
    with pytest.raises(ValueError, match="expected at most 4 MiB, got 4194305 bytes"):
        Topology.load(large)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: Topology.from_json(5), TypeError, "text: expected the content of"),
        (lambda t: Topology.from_json("{}", 5), TypeError, "source: expected a str"),
        (lambda t: Topology.load(5), TypeError, "topology: expected the name of a"),
        (lambda t: t.paths("0", "h2d"), TypeError, "gpu: expected a whole number, got"),
        (lambda t: t.paths(1.5, "h2d"), TypeError, "gpu: expected a whole number, got"),
        (lambda t: t.paths(2**40, "h2d"), ValueError, "gpu: expected 0 to 1, got 1099"),
        (lambda t: t.paths(0, "h2d", "a"), TypeError, "numa_node: expected a whole"),
        (lambda t: t.paths(0, "h2d", 9), ValueError, "numa_node: expected 0 to"),
        (lambda t: t.paths(0, 5), ValueError, "direction: expected 'h2d' or 'd2h'"),
        (lambda t: t.peer_paths(0, None), TypeError, "dst: expected a whole number"),
        (lambda t: t.can_relay(0, -1), ValueError, "relay: expected 0 to 1, got -1"),
        (lambda t: t.has_peer_access("a", 0), TypeError, "a: expected a whole number"),
        (lambda t: t.pooled_bandwidth({}, "h2d"), TypeError, "gpu: expected a whole"),
        (lambda t: t.lanes(["0"]), TypeError, "numa_node: expected a whole number"),
        (lambda t: topology_lib.path_score("a", 1), TypeError, "bandwidth_bytes_per_s"),
        (
            lambda t: topology_lib.path_score(math.nan, 1),
            ValueError,
            "a number above 0",
        ),
        (lambda t: topology_lib.path_score(1e9, -1), ValueError, "latency_ns: expect"),
        (lambda t: topology_lib.path_score(1, 1.5), TypeError, "latency_ns: expected"),
        (lambda t: topology_lib.path_score(1, 1, -1), ValueError, "size_bytes: expec"),
        (lambda t: topology_lib.path_score(1, 1, 1 << 70), ValueError, "size_bytes"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(Topology.load("2xh200"))


def without(key, *where):
    def edit(data):
        for step in where:
            data = data[step]
        del data[key]

    return edit


def put(value, *where):
    def edit(data):
        for step in where[:-1]:
            data = data[step]
        data[where[-1]] = value

    return edit


def again(*where):
    def edit(data):
        for step in where:
            data = data[step]
        data.append(data[0])

    return edit


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (without("links"), ["links", "no such field", "add it"]),
        (without("b", "links", 2), ["links[2].b", "id of a node", "no such field"]),
        (put(-1, "links", 2, "a_to_b_bytes_per_s"), ["links[2].a_to_b", "got -1"]),
        (put(math.nan, "links", 2, "a_to_b_bytes_per_s"), ["NaN", "not JSON"]),
        (put(1e300, "links", 2, "a_to_b_bytes_per_s"), ["1 to 1e15", "1e+300"]),
        (put(True, "links", 2, "a_to_b_bytes_per_s"), ["links[2].a_to_b", "got true"]),
        (put("gpu7", "links", 2, "b"), ["links[2].b", "gpu0, gpu1", '"gpu7"']),
        (put("gpu0", "links", 2, "a"), ["gpu1", "way to host memory"]),
        (again("links"), ['links[5] ("up").id', "no other link", "links[0]"]),
        (again("gpus"), ["gpus[2].id", "no other node", "gpus[0]"]),
        (put("v1", "version"), ["version", "whole number", '"v1"']),
        (put(7, "version"), ["version", "expected 1, got 7", "another release"]),
        (put("x", "format"), ["format", "not a topology file"]),
        (put(3, "gpus"), ["gpus", "an array", "got 3"]),
        (put([], "numa_nodes"), ["gpus[1].numa_node", "NUMA node of this", '"numa1"']),
        (put([{"id": "gpu2"}], "gpus"), ["links[1].b", '"gpu0"']),
        (put("numa7", "gpus", 0, "numa_node"), ["gpus[0].numa_node", "numa0, numa1"]),
        (put("GPU-a", "gpus", 1, "uuid"), ["gpus[1]", "uuid", "list each GPU once"]),
        (put(["gpu0"], "link_groups", 0, "gpus"), ["two GPUs or more"]),
        (put([["gpu0", "gpu0"]], "peer_access"), ["peer_access[0]", "two different"]),
        (put(5, "links", 1, "max_width"), ["links[1]", "at most max_width = 5, got 8"]),
        (put(1, "links", 1, "duplex_bytes_per_s"), ["links[1]", "from 11000000000"]),
        (put(1, "speed"), ["the field", '"speed"', "correct its name or remove it"]),
        (put("a\0b", "name"), ["name", "NUL"]),
    ],
)
def test_a_bad_file_is_refused_with_file_field_expected_and_got(edit, parts):
    data = valid()
    edit(data)
    with pytest.raises(ValueError, match=r"^topology m\.json: ") as raised:
        load(data)
    for part in parts:
        assert part in str(raised.value)


def test_a_gpu_without_a_link_is_refused():
    data = valid()
    data["links"] = [link for link in data["links"] if link["id"] != "p1"]
    with pytest.raises(ValueError, match=r"gpu1.*way to host memory.*add the link"):
        load(data)


def test_truncated_and_empty_files_say_so(tmp_path):
    text = json.dumps(valid(), indent=1)
    for end in range(0, len(text), 37):
        with pytest.raises(ValueError, match=r"topology cut: line \d+"):
            Topology.from_json(text[:end], "cut")


def test_unreadable_files_say_why(tmp_path):
    with pytest.raises(ValueError, match=r"No such file.*one of"):
        Topology.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="Is a directory"):
        Topology.load(tmp_path)
    with pytest.raises(ValueError, match="embedded null"):
        Topology.load("a\0b.json")
    with pytest.raises(ValueError, match=r"expected one of 2xh200.*got 'dgx'"):
        Topology.load("dgx")
    (tmp_path / "latin1.json").write_bytes(b'{"format": "\xe9"}')
    with pytest.raises(ValueError, match="UTF-8"):
        Topology.load(tmp_path / "latin1.json")
    with pytest.raises(ValueError, match=r"surrogate|UTF-8"):
        Topology.from_json('{"format": "\ud800"}')
    (tmp_path / "big.json").write_bytes(b" " * (5 << 20))
    with pytest.raises(ValueError, match="at most 4 MiB"):
        Topology.load(tmp_path / "big.json")


def test_indices_out_of_range_are_refused():
    topology = Topology.load("2xh200")
    with pytest.raises(ValueError, match="gpu: expected 0 to 1, got 2"):
        topology.paths(2, "h2d")
    with pytest.raises(ValueError, match="numa_node: expected 0 to 0, got -1"):
        topology.paths(0, "h2d", -1)
    with pytest.raises(
        ValueError, match="direction: expected 'h2d' or 'd2h', got 'up'"
    ):
        topology.paths(0, "up")
    with pytest.raises(ValueError, match="dst: expected a GPU other than src"):
        topology.peer_paths(1, 1)
    with pytest.raises(ValueError, match="numa_node"):
        topology.lanes([3])
    with pytest.raises(ValueError, match="gpu: expected"):
        Topology.load("cpu").pooled_bandwidth(0, "h2d")


def test_path_score_prefers_the_path_that_ends_sooner():
    fast, near = (10e9, 50_000), (1e9, 1_000)
    small, large = 1 << 10, 1 << 30
    score = topology_lib.path_score
    assert score(*near, small) > score(*fast, small)
    assert score(*fast, large) > score(*near, large)
