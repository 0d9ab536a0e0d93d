"""The table for GPUs runs tiny on CPU devices, every case of it."""

import argparse
import json
import types

import jax
import pytest

from jax_turbobus.bench import experts, experts_gpu, peers
from jax_turbobus.bench._experts_bounds import best_bound
from jax_turbobus.bench.experts_gpu import layers, parts
from jax_turbobus.bench.experts_gpu._kernels import kernel_seconds
from jax_turbobus.bench.experts_gpu._setup import Setup
from jax_turbobus.moe._traffic import ExchangeShape


@pytest.mark.parametrize("has_peers", [True, False])
@pytest.mark.parametrize(
    "case", [name for name in experts_gpu.CASES if name != "layers"]
)
def test_every_case_runs_and_is_exact(case, has_peers, monkeypatch):
    monkeypatch.setattr(parts, "SIZES", layers.SIZES[1:2])
    setup = Setup(jax.devices()[:2], rounds=1, shrink=256, has_peers=has_peers)
    rows = list(experts_gpu.CASES[case](setup))
    assert rows
    wrong = [
        row
        for row in rows
        if row.failed and ("error" in row.metric or "off from" in row.metric)
    ]
    assert not wrong
    assert len({(row.case, row.metric, row.peer_name) for row in rows}) == len(rows)


def test_the_layers_are_compared_with_every_peer(monkeypatch):
    assert layers._NUM_LAYERS == (1, 8)
    monkeypatch.setattr(layers, "_NUM_LAYERS", (1, 2))
    monkeypatch.setattr(layers, "SIZES", [(128, 64, 8, 2)])
    setup = Setup(jax.devices()[:2], rounds=1, shrink=1, has_peers=True)
    rows = list(experts_gpu.CASES["layers"](setup))
    assert len({(row.case, row.metric, row.peer_name) for row in rows}) == len(rows)
    for num_layers, unit in ((1, "ms"), (2, "ms a layer")):
        these = [row for row in rows if row.program == {"layers": num_layers}]
        by_peer = {row.peer_name for row in these if row.metric == f"forward, {unit}"}
        assert by_peer == {"allgather_filter", "padded_all_to_all", "one_copy_padded"}
        errors = [row for row in these if "largest error" in row.metric]
        assert len(errors) == 2 * 4 * (2 if num_layers == 1 else 1)
        assert not any(row.failed or row.note for row in errors)


def test_both_programs_are_judged_at_the_sizes_asked(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for has_peers, forward in ((True, 1 / 1.5), (False, 1 / 1.3)):
        args = argparse.Namespace(route="uniform", only="", has_peers=has_peers)
        case = peers.Case(
            shape=ExchangeShape(128, 4096, 64, 2, 2, "bfloat16"), recv_capacity=320
        )
        for metric, bound in (("forward", forward), ("forward + backward", 1 / 1.8)):
            required = best_bound(case, "1.25", metric, args)
            assert float(required.removeprefix("<= ")) == pytest.approx(bound, 1e-3)


def test_a_case_that_fails_is_a_row(monkeypatch):
    def fail(setup):
        raise RuntimeError("no")
        yield setup

    monkeypatch.setitem(experts_gpu.CASES, "links", fail)
    args = argparse.Namespace(
        cases=["links"], access="peer", rounds=1, shrink=64, limit_s=0
    )
    (row,) = experts_gpu.run(args)
    assert row.failed


def test_there_are_no_kernels_on_a_cpu():
    assert kernel_seconds(lambda: jax.numpy.ones(8), calls=1) == {}


def test_options_of_one_size_are_refused_for_the_table(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    parser = argparse.ArgumentParser()
    experts.add_arguments(parser)
    with pytest.raises(ValueError, match="--dtype: is of one size: give --tokens"):
        experts.run(parser.parse_args(["--dtype", "bfloat16"]))


def test_gpus_without_access_are_measured_in_a_process_that_cuts_it(monkeypatch):
    seen = []

    def run(command, env, check):
        del check
        seen.append((command, env))
        with open(command[command.index("--json") + 1], "w", encoding="utf-8") as file:
            json.dump({"rows": []}, file)
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(experts_gpu.subprocess, "run", run)
    args = argparse.Namespace(
        cases=["links"], access="none", rounds=1, shrink=64, limit_s=9
    )
    assert experts_gpu.run(args) == []
    ((command, env),) = seen
    assert command[command.index("--limit-s") + 1] == "9"
    assert env["JAX_TURBOBUS_PEER_ACCESS"] == "0"
    assert env["NCCL_P2P_DISABLE"] == "1"
