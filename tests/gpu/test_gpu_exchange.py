"""The expert exchange on GPUs equals the dense layer and the CPU's rows."""

import gpu_exchange_checks as checks
import pytest
from gpu_exchanges import FEW, options_for
from moe_mesh import KINDS

pytestmark = pytest.mark.multigpu

OPTIONS = options_for(FEW)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_gradients_are_the_dense_ones(kind, options):
    checks.check_layers_and_gradients(kind, options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_lie_where_they_do_on_cpu_devices(kind, options):
    checks.check_rows(kind, options)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "bool"]
)
@pytest.mark.parametrize("hidden", [1, 7, 520])
def test_every_dtype_and_odd_rows(dtype, hidden):
    checks.check_dtype(dtype, hidden)


@pytest.mark.parametrize("schedule", ["auto", "packed", "broadcast", "direct", "relay"])
def test_schedules_never_change_a_result(schedule):
    checks.check_schedule(schedule)


def test_nobody_has_tokens():
    checks.check_no_tokens()


def test_two_exchanges_beside_psum_in_many_runs():
    checks.check_calls_that_look_alike()


def test_scan_remat_and_vmap():
    checks.check_scan_remat_and_vmap()


def test_chunks_give_what_the_whole_does():
    checks.check_chunks()
