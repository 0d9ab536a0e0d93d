"""Every example runs, with small sizes, and does what its first line says."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parent.parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here():
    here = pathlib.Path(__file__).read_text()
    for path in FOLDER.glob("*.py"):
        assert f'load("{path.stem}")' in here, path.name


def test_optimizer_on_host(capsys):
    losses, moments = load("optimizer_on_host").main(hidden=64, batch=32, steps=8)
    assert losses[-1] < losses[0]
    for leaf in jax.tree.leaves(moments):
        assert leaf.sharding.memory_kind == "pinned_host"
        assert leaf.addressable_shards[0].data.size * 8 == leaf.size
    assert "all of it in pinned_host" in capsys.readouterr().out


def test_optimizer_on_host_equals_optax_on_the_device(monkeypatch):
    example = load("optimizer_on_host")
    losses, moments = example.main(hidden=64, batch=32, steps=8)
    monkeypatch.setattr(example.jtb, "to_device", lambda tree: tree)
    monkeypatch.setattr(example.jtb, "to_host", lambda tree, out: tree)
    put = jax.device_put

    def put_on_device(tree, sharding):
        return put(tree, sharding.with_memory_kind("device"))

    monkeypatch.setattr(example.jax, "device_put", put_on_device)
    expected, expected_moments = example.main(hidden=64, batch=32, steps=8)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for ours, theirs in zip(
        jax.tree.leaves(moments), jax.tree.leaves(expected_moments), strict=True
    ):
        assert theirs.sharding.memory_kind == "device"
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-9)


def test_stream_layers(capsys):
    load("stream_layers").main(num_layers=6, hidden=32, batch=8)  # checks itself
    assert "6 layers" in capsys.readouterr().out


def test_moe_layer():
    y = load("moe_layer").main(tokens=128, hidden=32, num_experts=16)  # checks itself
    assert y.shape == (128, 32)


def test_overlap_chunks(capsys):
    results = load("overlap_chunks").main(
        tokens=256, hidden=32, chunks=(1, 4), repeats=1
    )
    assert set(results) == {1, 4}
    printed = capsys.readouterr().out
    assert "4 chunks" in printed
    assert ("have no link to hide" in printed) == (jax.default_backend() == "cpu")


@pytest.mark.parametrize("name", ["2xh200", "4xrtx4090", "cpu"])
def test_choose_schedule(name, capsys):
    load("choose_schedule").main(name)
    assert name in capsys.readouterr().out
