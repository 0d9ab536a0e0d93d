"""The offload benchmark runs and asks for what it should."""

import argparse

from jax_turbobus.bench import offload, offload_gpu


def test_rows_of_small_and_large_transfers():
    parser = argparse.ArgumentParser()
    offload.add_arguments(parser)
    rows = offload.run(parser.parse_args(["--rounds", "1", "--max-mib", "16"]))
    bounds = {row.metric: row.required for row in rows if row.required}
    assert bounds == {"own time, us": "< 30", "GB/s": ">= 0.9"}
    assert sum(row.metric == "GB/s" for row in rows) == 5
    assert all(row.ours > 0 for row in rows if row.metric != "own time, us")


def test_the_programs_of_the_gpu_suite_are_right_on_cpu_devices():
    """Tiny arrays: what they move is checked, how fast means nothing."""
    parser = argparse.ArgumentParser()
    offload_gpu.add_arguments(parser)
    options = ["--platform", "cpu", "--shrink", "8192", "--rounds", "1"]
    cases = ["one-way", "both-ways", "fetch", "adam", "overlap", "layers"]
    rows = offload_gpu.run(parser.parse_args([*options, "--only", *cases]))
    assert [row for row in rows if row.metric == "failed"] == []
    assert len(rows) > 20
