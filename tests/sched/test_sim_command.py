"""`sim` and `bench sched` as a user runs them."""

import json
import math
import re

import pytest

from jax_turbobus import sim
from jax_turbobus.__main__ import main
from jax_turbobus.topology import Topology


def test_sim_prints_every_policy_and_its_json_agrees(capsys):
    assert main(["sim", "dgx-v100"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in sim.POLICIES)
    assert main(["sim", "dgx-v100", "--json"]) == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    direct, pooled = (policies[p]["durations_ns"][0] for p in ("direct", "pooled"))
    assert 1.95 < direct / pooled < 2.01


@pytest.mark.parametrize(
    ("workload", "columns"),
    [
        ("one", ["to", "GPU", "0"]),
        ("rounds", ["A", "B"]),
        ("bimodal", ["all", "large", "small"]),
    ],
)
def test_sim_says_what_its_columns_are(workload, columns, capsys):
    assert main(["sim", "2xh200", "--workload", workload]) == 0
    heading = capsys.readouterr().out.splitlines()[1]
    assert heading.split() == ["policy", *columns]


@pytest.mark.parametrize("name", ["nowhere", "cpu"])
def test_sim_refuses_machines_it_cannot_simulate(name, capsys):
    assert main(["sim", name]) == 2
    assert "topology" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("workload", "message"),
    [("neighbours", "within 2**62 ns"), ("bimodal", "too slow for this workload")],
)
def test_sim_of_links_that_take_centuries_is_refused(
    workload, message, tmp_path, capsys
):
    text = Topology.load("2xh200").to_json()
    slow = re.sub(r"(bytes_per_s\": )[0-9.e+]+", r"\g<1>1", text)
    assert slow != text
    path = tmp_path / "slow.json"
    path.write_text(slow)
    assert main(["sim", str(path), "--workload", workload]) == 2
    assert message in capsys.readouterr().err


def test_simulate_takes_the_name_of_a_topology():
    job = [sim.Transfer(0, 1 << 30)]
    by_name = sim.simulate("2xh200", job)
    assert by_name.finish_ns == sim.simulate(Topology.load("2xh200"), job).finish_ns


def background(bytes_per_s, start_ns=0, end_ns=10, resource="pcie0 both ways"):
    return [sim.Background(resource, bytes_per_s, start_ns, end_ns)]


@pytest.mark.parametrize(
    ("transfer", "arguments", "error", "message"),
    [
        (
            (0, 1 << 62),
            {},
            ValueError,
            r"transfers\[0\].size_bytes: expected 0 to 70",
        ),
        (
            (0, 1 << 70),
            {},
            ValueError,
            r"transfers\[0\].size_bytes: expected 0 to 70",
        ),
        ((0, 1 << 45), {}, ValueError, "transfers: expected at most 1048576 blocks"),
        ((0, -1), {}, ValueError, r"transfers\[0\].size_bytes: expected 0"),
        ((0, 1.5), {}, TypeError, r"transfers\[0\].size_bytes: expected a whole"),
        ((0, "a"), {}, TypeError, r"transfers\[0\].size_bytes: expected a whole"),
        (("0", 1), {}, TypeError, r"transfers\[0\].gpu: expected a whole"),
        ((2, 1), {}, ValueError, r"transfers\[0\].gpu: expected 0 to 1, got 2"),
        ((0, 1, math.nan), {}, TypeError, r"transfers\[0\].arrival_ns: expected a who"),
        ((0, 1, 1 << 63), {}, ValueError, r"transfers\[0\].arrival_ns: expected 0 to"),
        ((0, 1, 0, "up"), {}, ValueError, r"transfers\[0\].direction: expected 'h2d'"),
        ((0, 1, 0, "h2d", 9), {}, ValueError, r"transfers\[0\].numa_node: expected 0"),
        ((0, 1), {"policy": "best"}, ValueError, "policy: expected a Policy or one of"),
        ((0, 1), {"policy": []}, ValueError, "policy: expected a Policy or one of"),
        ((0, 1), {"max_links": 0}, ValueError, "max_links: expected 1 to"),
        ((0, 1), {"max_links": "2"}, TypeError, "max_links: expected a whole number"),
        ((0, 1), {"topology": "nope"}, ValueError, "topology: expected one of"),
        ((0, 1), {"topology": 5}, TypeError, "topology: expected the name of"),
        ((0, 1), {"transfers": 5}, TypeError, "transfers: expected a sequence of"),
        ((0, 1), {"transfers": [5]}, TypeError, r"transfers\[0\]: expected a Transfer"),
        ((0, 1), {"background": background(math.nan)}, ValueError, "bytes_per_s: expe"),
        ((0, 1), {"background": background(-1.0)}, ValueError, "bytes_per_s: expected"),
        ((0, 1), {"background": background("1")}, TypeError, "bytes_per_s: expected a"),
        ((0, 1), {"background": background(1, 5, 4)}, ValueError, r"\].end_ns: expect"),
        ((0, 1), {"background": background(1, resource=3)}, ValueError, "resource: ex"),
    ],
)
def test_wrong_simulations_are_refused_by_name(transfer, arguments, error, message):
    known = {"topology": "2xh200", "transfers": [sim.Transfer(*transfer)]}
    with pytest.raises(error, match=message):
        sim.simulate(**known | arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_bytes": 0}, ValueError, "policy.block_bytes: expected 1 to"),
        ({"block_bytes": 1.5}, TypeError, "policy.block_bytes: expected a whole"),
        ({"chunk_bytes": 1}, ValueError, "policy.chunk_bytes: expected 16777216 to"),
        ({"allocation": "luck"}, ValueError, "policy.allocation: expected one of"),
    ],
)
def test_wrong_policies_are_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        sim.simulate("2xh200", [], sim.POLICIES["pooled"].replace(**changes))


def test_bench_sched_has_decision_rows(capsys):
    assert main(["bench", "sched", "--blocks", "4000", "--no-check"]) == 0
    assert "decisions" in capsys.readouterr().out


def test_h800_reaches_the_papers_figures():
    topology, job = Topology.load("8xh800"), [sim.Transfer(0, 4 << 30)]
    direct = sim.simulate(topology, job, "direct").makespan_ns
    assert direct / sim.simulate(topology, job, "equal", max_links=4).makespan_ns > 3.55
    assert direct / sim.simulate(topology, job, "equal").makespan_ns < 3.05
    assert direct / sim.simulate(topology, job).makespan_ns > 3.5


@pytest.mark.parametrize("mib", [16, 32, 64, 128, 256])
def test_middling_transfers_lose_little_to_equal_shares_where_caps_are_shared(mib):
    job = [sim.Transfer(0, mib << 20)]
    equal = sim.simulate("8xh800", job, "equal", max_links=4).makespan_ns
    assert sim.simulate("8xh800", job).makespan_ns < 1.2 * equal


def test_chunks_and_block_allocation_cut_the_mean_of_mixed_sizes(capsys):
    assert main(["sim", "dgx-v100", "--workload", "bimodal", "--json"]) == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    mean = {name: sum(p["durations_ns"]) for name, p in policies.items()}
    assert mean["pooled"] < 0.85 * mean["no-chunks"]
    assert mean["pooled"] < 0.85 * mean["transfer"]
    assert mean["pooled"] < 0.7 * mean["direct"]
