"""Which schedule the model of links takes, and why."""

import json

import pytest
from volumes import choose

from jax_turbobus.__main__ import main


def test_peer_memory_is_written_directly():
    choice = choose("2xh200", num_ranks=2)
    assert choice.schedule == "direct"
    assert "relay" in choice.refused


def test_without_peer_access_rows_are_packed():
    choice = choose("4xrtx4090")
    assert choice.schedule == "packed"
    assert "reach each other's memory" in choice.refused["direct"]
    assert "pcie3" in choice.bottleneck, "the link with four lanes"
    assert choice.seconds["packed"] < choice.seconds["broadcast"]


def test_a_small_batch_takes_the_fewest_launches():
    assert choose("4xrtx4090", tokens_per_rank=8, top_k=8).schedule == "broadcast"
    assert choose("4xrtx4090", tokens_per_rank=16384, top_k=8).schedule == "packed"


def test_on_cpu_devices_bytes_and_passes_over_memory_decide():
    cpu = {"schedules": ("packed", "broadcast")}
    assert choose(**cpu).schedule == "packed"
    many = choose(num_ranks=2, top_k=8, tokens_per_rank=16, **cpu)
    assert many.schedule == "broadcast"


def test_a_choice_explains_itself():
    text = choose("4xrtx4090").explain()
    assert text.startswith("schedule: packed")
    for word in ("broadcast", "direct", "MiB", "busiest under packed: pcie3"):
        assert word in text
    assert "rates assumed" in choose().explain()


def test_schedules_that_cannot_run_are_refused():
    with pytest.raises(TypeError, match="schedules: expected a sequence of names"):
        choose(schedules="packed")
    with pytest.raises(TypeError, match="costs: expected a Costs"):
        choose(costs={})
    with pytest.raises(ValueError, match="schedules: expected some of packed, "):
        choose(schedules=("quick",))
    with pytest.raises(ValueError, match=r"none of .*direct.* can run"):
        choose("4xrtx4090", schedules=("direct",))


def test_the_command_reads_a_topology(capsys):
    assert main(["volume", "--topology", "4xrtx4090"]) == 0
    text = capsys.readouterr().out
    assert "pcie3 gpu3>numa0   6.6" in text
    assert "schedule: packed" in text
    assert main(["volume", "--topology", "no-such-machine"]) == 2
    assert "expected one of 2xh200" in capsys.readouterr().out
    assert main(["volume", "--topology", "4xrtx4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choice"]["schedule"] == "packed"
