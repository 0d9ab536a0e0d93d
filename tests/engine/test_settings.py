"""What `configure` refuses, from arguments and from the environment."""

import os

import pytest

import jax_turbobus
from jax_turbobus import _environment, config, gpu


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "no-such"}, "topology: expected one of"),
        ({"topology": 3}, "topology: expected a Topology"),
        ({"topology": "cpu"}, "topology: expected at least one GPU"),
        ({"emulate": True}, "topology: .* got None; .* JAX_TURBOBUS_TOPOLOGY"),
        ({"mode": "fast"}, "mode: expected 'free-running' or 'lock-step'"),
        ({"block_bytes": 100}, "block_bytes: expected a whole number from 4096 to"),
        ({"block_bytes": 1e6}, "block_bytes: expected a whole number"),
        ({"chunk_bytes": 5000}, "chunk_bytes: expected at least block_bytes"),
        ({"block_bytes": 2**60}, "block_bytes: expected a whole number"),
        ({"block_bytes": 2**70}, "block_bytes: expected a whole number"),
        ({"chunk_bytes": 2**65}, "chunk_bytes: expected a whole number"),
        ({"rate_scale": -1}, "rate_scale: expected a number from 1e-09 to 1e"),
        ({"rate_scale": 1e9}, r"rate_scale: .* to 9.95e\+04 for topology 'cpu devi"),
        ({"rate_scale": 1e308}, "rate_scale: expected a number from"),
        ({"rate_scale": 1e-300}, "rate_scale: expected a number from"),
        ({"rate_scale": float("nan")}, "rate_scale: expected a number from"),
        ({"trace": 3.5}, "trace: expected True, False, a number .* path .* got 3.5"),
        ({"trace": {}}, "trace: expected True, False, a number .* path .* got {}"),
        ({"trace": -3}, "trace: expected a whole number from 0"),
        ({"trace": 2**40}, "trace: expected a whole number from 0"),
        ({"trace": "/nowhere/at/all.json"}, "trace: expected .* got '/nowhere/at"),
        ({"trace": "/"}, "trace: expected"),
        ({"trace": "\0"}, "trace: expected"),
        ({"trace": "yess"}, "trace: expected 1 or 0, or the path .* got 'yess'"),
        ({"trace": ""}, "trace: expected"),
    ],
)
def test_bad_arguments_name_themselves_and_change_nothing(arguments, message):
    before = jax_turbobus.configure(topology="2xh200")
    with pytest.raises(ValueError, match=message):
        jax_turbobus.configure(**arguments)
    assert config.current() == before


@pytest.mark.parametrize("name", ["emulate", "pooled", "enabled"])
def test_words_are_no_flags(name):
    with pytest.raises(ValueError, match=f"{name}: expected True or False, got 'no'"):
        jax_turbobus.configure(topology="2xh200", **{name: "no"})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("EMULATE", "perhaps", "JAX_TURBOBUS_EMULATE: expected 1 or 0"),
        ("TOP", "perhaps", "JAX_TURBOBUS_TOP: expected 1 or 0, got 'perhaps'"),
        ("TRACE", "2", "trace: .* got '2' .* says JAX_TURBOBUS_TRACE='2'"),
        ("TRACE", "nan", "trace: .* path .* got 'nan'"),
        ("TRACE", "-1", "trace: .* path .* got '-1'"),
        ("TRACE", "0.5", "trace: .* path .* got '0.5'"),
        ("BLOCK_BYTES", "16M", "JAX_TURBOBUS_BLOCK_BYTES: expected a whole number"),
        ("RATE_SCALE", "x", "JAX_TURBOBUS_RATE_SCALE: expected a number"),
        ("TOPOLOGY", "nowhere", "topology: expected one of"),
        ("TOPOLOGY", "/", "says JAX_TURBOBUS_TOPOLOGY='/'"),
        ("MODE", "fast", "mode: .* says JAX_TURBOBUS_MODE='fast'"),
        ("BLOCK_BYTES", " 1 ", "block_bytes: .* says JAX_TURBOBUS_BLOCK_BYTES='1'"),
    ],
)
def test_a_wrong_variable_names_itself(monkeypatch, variable, value, message):
    monkeypatch.setenv(f"JAX_TURBOBUS_{variable}", value)
    with pytest.raises(ValueError, match=message):
        jax_turbobus.configure()


