"""What `configure` refuses, from arguments and from the environment."""

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
        ({"trace": -3}, "trace: expected a whole number from 0"),
        ({"trace": 2**40}, "trace: expected a whole number from 0"),
        ({"trace": "/nowhere/at/all.json"}, "trace: expected .* got '/nowhere/at"),
        ({"trace": "/"}, "trace: expected"),
        ({"trace": "\0"}, "trace: expected"),
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
