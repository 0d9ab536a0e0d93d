"""GPUs that do not reach each other's memory exchange all the same, and say how."""

import pytest
from gpu_programs import PLATFORM, run_python

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(PLATFORM != "cuda", reason="CPU devices share one memory"),
]

# With few tokens rows go by mail, with many through rings of slots.
FEW, MANY = 300, 2000

PRELUDE = """
import itertools, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import jax
import test_gpu_exchange as t
from moe_mesh import KINDS, on_mesh, scaling_layer
t.T = {num_tokens}
"""

LAYERS = """
options = dict(t.OPTIONS, half={"recv_capacity": t.T * 3 // 2})
for kind, one in zip(KINDS, itertools.cycle(options.values())):
    t.test_layers_and_gradients_are_the_dense_ones(kind, one)
    t.test_rows_lie_where_they_do_on_cpu_devices(kind, one)
"""

SCHEDULES = """
for schedule in ("auto", "packed", "broadcast", "direct", "relay"):
    args = t.inputs("duplicates", num_tokens=t.T)
    layer = on_mesh(scaling_layer(t.E, schedule=schedule), t.mesh_of_gpus())
    t.assert_same(jax.jit(layer)(*args), t.on_cpu(t.dense, *args))
"""

DTYPES = """
for dtype in ("bfloat16", "float8_e4m3fn", "int8"):
    for hidden in (7, 520):
        t.test_every_dtype_and_odd_rows(dtype, hidden)
t.test_nobody_has_tokens()
"""

PROGRAMS = """
t.test_two_exchanges_beside_psum_in_many_runs()
t.test_scan_remat_and_vmap()
t.test_chunks_give_what_the_whole_does()
"""


@pytest.mark.parametrize("num_tokens", [FEW, MANY])
@pytest.mark.parametrize(
    "program",
    [LAYERS, SCHEDULES, DTYPES, PROGRAMS],
    ids=["layers", "schedules", "dtypes", "programs"],
)
def test_results_are_those_of_gpus_that_do(program, num_tokens):
    code = PRELUDE.format(num_tokens=num_tokens) + program
    said = run_python(code, JAX_TURBOBUS_PEER_ACCESS="0")
    assert "through host memory: GPU 0 cannot reach the memory of GPU 1" in said
    assert "plain JAX collectives" not in said


def test_peers_go_straight():
    said = run_python(
        PRELUDE.format(num_tokens=FEW) + SCHEDULES, JAX_TURBOBUS_PEER_ACCESS="1"
    )
    assert "through host memory" not in said


def test_a_slot_that_is_no_size_is_an_error_that_names_it():
    code = (
        PRELUDE.format(num_tokens=MANY)
        + """
try:
    layer = on_mesh(scaling_layer(t.E), t.mesh_of_gpus())
    jax.block_until_ready(jax.jit(layer)(*t.inputs("distinct", num_tokens=t.T)))
except jax.errors.JaxRuntimeError as error:
    print("error:", error)
"""
    )
    said = run_python(
        code, JAX_TURBOBUS_PEER_ACCESS="0", JAX_TURBOBUS_EXCHANGE_SLOT_BYTES="4 MiB"
    )
    assert "JAX_TURBOBUS_EXCHANGE_SLOT_BYTES: expected a number" in said
