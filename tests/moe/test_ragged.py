"""`ragged_all_to_all` against a slow NumPy reference: every dtype, row and offset."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_mesh import make_mesh
from ragged_mesh import RANKS, call, mapped
from ragged_reference import plan, slow, values


def test_the_documented_example():
    fields = [
        np.array(f, np.int32)
        for f in (
            [[0, 1], [0, 1]],
            [[1, 2], [1, 1]],
            [[0, 0], [1, 2]],
            [[1, 1], [2, 1]],
        )
    ]
    operand = np.array([[1, 2, 2], [3, 4, 0]], np.float32)
    result = mapped(call, make_mesh((2,)))(
        operand, np.zeros((2, 4), np.float32), *fields
    )
    np.testing.assert_array_equal(result, [[1, 3, 0, 0], [2, 2, 4, 0]])


def test_c01_runs_on_cpu_devices_and_equals_the_reference_bit_for_bit():
    # https://github.com/jax-ml/jax/issues/34755: 8 rows a rank, uniform sizes of 2.
    sizes = np.full((4, 4), 2, np.int32)
    input_offsets = np.broadcast_to(np.arange(4, dtype=np.int32) * 2, (4, 4))
    output_offsets = np.broadcast_to(np.arange(4, dtype=np.int32)[:, None] * 2, (4, 4))
    fields = (input_offsets, sizes, output_offsets, sizes)
    operand = values(0, 4, 8, 4)
    output = np.zeros_like(operand)
    result = mapped(call)(operand, output, *fields)
    np.testing.assert_array_equal(result, slow(operand, output, fields))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("check_vma", [True, False])
def test_random_slices_equal_the_slow_reference(each, overlap, check_vma):
    run = mapped(call, check_vma=check_vma)
    for seed in range(6):
        fields = plan(seed, each=each, overlap=overlap)
        operand = values(seed, RANKS, 96, 40)
        output = values(seed + 100, RANKS, 160, 40)
        result = run(operand, output, *fields)
        np.testing.assert_array_equal(result, slow(operand, output, fields))


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "float16", "bfloat16", "int32", "int8", "uint16", "bool"),
        *("complex64", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"),
        "float4_e2m1fn",
    ],
)
def test_every_dtype_moves_bit_for_bit(dtype):
    fields = plan(1)
    dtype = jnp.dtype(dtype)
    kinds = np.random.default_rng(0).integers(0, 2, (2, RANKS, 160, 33))
    operand, output = kinds[0, :, :96].astype(dtype), kinds[1].astype(dtype)
    result = np.asarray(mapped(call)(operand, output, *fields))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, slow(operand, output, fields))


@pytest.mark.parametrize("row", [(), (1,), (3, 5, 2), (0,), (257,)])
def test_any_row_shape(row):
    fields = plan(2)
    operand, output = values(0, RANKS, 96, *row), values(1, RANKS, 160, *row)
    result = mapped(call)(operand, output, *fields)
    np.testing.assert_array_equal(result, slow(operand, output, fields))


def test_no_rows_at_all():
    nothing = np.zeros((RANKS, RANKS), np.int32)
    for operand_rows, output_rows in ((0, 4), (4, 0), (0, 0)):
        operand = values(0, RANKS, operand_rows, 64)
        output = values(1, RANKS, output_rows, 64)
        result = mapped(call)(operand, output, *[nothing] * 4)
        np.testing.assert_array_equal(result, output)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "int16", "uint8"])
def test_offsets_of_any_integer_type(dtype):
    fields = [f.astype(dtype) for f in plan(3)]
    operand, output = values(0, RANKS, 96, 8), values(1, RANKS, 160, 8)
    with jax.enable_x64(True):
        result = mapped(call)(operand, output, *fields)
    np.testing.assert_array_equal(result, slow(operand, output, fields))


def test_one_operand_for_both_arguments():
    fields = plan(4, operand_rows=96, output_rows=96)
    for f in (0, 2):
        fields[f] = np.minimum(fields[f], 72)
    x = values(0, RANKS, 96, 64)
    result = mapped(lambda x, *f: call(x, x, *f))(x, *fields)
    np.testing.assert_array_equal(result, slow(x, x, fields))


def test_the_output_argument_is_not_overwritten():
    fields = plan(5)
    operand, output = values(0, RANKS, 96, 64), values(1, RANKS, 160, 64)
    result, before = mapped(lambda a, b, *f: (call(a, b, *f), b))(
        operand, output, *fields
    )
    np.testing.assert_array_equal(before, output)
    np.testing.assert_array_equal(result, slow(operand, output, fields))
