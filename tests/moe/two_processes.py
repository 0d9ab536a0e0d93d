"""Runs a program in two processes of two CPU devices each, joined through Gloo."""

import os
import socket
import subprocess
import sys
import textwrap

# `values_of(shape)` are numbers that both processes know; `spread` lays an array over
# the mesh; `check` compares what this process holds of one.
PRELUDE = """
import logging, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
logging.basicConfig(level=logging.INFO)
from jax_turbobus import moe

mesh = Mesh(np.array(jax.devices()), ("x",))
assert mesh.size == 4 and len(jax.local_devices()) == 2

def spread(values, mesh=mesh, spec=P("x")):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: values[index])

def check(got, expected):
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])
"""


def run_in_two(program: str) -> list[str]:
    """Returns what each process wrote to its standard error.

    Args:
      program: what follows the prelude; must print "equal" at its end.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    code = PRELUDE + textwrap.dedent(program) + "\nprint('equal')\n"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
        assert "equal" in out
    return [err for _, err in outputs]
