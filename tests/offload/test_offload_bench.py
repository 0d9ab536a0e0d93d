"""The offload benchmark runs and asks for what it should."""

import argparse

from jax_turbobus.bench import offload


def test_rows_of_small_and_large_transfers():
    parser = argparse.ArgumentParser()
    offload.add_arguments(parser)
    rows = offload.run(parser.parse_args(["--rounds", "1", "--max-mib", "16"]))
    bounds = {row.metric: row.required for row in rows if row.required}
    assert bounds == {"own time, us": "< 30", "GB/s": ">= 0.9"}
    assert sum(row.metric == "GB/s" for row in rows) == 5
    assert all(row.ours > 0 for row in rows if row.metric != "own time, us")
