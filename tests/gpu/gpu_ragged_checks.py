"""`ragged_all_to_all` on GPUs: how tests call it, and checks for several processes."""

import functools

import jax
import numpy as np
import ragged_mesh
from gpu_exchanges import mesh_of
from gpu_programs import PLATFORM, gpus
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ragged_mesh import call
from ragged_reference import plan, slow, slow_gradients, values

from jax_turbobus.moe import ragged_all_to_all

OPERAND_ROWS, OUTPUT_ROWS = 96, 160


def num_ranks():
    return min(4, len(gpus()))


def mesh(platform=PLATFORM):
    return mesh_of(jax.devices(platform)[: num_ranks()])


def mapped(function, mesh_=None):
    """Runs `function` per rank; arguments and results have the rank in front."""
    run = ragged_mesh.mapped(function, mesh() if mesh_ is None else mesh_)
    return lambda *args: jax.tree.map(np.asarray, run(*args))


def fields_of(seed, **options):
    options = {"operand_rows": OPERAND_ROWS, "output_rows": OUTPUT_ROWS, **options}
    return plan(seed, ranks=num_ranks(), **options)


def rows(seed, num_rows, *shape, dtype=np.float32):
    return values(seed, num_ranks(), num_rows, *shape, dtype=dtype)


def check_rows_and_gradients():
    """Every row and every gradient are those of the row-by-row reference."""
    for seed, overlap in enumerate([False, True]):
        for each in (1, 3):
            fields = fields_of(seed, each=each, overlap=overlap)
            operand, output = rows(1, OPERAND_ROWS, 520), rows(2, OUTPUT_ROWS, 520)

            def energy(operand, output, *fields):
                result = call(operand, output, *fields)
                return (result**2).sum() / 2, result

            def both(*args, energy=energy):
                return jax.value_and_grad(energy, (0, 1), has_aux=True)(*args)

            (_, result), bars = mapped(both)(operand, output, *fields)
            want = slow(operand, output, fields)
            np.testing.assert_array_equal(result, want)
            for bar, wanted in zip(
                bars, slow_gradients(want, OPERAND_ROWS, fields), strict=True
            ):
                np.testing.assert_array_equal(bar, wanted)


def check_groups():
    """They exchange among themselves."""
    each = np.arange(num_ranks()).reshape(-1, max(1, num_ranks() // 2))[:, ::-1]
    groups = [[int(i) for i in group] for group in each]
    operand, output = rows(0, OPERAND_ROWS, 24), rows(1, OUTPUT_ROWS, 24)
    fields = [np.zeros((num_ranks(), each.shape[1]), np.int32) for _ in range(4)]
    want = np.zeros_like(output)
    for g, group in enumerate(groups):
        part = plan(20 + g, ranks=each.shape[1])
        for f, p in zip(fields, part, strict=True):
            f[group] = p
        want[group] = slow(operand[group], output[group], part)
    f = functools.partial(ragged_all_to_all, axis_name="x", axis_index_groups=groups)
    np.testing.assert_array_equal(mapped(f)(operand, output, *fields), want)


def check_program():
    """It holds our calls and no gather."""

    def layer(operand, *args):
        return jax.grad(lambda x: (call(x, *args) ** 2).sum())(operand)

    f = jax.shard_map(
        lambda *args: layer(*(x[0] for x in args))[None],
        mesh=mesh(),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    args = [rows(0, OPERAND_ROWS, 64), rows(1, OUTPUT_ROWS, 64), *fields_of(1)]
    sharding = NamedSharding(mesh(), P("x"))
    text = jax.jit(f).lower(*(jax.device_put(x, sharding) for x in args))
    text = text.compile().as_text()
    assert text.count('custom_call_target="turbobus_ragged_all_to_all"') == 1
    assert text.count('custom_call_target="turbobus_ragged_all_to_all_transpose"') == 1
    if PLATFORM == "cuda":
        assert "all-gather" not in text
