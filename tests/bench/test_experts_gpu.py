"""The table for GPUs runs tiny on CPU devices, every case of it."""

import argparse
import dataclasses
import json
import pathlib
import re
import types

import jax
import pytest

from jax_turbobus import moe
from jax_turbobus.bench import _layer, experts, experts_gpu, peers, ragged
from jax_turbobus.bench._experts_bounds import best_bound, peer_bound
from jax_turbobus.bench._report import Timing
from jax_turbobus.bench.experts_gpu import (
    _kernels,
    layers,
    links,
    overlap,
    parts,
    skew,
    steps,
)
from jax_turbobus.bench.experts_gpu._kernels import kernel_seconds
from jax_turbobus.bench.experts_gpu._setup import Setup


def setup_of(has_peers):
    return Setup(jax.devices()[:2], rounds=1, shrink=256, has_peers=has_peers)


def wrong(rows):
    return [
        row
        for row in rows
        if row.failed and ("error" in row.metric or "off from" in row.metric)
    ]


OF_DENSE = (f"<= {1 / 1.3:.4g}",) * 2
OF_RAGGED = ("<= 0.02", None)
ERROR = "<= 0.03"
# Case -> a part of "case | metric | peer" -> what is asked of it with peer access, and
# without. What is asked of `layers` is below.
BOUNDS = {
    "drop_in": {
        "512 MiB, rows of 8 KiB | one exchange of several, us | lax.all": OF_DENSE,
        "x 32 MiB, rows of 8 KiB | one exchange of several, us | lax.all": OF_DENSE,
        "512 MiB, rows of 8 KiB | one exchange of several, us | lax.ragged": OF_RAGGED,
        "x 32 MiB, rows of 8 KiB | one exchange of several, us | lax.ragged": OF_RAGGED,
    },
    "skew": {
        "uniform, 8 layers in one program | ours: forward: largest error": ("<= 0",)
        * 2,
        "zipf:1.0, 8 layers in one program | ours: forward: largest error": ("<= 0",)
        * 2,
        "the hottest rank's rows | uniform, scaled": ("<= 1",) * 2,
    },
    "overlap": {
        "share of the exchange hidden, ": (None, ">= 0.6"),
        "largest error over largest value of 1 chunk": (ERROR,) * 2,
    },
    "steps": {
        "exchange in the step, ms": ("<= 0.5",) * 2,
        "exchange's share of the step": ("<= 0.5",) * 2,
        "loss, off from that of": ("<= 0.01",) * 2,
        "gradients, off from those of": (ERROR,) * 2,
    },
    "links": {
        "the whole dispatch, GB/s sent": (">= 300", None),
        "send kernel, GB/s sent": (">= 340", None),
        "GB/s sent, both ways at once | lax.all_to_all": (None, ">= 1.9"),
    },
    "parts": {},
}


def judged(rows, case, has_peers):
    """Whether just what is to be asked is asked."""
    asked = {key: pair[not has_peers] for key, pair in BOUNDS[case].items()}
    asked = {key: bound for key, bound in asked.items() if bound}
    seen = set()
    for row in rows:
        if row.required:
            name = f"{row.case} | {row.metric} | {row.peer_name}"
            (key,) = [key for key in asked if key in name] or [name]
            assert row.required == asked[key]
            seen.add(key)
    return seen == set(asked)


def like_gpus(monkeypatch):
    """Lets CPU devices stand in for what only GPUs have."""
    monkeypatch.setattr(ragged, "_is_on_gpus", lambda: True)
    monkeypatch.setattr(ragged.lax, "ragged_all_to_all", moe.ragged_all_to_all)
    monkeypatch.setattr(ragged, "_MIB", 1 << 12)
    for name in ("_CHAIN", "_LARGE_CHAIN", "_RAGGED_CHAIN", "_LARGE_RAGGED_CHAIN"):
        monkeypatch.setattr(ragged, name, 1)
    monkeypatch.setattr(links, "kernel_seconds", lambda run: {"Send<int4>": 1e-6})


@pytest.mark.parametrize("has_peers", [True, False])
@pytest.mark.parametrize(
    "case", [name for name in experts_gpu.CASES if name != "layers"]
)
def test_every_case_runs_and_is_exact(case, has_peers, monkeypatch):
    monkeypatch.setattr(parts, "SIZES", layers.SIZES[1:2])
    name = [*steps._MODELS][has_peers]
    monkeypatch.setattr(steps, "_MODELS", {name: steps._MODELS[name]})
    like_gpus(monkeypatch)
    shrink = 1 if case == "drop_in" else 256
    setup = Setup(jax.devices()[:2], rounds=1, shrink=shrink, has_peers=has_peers)
    rows = list(experts_gpu.CASES[case](setup))
    assert rows
    assert not wrong(rows)
    assert judged(rows, case, has_peers)
    assert len({(row.case, row.metric, row.peer_name) for row in rows}) == len(rows)


