"""Exchanges in programs that are lowered or compiled ahead of time, and exported."""

import jax
import jax.numpy as jnp
import pytest
from exchange_inputs import E, T, assert_same, inputs
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moe_mesh import make_mesh, on_mesh, scaling_layer
from moe_reference import dense

from jax_turbobus import _ffi, moe
from jax_turbobus.moe import _devices


def test_ahead_of_time_compilation_and_sharded_arguments():
    mesh = make_mesh()
    args = inputs(4)
    mapped = jax.jit(on_mesh(scaling_layer(E), mesh))
    sharded = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in args]
    compiled = mapped.lower(*sharded).compile()
    assert_same(compiled(*sharded), dense(*args))
    text = compiled.as_text()
    # What crosses by XLA's own collectives is keys: s32[4] of each rank.
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(gathers) == 2
    assert all("s32[" in line and "f32[" not in line for line in gathers)
    assert " all-to-all(" not in text


def test_nested_shard_maps_that_map_one_axis_each():
    """The inner one's mesh is abstract when it is lowered."""
    args = inputs(4)
    spec = P("y")

    def outer(*args):
        inner = jax.shard_map(
            scaling_layer(E, "y"),
            in_specs=(spec,) * 4,
            out_specs=spec,
            axis_names={"y"},
        )
        return inner(*args)

    mapped = jax.shard_map(
        outer,
        mesh=make_mesh((2, 2), ("x", "y")),
        in_specs=(P("x"), P("x"), P("x"), P()),
        out_specs=P("x"),
        axis_names={"x"},
    )
    # JAX cannot lower the gradient of such a nest, whatever is in it.
    assert_same(jax.jit(mapped)(*args), dense(*args))


def test_lowering_for_an_abstract_mesh():
    mesh = jax.sharding.AbstractMesh(
        (4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    traced = jax.jit(on_mesh(scaling_layer(E), mesh)).trace(*inputs(4))
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "turbobus_moe_dispatch" in text
    assert "turbobus_moe_combine" in text


@pytest.mark.parametrize("is_ragged", [False, True])
def test_an_exported_program_exchanges_after_a_round_trip(is_ragged):
    mesh = make_mesh()
    args = inputs(4)
    layer = scaling_layer(E)
    want = dense(*args)
    if is_ragged:
        args, want = args[:1], args[0]

        def layer(x):
            sizes = jnp.full(4, T // 4)
            plan = (jnp.arange(4) * (T // 4), sizes)
            back = (jnp.full(4, lax.axis_index("x") * (T // 4)), sizes)
            for _ in range(2):
                x = moe.ragged_all_to_all(x, x, *plan, *back, axis_name="x")
            return x

    sharded = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in args]
    mapped = jax.jit(on_mesh(layer, mesh))
    with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
        export.export(mapped)(*sharded)
    checks = moe.export_checks()
    exported = export.export(mapped, disabled_checks=checks)(*sharded)
    again = export.deserialize(exported.serialize())
    assert_same(jax.jit(again.call)(*sharded), want)


def test_programs_for_gpus_can_be_exported(monkeypatch):
    """They have calls that CPU devices have not."""
    # GPUs that do not reach each other have one more.
    monkeypatch.setattr(_devices, "why_through_host", lambda ctx: "a test says so")

    def layer(tokens, ids, weights):
        y = moe.expert_parallel(
            lambda rows, _: rows * 2,
            tokens,
            ids,
            weights,
            num_experts=E,
            axis_name="x",
            num_chunks=2,
        )
        sizes = jnp.zeros(4, jnp.int32)
        return moe.ragged_all_to_all(y, jnp.zeros_like(y), *[sizes] * 4, axis_name="x")

    mesh = make_mesh()
    args = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in inputs(4)[:3]]

    def loss(tokens, ids, weights):
        return (on_mesh(layer, mesh)(tokens, ids, weights) ** 2).sum()

    exported = export.export(
        jax.jit(jax.grad(loss)), platforms=["cuda"], disabled_checks=moe.export_checks()
    )(*args)
    called = exported.mlir_module()
    for name in _ffi.CUDA_ONLY:
        assert name in called
