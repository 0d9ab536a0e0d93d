"""`ragged_all_to_all` over two processes: XLA's own collectives, the same results."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import logging, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO)
    from jax_turbobus import moe

    mesh = Mesh(np.array(jax.devices()), ("x",))
    assert mesh.size == 4 and len(jax.local_devices()) == 2
    rows, hidden = 8, 200

    def per_rank(x):
        x = x[0]
        me = jax.lax.axis_index("x")
        sizes = jnp.arange(4) % 3            # what rank r sends to each: 0, 1, 2, 0
        begin = jnp.cumsum(sizes) - sizes
        received = jnp.full(4, me % 3)
        there = jnp.repeat(me * 2, 4)

        def f(x):
            out = jnp.full((rows, hidden), -1.0)
            return moe.ragged_all_to_all(
                x, out, begin, sizes, there, received, axis_name="x")

        y, pull = jax.vjp(f, x)
        return y[None], pull(y)[0][None]

    spec = P("x")
    values = np.arange(4 * rows * hidden, dtype=np.float32).reshape(4, rows, hidden)
    x = jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, spec), lambda index: values[index])
    layer = jax.shard_map(per_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    y, dx = jax.jit(layer)(x)

    want, want_dx = np.full_like(values, -1.0), np.zeros_like(values)
    begin = [0, 0, 1, 3]
    for source in range(4):
        for to in range(4):
            for i in range(to % 3):
                want[to, 2 * source + i] = values[source, begin[to] + i]
                want_dx[source, begin[to] + i] = values[source, begin[to] + i]
    for got, expected in ((y, want), (dx, want_dx)):
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])
    print("equal")
    """
)


@pytest.mark.slow
def test_two_processes_exchange_through_gloo_and_say_so():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(rank)],
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
        assert "ragged_all_to_all: plain JAX collectives: 2 processes" in err
