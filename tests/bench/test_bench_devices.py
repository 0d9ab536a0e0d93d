"""Benchmarks of exchanges get the CPU devices that they compare on."""

import jax
import pytest

from jax_turbobus.bench import _devices


class StartedAgainError(Exception):
    """Instead of another process."""


def test_a_process_with_fewer_devices_starts_again_with_four(monkeypatch):
    def execve(path, command, environment):
        raise StartedAgainError(environment)

    monkeypatch.setattr(_devices.os, "execve", execve)
    monkeypatch.setattr(jax, "devices", lambda: [None])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    with pytest.raises(StartedAgainError) as started:
        _devices.bench_devices()
    environment = started.value.args[0]
    assert environment["XLA_FLAGS"].endswith("_device_count=4")
    # JAX would make as many as this says, whatever the flags are.
    assert "JAX_NUM_CPU_DEVICES" not in environment
