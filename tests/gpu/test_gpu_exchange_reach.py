"""What exchanges do with memory that other GPUs do not reach: never an illegal address.

Each program is in a process of its own: one that touched such memory would die.
"""

import pytest
from gpu_programs import PLATFORM, run_python

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(PLATFORM != "cuda", reason="CPU devices share one memory"),
]

PRELUDE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import jax, jax.numpy as jnp, numpy as np
import gpu_exchanges as g
from jax.sharding import PartitionSpec as P
from jax_turbobus import _ffi, moe
from moe_mesh import on_mesh, scaling_layer

tokens, ids, weights, scale = g.inputs("duplicates")

def both_ways(layer):
    def loss(*args):
        y = layer(*args)
        return (y * jnp.arange(g.H) % 3).sum(), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))

def check(layer, want, *args):
    g.assert_same(both_ways(layer)(*args), g.on_cpu(both_ways(want), *args))
    print("paths", sorted({kind.path for kind in moe.exchange_stats()}))
"""

LAYER = """
check(on_mesh(scaling_layer(g.E), g.mesh_of_gpus()), g.dense,
      tokens, ids, weights, scale)
print("peers", _ffi.cuda().can_access_peer(0, 1) and _ffi.cuda().can_access_peer(1, 0))
"""


@pytest.mark.parametrize("allocator", ["default", "bfc", "platform", "cuda_async"])
def test_every_allocator_has_its_path(allocator):
    said = run_python(PRELUDE + LAYER, XLA_PYTHON_CLIENT_ALLOCATOR=allocator)
    assert "plain JAX collectives" not in said
    if allocator == "cuda_async":
        assert "=cuda_async is closed to peers" in said
        assert "peers False" in said
        assert "paths ['mail']" in said
    elif "peers True" in said:
        assert "paths ['peer']" in said
    else:
        assert "through host memory: GPU" in said


def test_an_allocator_that_nobody_named_is_an_error_of_all_ranks_or_open():
    code = """
try:
{layer}
except jax.errors.JaxRuntimeError as error:
    print("error:", error)
"""
    layer = "".join(f"    {line}\n" for line in LAYER.strip().splitlines())
    said = run_python(
        PRELUDE + code.format(layer=layer),
        JAX_PJRT_CLIENT_CREATE_OPTIONS="allocator:cuda_async",
    )
    if "error:" in said:
        assert "its allocator gives peers no access" in said
        assert "set JAX_TURBOBUS_PEER_ACCESS=0" in said
        assert "over axis 'x'" in said
    else:
        assert "paths [" in said


def test_tables_may_be_constants_of_the_program():
    said = run_python(
        PRELUDE
        + """
own_ids, own_weights = np.asarray(ids)[:g.FEW], np.asarray(weights)[:g.FEW]
layer = scaling_layer(g.E)
all_ids, all_weights = (np.tile(x, (g.num_ranks(), 1)) for x in (own_ids, own_weights))
check(on_mesh(lambda x, s: layer(x, own_ids, own_weights, s), g.mesh_of_gpus()),
      lambda x, s: g.dense(x, all_ids, all_weights, s), tokens, scale)
print("done")
""",
        JAX_TURBOBUS_PEER_ACCESS="1",
    )
    assert said.rstrip().endswith("done")