def test_a_wrong_switch_is_an_error_of_every_call_without_configure(monkeypatch):
    monkeypatch.setattr(config._state, "now", config._InPlace())
    monkeypatch.setenv("JAX_TURBOBUS_TOP", "perhaps")
    for _ in range(2):
        with pytest.raises(ValueError, match="JAX_TURBOBUS_TOP: expected 1 or 0"):
            config.apply_environment()


def test_the_largest_rate_scale_named_is_one_that_fits():
    jax_turbobus.configure(rate_scale=9.95e4)
    assert jax_turbobus.stats().is_enabled


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), (" On ", True), ("no", False), ("", None), ("  ", None)],
)
def test_cpu_devices_and_gpus_read_a_switch_alike(monkeypatch, text, value):
    monkeypatch.setenv("JAX_TURBOBUS_POOLED", text)
    assert _environment.flag("POOLED") is value
    is_pooled = value is not False  # empty is not set
    assert jax_turbobus.configure(topology="2xh200").pooled is is_pooled
    assert ("split" not in gpu._settings(None)) is is_pooled


@pytest.mark.parametrize(
    ("text", "is_traced"), [("", False), ("off", False), ("1", True), ("a.json", True)]
)
def test_gpus_are_traced_by_switch_or_by_file(monkeypatch, text, is_traced):
    monkeypatch.setenv("JAX_TURBOBUS_TRACE", text)
    assert gpu._settings(None)["is_traced"] is is_traced


@pytest.mark.parametrize("text", ["2", "nan", "-1", "yess"])
def test_gpus_are_not_traced_by_a_word(monkeypatch, text):
    monkeypatch.setenv("JAX_TURBOBUS_TRACE", text)
    with pytest.raises(ValueError, match=f"^JAX_TURBOBUS_TRACE: .* got '{text}'"):
        gpu._settings(None)


@pytest.mark.parametrize("name", ["./2", "blocks.json", "of.2026/blocks"])
def test_a_trace_with_a_folder_or_an_ending_is_a_file(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of.2026").mkdir()
    monkeypatch.setenv("JAX_TURBOBUS_TRACE", name)
    path = jax_turbobus.configure(topology="2xh200").trace_path
    assert path == os.path.abspath(name)
    monkeypatch.delenv("JAX_TURBOBUS_TRACE")
    jax_turbobus.configure(enabled=False)
    assert (tmp_path / name).is_file()


def test_gpus_read_numbers_and_words_with_space_around_them(monkeypatch):
    monkeypatch.setenv("JAX_TURBOBUS_MODE", " lock-step ")
    monkeypatch.setenv("JAX_TURBOBUS_BLOCK_BYTES", " 1048576\n")
    settings = gpu._settings(None)
    assert settings["is_lock_step"]
    assert settings["block_bytes"] == 1 << 20
    monkeypatch.setenv("JAX_TURBOBUS_MODE", " ")
    monkeypatch.setenv("JAX_TURBOBUS_BLOCK_BYTES", " ")
    settings = gpu._settings(None)
    assert not settings["is_lock_step"]
    assert "block_bytes" not in settings


@pytest.mark.parametrize("value", ["1", "65535", "2000000000", "16M", "-1"])
def test_blocks_that_gpus_do_not_take_are_refused(monkeypatch, value):
    monkeypatch.setenv("JAX_TURBOBUS_BLOCK_BYTES", value)
    with pytest.raises(ValueError, match=r"BLOCK_BYTES: .* from 65536 to 1073741824"):
        gpu._settings(None)
