"""GPUs that do not reach each other's memory exchange all the same, and say how."""

import pytest
from gpu_exchanges import FEW, MANY
from gpu_programs import PLATFORM, run_python

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(PLATFORM != "cuda", reason="CPU devices share one memory"),
]

PRELUDE = """
import itertools, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import gpu_exchange_checks as checks
import gpu_exchanges as g
import jax
from moe_mesh import KINDS, on_mesh, scaling_layer
num_tokens = {num_tokens}
"""

LAYERS = """
for kind, one in zip(KINDS, itertools.cycle(g.options_for(num_tokens).values())):
    checks.check_layers_and_gradients(kind, one, num_tokens)
    checks.check_rows(kind, one, num_tokens)
"""

SCHEDULES = """
for schedule in ("auto", "packed", "broadcast", "direct", "relay"):
    checks.check_schedule(schedule, num_tokens)
"""

DTYPES = """
for dtype in ("bfloat16", "float8_e4m3fn", "int8"):
    for hidden in (7, 520):
        checks.check_dtype(dtype, hidden, num_tokens)
checks.check_no_tokens()
"""

PROGRAMS = """
checks.check_calls_that_look_alike(num_tokens)
checks.check_scan_remat_and_vmap(num_tokens)
checks.check_chunks(num_tokens)
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
    layer = on_mesh(scaling_layer(g.E), g.mesh_of_gpus())
    jax.block_until_ready(jax.jit(layer)(*g.inputs("distinct", num_tokens)))
except jax.errors.JaxRuntimeError as error:
    print("error:", error)
"""
    )
    said = run_python(
        code, JAX_TURBOBUS_PEER_ACCESS="0", JAX_TURBOBUS_EXCHANGE_SLOT_BYTES="4 MiB"
    )
    assert "JAX_TURBOBUS_EXCHANGE_SLOT_BYTES: expected a number" in said