@pytest.mark.parametrize("has_peers", [True, False])
def test_the_layers_are_compared_at_each_size_alone_and_eight_in_a_program(has_peers):
    setup = Setup(jax.devices()[:2], rounds=1, shrink=1, has_peers=has_peers)
    asked = list(layers.comparisons(setup))
    sizes = [(*dataclasses.astuple(c.shape)[:4], c.num_layers) for c in asked]
    assert sizes == [(*size, n) for size in layers.SIZES for n in (1, 8)]
    everyone = set(peers.EXACT) - (set() if has_peers else {"ragged_all_to_all"})
    assert all(set(c.peers[1.25]) == everyone for c in asked)
    # Without a capacity, too, of single layers: at every size, with peers or without.
    assert [None in c.peers for c in asked] == [c.num_layers == 1 for c in asked]
    assert all(c.has_peers is has_peers and c.has_backward for c in asked)


def test_two_layers_at_a_tiny_size(monkeypatch):
    monkeypatch.setattr(layers, "_NUM_LAYERS", (1, 2))
    monkeypatch.setattr(layers, "SIZES", [(128, 64, 8, 2)])
    monkeypatch.setattr(layers, "_exact", lambda setup: ["allgather_filter"])
    setup = Setup(jax.devices()[:2], rounds=1, shrink=1, has_peers=False)
    rows = list(experts_gpu.CASES["layers"](setup))
    assert len({(row.case, row.metric, row.peer_name) for row in rows}) == len(rows)
    for num_layers, unit in ((1, "ms"), (2, "ms a layer")):
        program = {"layers": num_layers}
        these = [
            row for row in rows if row.program == program and "dropless" not in row.case
        ]
        for metric in ("forward", "forward + backward"):
            (row,) = [row for row in these if row.metric == f"{metric}, {unit}"]
            assert row.peer_name == "allgather_filter"
        errors = [row for row in these if "largest error" in row.metric]
        assert len(errors) == 2 * 2
        assert not any(row.failed or row.note for row in errors)
    (counted,) = [row for row in rows if "exchange_stats" in row.metric]
    assert (counted.ratio, counted.required) == (1, "== 1")
    dropless = [row for row in rows if "dropless" in row.case]
    assert {row.peer_name for row in dropless} == {None, "allgather_filter"}


def test_whom_dropless_leaves_out_is_said(monkeypatch):
    monkeypatch.setattr(layers, "compare", lambda comparison: [])
    rows = list(layers.layers(setup_of(has_peers=True)))
    assert [row.metric for row in rows] == [
        "not measured: padded_all_to_all, ragged_all_to_all"
    ] * 3
    assert all("dropless" in row.case and row.note for row in rows)


def test_zipf_is_exact_or_fails(monkeypatch):
    mine = _layer.ours()

    def off(case, tokens, *arguments):
        # One value of a rank, by the last bit of bfloat16.
        return mine(case, tokens, *arguments).at[0, 0].multiply(1 + 2**-7)

    monkeypatch.setattr(skew, "ours", lambda: off)
    rows = list(skew.skew(setup_of(has_peers=True)))
    assert len(wrong(rows)) == 2


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


# (tokens a rank, layers in the program) -> asked of forward, forward and backward.
OF_BEST = {
    True: {4096: (2.2, 1.8), 16384: (1.7, 1.8), 128: (1.5, 1.8)},
    False: {4096: (2.3, 1.8), 16384: (1.8, 1.8), 128: (1.3, 1.8)},
}
RAGGED_TIMES = {4096: (40, 30), 16384: (40, 30), 128: (None, None)}


@pytest.mark.parametrize("has_peers", [True, False])
def test_layers_are_judged_as_asked(has_peers, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    setup = Setup(jax.devices()[:2], rounds=1, shrink=1, has_peers=has_peers)
    for comparison in layers.comparisons(setup):
        tokens = comparison.shape.tokens_per_rank
        for i, metric in enumerate(("forward", "forward + backward")):
            times = OF_BEST[has_peers][tokens][i]
            assert best_bound(comparison, 1.25, metric) == f"<= {1 / times:.4g}"
            times = RAGGED_TIMES[tokens][i]
            bound = peer_bound(comparison, 1.25, metric, "ragged_all_to_all")
            assert bound == (times and f"<= {1 / times:.4g}")
            # Dropless is there to be reported.
            assert peer_bound(comparison, None, metric, "ragged_all_to_all") is None
            if comparison.num_layers == 1:
                assert best_bound(comparison, None, metric) is None


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
