"""The table for GPUs runs tiny on CPU devices, every case of it."""

import argparse
import json
import pathlib
import re
import types

import jax
import pytest

from jax_turbobus.bench import experts, experts_gpu, peers
from jax_turbobus.bench._experts_bounds import best_bound
from jax_turbobus.bench._report import Timing
from jax_turbobus.bench.experts_gpu import _kernels, layers, overlap, parts, steps
from jax_turbobus.bench.experts_gpu._kernels import kernel_seconds
from jax_turbobus.bench.experts_gpu._setup import Setup
from jax_turbobus.moe._traffic import ExchangeShape


def setup_of(has_peers):
    return Setup(jax.devices()[:2], rounds=1, shrink=256, has_peers=has_peers)


def wrong(rows):
    return [
        row
        for row in rows
        if row.failed and ("error" in row.metric or "off from" in row.metric)
    ]


@pytest.mark.parametrize("has_peers", [True, False])
@pytest.mark.parametrize(
    "case", [name for name in experts_gpu.CASES if name != "layers"]
)
def test_every_case_runs_and_is_exact(case, has_peers, monkeypatch):
    monkeypatch.setattr(parts, "SIZES", layers.SIZES[1:2])
    name = [*steps._MODELS][has_peers]
    monkeypatch.setattr(steps, "_MODELS", {name: steps._MODELS[name]})
    rows = list(experts_gpu.CASES[case](setup_of(has_peers)))
    assert rows
    assert not wrong(rows)
    assert len({(row.case, row.metric, row.peer_name) for row in rows}) == len(rows)


def test_the_layers_are_compared_at_each_size_alone_and_eight_in_a_program(monkeypatch):
    asked = []
    monkeypatch.setattr(experts, "compare", lambda args: asked.append(args) or [])
    for has_peers in (True, False):
        setup = Setup(jax.devices()[:2], rounds=1, shrink=1, has_peers=has_peers)
        assert list(experts_gpu.CASES["layers"](setup)) == []
        sizes = [(a.tokens, a.hidden, a.experts, a.topk, a.layers) for a in asked]
        assert sizes == [(*size, n) for size in layers.SIZES for n in (1, 8)]
        everyone = set(peers.EXACT) - (set() if has_peers else {"ragged_all_to_all"})
        assert all(set(a.only.split(",")) == everyone for a in asked)
        assert all(a.has_peers is has_peers for a in asked)
        assert all("1.25" in a.slack and not a.forward_only for a in asked)
        asked.clear()


def test_two_layers_at_a_tiny_size(monkeypatch):
    monkeypatch.setattr(layers, "_NUM_LAYERS", (1, 2))
    monkeypatch.setattr(layers, "SIZES", [(128, 64, 8, 2)])
    monkeypatch.setattr(layers, "_exact", lambda setup: ["allgather_filter"])
    setup = Setup(jax.devices()[:2], rounds=1, shrink=1, has_peers=False)
    rows = list(experts_gpu.CASES["layers"](setup))
    assert len({(row.case, row.metric, row.peer_name) for row in rows}) == len(rows)
    for num_layers, unit in ((1, "ms"), (2, "ms a layer")):
        these = [row for row in rows if row.program == {"layers": num_layers}]
        for metric in ("forward", "forward + backward"):
            (row,) = [row for row in these if row.metric == f"{metric}, {unit}"]
            assert row.peer_name == "allgather_filter"
        errors = [row for row in these if "largest error" in row.metric]
        assert len(errors) == 2 * 2
        assert not any(row.failed or row.note for row in errors)
    (counted,) = [row for row in rows if "exchange_stats" in row.metric]
    assert counted.ratio == 1


def test_a_step_with_a_wrong_exchange_is_caught(monkeypatch):
    def off(case, *arguments):
        return peers.one_copy_padded(case, *arguments) * 1.05

    monkeypatch.setattr(steps, "_PEERS", ("one_copy_padded",))
    monkeypatch.setattr(steps, "_MODELS", {"tiny": (32, 64, 64, 8, 2)})
    monkeypatch.setitem(peers.EVERYONE, "one_copy_padded", off)
    rows = list(steps.steps(setup_of(has_peers=True)))
    assert {row.metric.split(",")[0] for row in wrong(rows)} == {"loss", "gradients"}


