"""`sim` and `bench sched` as a user runs them."""

import json

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


@pytest.mark.parametrize("name", ["nowhere", "cpu"])
def test_sim_refuses_machines_it_cannot_simulate(name, capsys):
    assert main(["sim", name]) == 2
    assert "topology" in capsys.readouterr().err


def test_bench_sched_has_decision_rows(capsys):
    assert main(["bench", "sched", "--blocks", "4000", "--no-check"]) == 0
    assert "decisions" in capsys.readouterr().out


def test_h800_reaches_the_papers_figures():
    topology, job = Topology.load("8xh800"), [sim.Transfer(0, 4 << 30)]
    direct = sim.simulate(topology, job, "direct").makespan_ns
    assert direct / sim.simulate(topology, job, "equal", max_links=4).makespan_ns > 3.55
    assert direct / sim.simulate(topology, job, "equal").makespan_ns < 3.05
    assert direct / sim.simulate(topology, job).makespan_ns > 3.5


def test_chunks_and_block_allocation_cut_the_mean_of_mixed_sizes(capsys):
    assert main(["sim", "dgx-v100", "--workload", "bimodal", "--json"]) == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    mean = {name: sum(p["durations_ns"]) for name, p in policies.items()}
    assert mean["pooled"] < 0.85 * mean["no-chunks"]
    assert mean["pooled"] < 0.85 * mean["transfer"]
    assert mean["pooled"] < 0.7 * mean["direct"]
