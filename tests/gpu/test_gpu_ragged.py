"""`ragged_all_to_all` on GPUs equals the row-by-row reference and the CPU's bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import PLATFORM, assert_same_bytes, random, run_python
from gpu_ragged_checks import (
    OPERAND_ROWS,
    OUTPUT_ROWS,
    call,
    check_groups,
    check_program,
    check_rows_and_gradients,
    fields_of,
    mapped,
    mesh,
    num_ranks,
    rows,
)
from jax import lax
from ragged_mesh import Mixture
from ragged_reference import slow, slow_gradients, values

pytestmark = pytest.mark.gpu


def test_every_row_and_every_gradient():
    check_rows_and_gradients()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1024,)], ids=str)
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "int32", "bool"]
)
def test_any_bytes_arrive_unchanged(dtype, shape):
    dtype = jnp.dtype(dtype)
    operand = random((num_ranks(), OPERAND_ROWS, *shape), dtype, 1)
    output = random((num_ranks(), OUTPUT_ROWS, *shape), dtype, 2)
    fields = fields_of(5, overlap=True)
    got = mapped(call)(operand, output, *fields)
    assert_same_bytes(got, slow(operand, output, fields))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_sums_have_the_bits_of_cpu_devices(dtype):
    """Rows that went to several places, of values whose sums round."""
    rng = np.random.default_rng(3)
    fields = fields_of(6, each=5, overlap=True)
    fields[0] %= 16
    shape = (num_ranks(), OUTPUT_ROWS, 33)
    weight = np.asarray(rng.normal(size=shape), jnp.dtype(dtype))
    operand = np.zeros((num_ranks(), OPERAND_ROWS, 33), weight.dtype)

    def pull_back(weight, operand, *fields):
        output = jnp.zeros(weight.shape, weight.dtype)
        _, transposed = jax.vjp(lambda x: call(x, output, *fields), operand)
        return transposed(weight)[0]

    args = (weight, operand, *fields)
    got = mapped(pull_back)(*args)
    assert np.count_nonzero(got) > 33
    assert_same_bytes(got, mapped(pull_back, mesh("cpu"))(*args))


@pytest.mark.parametrize("batched", Mixture.MAPPED)
def test_vmap_takes_any_mixture(batched):
    operands = values(0, num_ranks(), 3, OPERAND_ROWS, 40)
    outputs = values(1, num_ranks(), 3, OUTPUT_ROWS, 40)
    plans = [fields_of(seed) for seed in range(3)]
    mixture = Mixture(batched, operands, outputs, plans)

    def both(*args):
        run = jax.vmap(call, in_axes=mixture.in_axes)
        return run(*args), jax.grad(lambda *a: (run(*a) ** 2).sum() / 2)(*args)

    result, bar = mapped(both)(*mixture.args)
    bars = np.zeros(operands.shape)
    for i in range(3):
        operand, output, fields = mixture.entry(i)
        want = slow(operand, output, fields)
        np.testing.assert_array_equal(result[:, i], want)
        bars[:, i] = slow_gradients(want, OPERAND_ROWS, fields)[0]
    is_mapped = mixture.in_axes[0] == 0
    np.testing.assert_array_equal(bar, bars if is_mapped else bars.sum(1))


def test_jvp_and_second_order():
    fields = fields_of(11, overlap=True)
    operand, output = rows(0, OPERAND_ROWS, 24), rows(1, OUTPUT_ROWS, 24)
    dots = rows(2, OPERAND_ROWS, 24), rows(3, OUTPUT_ROWS, 24)

    def per_rank(operand, output, operand_dot, output_dot, *fields):
        def f(a, b):
            return call(a, b, *fields)

        def energy(a):
            return (f(a, output) ** 2).sum() / 2

        _, one = jax.jvp(f, (operand, output), (operand_dot, output_dot))
        return one, jax.jvp(jax.grad(energy), (operand,), (operand_dot,))[1]

    one, hessian = mapped(per_rank)(operand, output, *dots, *fields)
    np.testing.assert_array_equal(one, slow(*dots, fields))
    moved = slow(dots[0], np.zeros_like(dots[1]), fields)
    want, _ = slow_gradients(moved, OPERAND_ROWS, fields)
    np.testing.assert_array_equal(hessian, want)


def test_scan_and_remat_among_collectives():
    fields = fields_of(14, output_rows=OPERAND_ROWS)
    x = rows(0, OPERAND_ROWS, 256)

    def per_rank(x, *fields):
        def step(x, _):
            y = jnp.clip(x, -8, 8) + lax.psum(x, "x")
            # The operand is the output too: it must not be overwritten early.
            z = call(y, y, *fields)
            return jnp.clip(z, -8, 8), call(z, y, *fields)

        def scanned(x):
            x, ys = lax.scan(jax.checkpoint(step), x, None, length=3)
            return (x**2).sum() / 2, (x, ys)

        return jax.value_and_grad(scanned, has_aux=True)(x)

    (_, (last, ys)), bar = mapped(per_rank)(x, *fields)
    want = x
    for i in range(3):
        y = np.clip(want, -8, 8) + want.sum(0)
        z = slow(y, y, fields)
        want = np.clip(z, -8, 8)
        np.testing.assert_array_equal(ys[:, i], slow(z, y, fields))
    np.testing.assert_array_equal(last, want)
    on_cpu = mapped(per_rank, mesh("cpu"))(x, *fields)
    np.testing.assert_array_equal(bar, on_cpu[1])


def test_many_calls_of_one_helper_among_psums():
    fields = fields_of(15)
    helper = jax.jit(call)

    def per_rank(operand, output, *fields):
        out, total = [], jnp.zeros(())
        for i in range(8):
            out.append(helper(operand + i, output, *fields))
            total = total + lax.psum(out[-1].sum(), "x")
        return jnp.stack(out), total

    operand, output = rows(0, OPERAND_ROWS, 64), rows(1, OUTPUT_ROWS, 64)
    want = np.stack([slow(operand + i, output, fields) for i in range(8)], axis=1)
    run = mapped(per_rank)
    for _ in range(50):
        got, total = run(operand, output, *fields)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(total, want.sum())


def test_groups_exchange_among_themselves():
    check_groups()


def test_the_program_holds_our_calls_and_no_gather():
    check_program()


@pytest.mark.skipif(PLATFORM != "cuda", reason="CPU devices raise at once")
def test_a_slice_that_does_not_fit_is_told_of_by_a_later_call():
    fields = fields_of(1)
    operand, output = rows(0, OPERAND_ROWS, 24), rows(1, OUTPUT_ROWS, 24)
    run = mapped(call)
    want = slow(operand, output, fields)
    last = num_ranks() - 1
    bad = [f.copy() for f in fields]
    bad[0][last, 0] = OPERAND_ROWS - 1
    bad[1][last, 0] = bad[3][0, last] = 5
    fitting = [f.copy() for f in fields]
    fitting[1][last, 0] = fitting[3][0, last] = 0
    got = run(operand, output, *bad)
    np.testing.assert_array_equal(got, slow(operand, output, fitting))
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=rf"slice 0 of rank {last}, for rank 0: input_offsets and send_sizes must"
        rf" stay within the operand's {OPERAND_ROWS} rows, got 5 rows",
    ):
        run(operand, output, *fields)
    np.testing.assert_array_equal(run(operand, output, *fields), want)


APART = """
import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import numpy as np
import gpu_ragged_checks as t
t.check_rows_and_gradients()
t.check_groups()
t.check_program()
fields = t.fields_of(1)
operand, output = t.rows(0, t.OPERAND_ROWS, 24), t.rows(1, t.OUTPUT_ROWS, 24)
run = t.mapped(t.call)
bad = [f.copy() for f in fields]
bad[0][0, 0] = t.OPERAND_ROWS - 1
bad[1][0, 0] = bad[3][0, 0] = 5
try:
    run(operand, output, *bad)
    print("no error")