def test_of_a_step_the_exchange_is_what_the_experts_do_not_take():
    def row_of(ours, peer, alone):
        times = {"ours": ours, "a peer": peer, "experts alone": alone}
        timings = {name: Timing(seconds) for name, seconds in times.items()}
        rows = steps._times("case", timings, "ours", "a peer")
        return {row.metric: row for row in rows}

    # Rounds drift; what is left of each does not.
    rows = row_of((11.0, 21.0, 12.0), (14.0, 24.0, 15.0), (10.0, 20.0, 11.0))
    assert rows["exchange in the step, ms"].ratio == 0.25
    assert rows["exchange in the step, ms"].ok
    share = rows["exchange's share of the step"]
    assert (share.ours, share.peer) == (1 / 12, 4 / 15)
    noise = row_of((9.0,) * 3, (14.0,) * 3, (10.0,) * 3)
    assert all(noise[m].failed for m in noise if m.startswith("exchange"))


def test_chunks_that_compute_something_else_are_caught(monkeypatch):
    real = overlap.moe.expert_parallel

    def off(*args, num_chunks, **kwargs):
        return real(*args, num_chunks=num_chunks, **kwargs) * (1 + 0.1 * num_chunks)

    monkeypatch.setattr(overlap.moe, "expert_parallel", off)
    rows = list(overlap.overlap(setup_of(has_peers=True)))
    assert [row.metric.split(":")[1] for row in wrong(rows)] == [" 4 chunks"]


def test_hidden_is_what_chunks_save_of_what_the_layer_adds_to_its_experts():
    times = {"experts": 4.0, "1": 8.0, "2": 6.5, "4": 5.0, "8": 7.0}
    timings = {name: Timing((t, t + 1, t)) for name, t in times.items()}
    best, rows = overlap._shares("case", "forward", timings, (2, 4, 8))
    assert best == 4
    shares = {row.metric: row for row in rows if "share" in row.metric}
    four = shares["forward: 4 chunks: hidden share of the exchange"]
    assert (four.ours, four.peer) == (0.75, 0.75)  # all that four chunks can hide
    two = shares["forward: 2 chunks: hidden share of the exchange"]
    assert (two.ours, two.peer) == (0.375, 0.5)


@pytest.mark.parametrize(
    ("num_chunks", "experts", "most"),
    [(1, 8, 0), (2, 8, 4), (4, 8, 6), (8, 8, 7), (2, 2, 2), (4, 4, 4), (4, 1e9, 6)],
)
def test_first_dispatch_and_last_combine_cannot_be_hidden(num_chunks, experts, most):
    assert overlap._can_hide(num_chunks, 8, experts) == most


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


def test_kernels_are_steps_by_their_names():
    inside = "turbobus::moe::cuda::(anonymous namespace)::"
    seconds = {
        f"void {inside}Send<int4>({inside}Shape, int)": 4.0,
        f"void {inside}Sum<float, float>({inside}Shape)": 2.0,
        f"{inside}SmallPlan(int)": 1.0,
        f"void {inside}Partial<bf16>(Sum<int>)": 0.5,
        "MemcpyP2P": 8.0,
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": 16.0,
        "loop_multiply_fusion": 32.0,
        "SumRowsOfSomebody<int>()": 64.0,
    }
    assert _kernels.by_step(seconds) == {
        "count": 1.0,
        "pack": 0.0,
        "send": 12.0,
        "expand": 0.0,
        "partial sums": 0.5,
        "sums": 2.0,
        "experts": 112.0,
    }
    assert _kernels.matmul_seconds(seconds) == 16.0
    assert _kernels.copy_seconds(seconds) == 8.0


def test_the_parts_are_all_that_a_gpu_works(monkeypatch):
    seconds = {"Send<int>": 3e-6, "MemcpyD2H": 2e-6, "loop_fusion": 5e-6}
    monkeypatch.setattr(parts, "SIZES", layers.SIZES[2:])
    monkeypatch.setattr(parts, "kernel_seconds", lambda run: seconds)
    rows = list(parts.parts(setup_of(has_peers=False)))
    found = {row.metric: row for row in rows}
    assert found["forward: a GPU works, us"].ours == pytest.approx(10)
    assert found["forward: the exchange's kernels, us"].ours == pytest.approx(3)
    assert found["forward: copies, us"].ours == pytest.approx(2)
    send = found["forward + backward: send, us"]
    assert (send.ours, send.note) == (pytest.approx(5), "50.0% of what the GPU works")


def test_our_kernels_are_all_in_a_step():
    named = {name for names in _kernels.STEPS.values() for name in names}
    sources = pathlib.Path(__file__).parents[2] / "cc/moe/cuda"
    for path in sources.glob("*.cu"):
        if path.name.startswith("ragged"):
            continue
        text = re.sub(r"__launch_bounds__\(\w+\)", "", path.read_text())
        for kernel in re.findall(r"__global__ void\s+(\w+)\(", text):
            assert kernel in named, f"{path.name}: {kernel}"


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
