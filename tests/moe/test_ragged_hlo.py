"""`ragged_all_to_all` compiled for GPUs, without one: what XLA makes of it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_turbobus.moe import ragged_all_to_all

R, ROWS, HIDDEN = 2, 512, 1024


def compiled(cuda, f, *more):
    """Compiles ``f(exchange, operand, *more)`` for two GPUs."""

    def per_rank(operand, *args):
        *more, a, b, c, d = args
        exchange = functools.partial(_exchange, fields=(a, b, c, d))
        return f(exchange, operand, *more)

    split = P("x")
    mapped = jax.shard_map(
        per_rank, mesh=cuda.mesh_of(R), in_specs=split, out_specs=split
    )
    fields = [cuda.device((R * R,), np.int32, spec=split)] * 4
    rows = cuda.device((R * ROWS, HIDDEN), jnp.bfloat16, spec=split)
    return cuda.compile(
        mapped, rows, *more, *fields, num_devices=R, donate_argnums=(1,) if more else ()
    )


def _exchange(operand, output, *, fields):
    return ragged_all_to_all(operand, output, *fields, axis_name="x")


def copies_of_rows(hlo):
    """Copies, and fusions that write constants, of the rows' size."""
    shape = rf"bf16\[(1,)?{ROWS},{HIDDEN}\]"
    return re.findall(rf"= {shape}\S* (?:copy|broadcast|fusion)\(.*", hlo)


def test_one_call_each_way_and_no_gather(cuda):
    def f(exchange, operand):
        def loss(x):
            y = exchange(x, jnp.zeros_like(x))
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(operand)

    hlo = compiled(cuda, f)
    assert hlo.counts() == {
        "turbobus_ragged_all_to_all_onto_zeros": 1,
        "turbobus_ragged_all_to_all_transpose": 1,
    }
    assert "all-gather" not in hlo


def test_an_output_of_zeros_is_not_made(cuda):
    hlo = compiled(cuda, lambda exchange, x: exchange(x, jnp.zeros_like(x)))
    assert hlo.counts() == {"turbobus_ragged_all_to_all_onto_zeros": 1}
    assert copies_of_rows(hlo) == []


def test_an_empty_output_stays_empty(cuda):
    hlo = compiled(cuda, lambda exchange, x: exchange(x, jnp.empty_like(x)))
    # Zeros, before JAX 0.11.
    assert "turbobus_ragged_all_to_all" in hlo
    assert copies_of_rows(hlo) == []


@pytest.mark.parametrize(
    "other", [jnp.ones_like, lambda x: x, lambda x: -jnp.zeros_like(x)]
)
def test_any_other_output_is_written_over(cuda, other):
    hlo = compiled(cuda, lambda exchange, x: exchange(x * 2, other(x)))
    assert list(hlo.counts()) == ["turbobus_ragged_all_to_all"]


def test_a_donated_output_is_not_copied(cuda):
    rows = cuda.device((R * ROWS, HIDDEN), jnp.bfloat16, spec=P("x"))
    hlo = compiled(cuda, lambda exchange, x, y: exchange(x, y), rows)
    assert list(hlo.counts()) == ["turbobus_ragged_all_to_all"]
    assert copies_of_rows(hlo) == []


def test_a_loop_makes_no_call_part_of_a_fusion(cuda):
    """There the result would not share its buffer with `output`."""

    def f(exchange, x):
        def body(x, _):
            y = exchange(x, x * 2)
            return y, y

        return jax.lax.scan(body, x, length=3)[1].reshape(-1, HIDDEN)

    hlo = compiled(cuda, f)
    assert hlo.counts() == {"turbobus_ragged_all_to_all": 1}
    assert "dynamic-slice-fusion" not in hlo