except Exception as error:
    print("at once:", error)
want = t.slow(operand, output, fields)
np.testing.assert_array_equal(run(operand, output, *fields), want)
print("done")
"""


@pytest.mark.multigpu
@pytest.mark.skipif(PLATFORM != "cuda", reason="CPU devices share one memory")
def test_gpus_without_peer_access_give_the_same_and_refuse_at_once():
    said = run_python(APART, JAX_TURBOBUS_PEER_ACCESS="0")
    assert "plain JAX collectives" not in said
    assert "at once:" in said
    assert "slice 0 of rank 0, for rank 0: input_offsets and send_sizes" in said
    assert said.rstrip().endswith("done")


@pytest.mark.multigpu
@pytest.mark.skipif(PLATFORM != "cuda", reason="CPU devices share one memory")
def test_more_slices_than_can_be_packed_take_collectives_and_say_why():
    code = """
import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import numpy as np
import gpu_ragged_checks as t
each = 16384 // t.num_ranks() ** 2
fields = t.fields_of(1, each=each, operand_rows=each * 4, output_rows=each * 16)
operand, output = t.rows(0, each * 4, 8), t.rows(1, each * 16, 8)
want = t.slow(operand, output, fields)
np.testing.assert_array_equal(t.mapped(t.call)(operand, output, *fields), want)
"""
    said = run_python(code, JAX_TURBOBUS_PEER_ACCESS="0")
    assert "plain JAX collectives: GPU 0 cannot reach the memory of GPU 1, and" in said
    assert "pieces, at most 16384" in said
