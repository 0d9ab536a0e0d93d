"""Exchanges in plain JAX collectives: what ours give, where ours cannot run."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from moe_mesh import KINDS, integers, make_mesh, on_mesh, routing, scaling_layer

from jax_turbobus import moe
from jax_turbobus.moe import _devices

T, K, E, H = 10, 3, 8, 160
CAPACITIES = (
    {},
    {"recv_capacity": 17},
    {"recv_capacity": 0},
    {"expert_capacity": 5},
)


def inputs(kind="masked", batch=()):
    ids = [routing(kind, 4, T, K, E, i) for i in range(int(np.prod(batch, dtype=int)))]
    return (
        integers((*batch, 4 * T, H), seed=1),
        jnp.asarray(np.reshape(ids, (*batch, 4 * T, K))),
        integers((*batch, 4 * T, K), seed=2, most=2),
        integers((E, H), seed=3, most=2),
    )


def both_ways(monkeypatch, function, *args):
    """Returns what our exchange makes of the arguments, and what collectives do."""
    ours = jax.jit(lambda *args: function(*args))(*args)
    monkeypatch.setattr(_devices, "why_apart", lambda *_: "asked by a test")
    plain = jax.jit(lambda *args: function(*args))
    assert "turbobus" not in plain.lower(*args).as_text()
    return ours, plain(*args)


def assert_same(ours, plain):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("options", CAPACITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_sizes_and_states_are_the_same(monkeypatch, kind, options):
    def run(tokens, ids, weights, _):
        rows, group_sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x", **options
        )
        return rows, group_sizes, state, state.overflow[None]

    function = on_mesh(run, make_mesh())
    assert_same(*both_ways(monkeypatch, function, *inputs(kind)))


@pytest.mark.parametrize("options", CAPACITIES)
@pytest.mark.parametrize("kind", ["masked", "duplicates", "one"])
def test_layers_and_gradients_are_the_same(monkeypatch, kind, options):
    layer = on_mesh(scaling_layer(E, **options), make_mesh())

    def function(tokens, ids, weights, scale):
        grad = jax.grad(lambda x, w, s: (layer(x, ids, w, s) ** 2).sum(), (0, 1, 2))
        return layer(tokens, ids, weights, scale), grad(tokens, weights, scale)

    assert_same(*both_ways(monkeypatch, function, *inputs(kind)))


@pytest.mark.parametrize("options", CAPACITIES[1::2])
@pytest.mark.parametrize("field", ["expert_ids", "slots"])
def test_a_state_changed_after_dispatch_is_obeyed(monkeypatch, field, options):
    """Rows stay where dispatch put them, whatever choices are masked later."""

    def layer(tokens, ids, weights, mask):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x", **options
        )
        changed = jnp.where(mask, getattr(state, field), -1)
        state = dataclasses.replace(state, **{field: changed})
        return moe.combine(rows * 2, state)

    mapped = on_mesh(layer, make_mesh())

    def function(tokens, ids, weights, mask):
        grad = jax.grad(lambda x, w: (mapped(x, ids, w, mask) ** 2).sum(), (0, 1))
        return mapped(tokens, ids, weights, mask), grad(tokens, weights)

    tokens, ids, weights, _ = inputs("distinct")
    mask = jnp.asarray(np.random.default_rng(5).random(ids.shape) < 0.5)
    ours, plain = both_ways(monkeypatch, function, tokens, ids, weights, mask)
    assert_same(ours, plain)
    assert np.asarray(ours[0]).any()


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), "x"])
def test_any_axes(monkeypatch, axes):
    mesh = make_mesh((2, 2), ("x", "y"))
    layer = jax.shard_map(
        scaling_layer(E, axes),
        mesh=mesh,
        in_specs=(*(P(("x", "y")),) * 3, P(axes)),
        out_specs=P(("x", "y")),
    )
    assert_same(*both_ways(monkeypatch, layer, *inputs()))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8", "bool"])
def test_any_dtype(monkeypatch, dtype):
    tokens, ids, weights, _ = inputs()

    def run(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine(rows if dtype != "bool" else rows + 0.0, state)

    function = on_mesh(run, make_mesh())
    with jax.enable_x64(dtype == "float64"):
        args = (tokens.astype(dtype), ids, weights)
        assert_same(*both_ways(monkeypatch, function, *args))


def test_vmap_and_remat(monkeypatch):
    layer = jax.vmap(
        jax.checkpoint(scaling_layer(E)), in_axes=(0, 0, 0, None), out_axes=0
    )
    mapped = jax.shard_map(
        layer,
        mesh=make_mesh(),
        in_specs=(*(P(None, "x"),) * 3, P("x")),
        out_specs=P(None, "x"),
    )

    def function(*args):
        return jax.value_and_grad(lambda *a: mapped(*a).sum(), (0, 2, 3))(*args)

    assert_same(*both_ways(monkeypatch, function, *inputs(batch=(3,))))


def test_nobody_has_tokens(monkeypatch):
    args = (jnp.ones((0, H)), jnp.zeros((0, K), jnp.int32), jnp.ones((0, K)))
    layer = on_mesh(scaling_layer(E), make_mesh())
    scale = jnp.ones((E, H))
    assert_same(*both_ways(monkeypatch, layer, *args, scale))


def test_the_reason_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(_devices, "why_apart", lambda *_: "asked by a test")
    with caplog.at_level("INFO", "jax_turbobus"):
        jax.jit(on_mesh(scaling_layer(E), make_mesh())).lower(*inputs())
    assert "dispatch over 'x': plain JAX collectives: asked by a test" in caplog.text
    assert "combine over 'x': plain JAX collectives: asked by a test" in caplog.text


def test_other_platforms_lower_to_collectives():
    layer = jax.jit(on_mesh(scaling_layer(E), make_mesh()))
    lowered = layer.trace(*inputs()).lower(lowering_platforms=("tpu",)).as_text()
    assert "turbobus" not in lowered
    assert "reduce_scatter" in lowered


class Library:
    """Stands in for the CUDA library of a machine with two GPUs."""

    def __init__(self, can_access_peer):
        self.can_access_peer = can_access_peer

    def why_no_peer_access(self, gpu, peer):
        if self.can_access_peer(gpu, peer):
            return ""
        return f"GPU {gpu} cannot reach the memory of GPU {peer}: a test says so"


def lowered_for_gpus(monkeypatch, library):
    monkeypatch.setattr(_devices._compat, "has_cuda_devices", lambda: True)
    monkeypatch.setattr(_devices._ffi, "cuda", lambda: library)
    layer = jax.jit(on_mesh(scaling_layer(E), make_mesh()))
    return layer.trace(*inputs()).lower(lowering_platforms=("cuda",)).as_text()


def test_gpus_need_the_library(monkeypatch, caplog):
    with caplog.at_level("INFO", "jax_turbobus"):
        lowered = lowered_for_gpus(monkeypatch, None)
    assert "turbobus_moe_combine" not in lowered
    assert "reduce_scatter" in lowered
    assert "collectives: the CUDA half of jax_turbobus was not built" in caplog.text


def test_gpus_without_peer_access_exchange_through_host_memory(monkeypatch, caplog):
    with caplog.at_level("INFO", "jax_turbobus"):
        lowered = lowered_for_gpus(monkeypatch, Library(lambda gpu, peer: gpu == 0))
    assert "turbobus_moe_combine" in lowered
    assert "reduce_scatter" not in lowered
    said = "combine over 'x': packed, through host memory: GPU 1 cannot reach the"
    assert f"{said} memory of GPU 0: a test says so" in caplog.text


def test_gpus_with_peer_access_have_nothing_to_say(monkeypatch, caplog):
    with caplog.at_level("INFO", "jax_turbobus"):
        lowered = lowered_for_gpus(monkeypatch, Library(lambda *_: True))
    assert "turbobus_moe_combine" in lowered
    # But for the schedule that was chosen.
    assert "memory" not in caplog.text
    assert "collectives" not in caplog.text


def test_auto_weighs_what_gpus_cost_where_there_are_some(monkeypatch):
    """On CPU devices launches cost more: everything to everybody saves some."""
    shapes = [(2 * 1024, 1024), (2 * 1024, 2), (2 * 1024, 2), (E, 1024)]
    dtypes = ["float32", "int32", "float32", "float32"]
    args = list(map(jax.ShapeDtypeStruct, shapes, dtypes))

    def schedules(has_gpus):
        monkeypatch.setattr(_devices._compat, "has_cuda_devices", lambda: has_gpus)
        layer = jax.jit(on_mesh(scaling_layer(E), make_mesh((2,))))
        lowered = layer.trace(*args).lower(lowering_platforms=("cpu",)).as_text()
        return set(re.findall(r"schedule = (\d) : i64", lowered))

    assert schedules(has_gpus=False) == {"1"}
    assert schedules(has_gpus=True) == {"0"}


LIMITS = {"num_ranks": 16, "num_experts": 1024, "top_k": 32}


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({}, None),
        ({"num_ranks": 17}, "17 ranks, at most 16 on GPUs"),
        ({"num_experts": 1025}, "1025 experts, at most 1024 on GPUs"),
        ({"top_k": 33}, "33 choices a token, at most 32 on GPUs"),
    ],
)
def test_how_large_exchanges_on_gpus_are(sizes, reason):
    assert _devices.why_too_large_for_gpus(**LIMITS | sizes) == reason


@pytest.mark.parametrize(
    ("constant", "limit"),
    [("Ranks", "num_ranks"), ("Experts", "num_experts"), ("TopK", "top_k")],
)
def test_limits_are_those_of_the_kernels(constant, limit):
    header = pathlib.Path(__file__).parents[2] / "cc/moe/cuda/kernels.h"
    (most,) = re.findall(rf"\bkMax{constant} = (\d+);", header.read_text())
    assert int(most) == LIMITS[limit]


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "said"),
    [
        (1024, 32, None),
        (1028, 2, "1028 experts, at most 1024 on GPUs"),
        (64, 33, "33 choices a token, at most 32 on GPUs"),
    ],
)
def test_gpus_leave_what_is_too_large_to_collectives(
    caplog, num_experts, top_k, said, num_chunks
):
    def loss(tokens, ids, weights):
        sums = moe.expert_parallel(
            lambda rows, _: rows * 2,
            tokens,
            ids,
            weights,
            num_experts=num_experts,
            axis_name="x",
            num_chunks=num_chunks,
        )
        return (sums**2).sum()[None]

    def gradients(*args):
        layer = on_mesh(loss, make_mesh())
        return jax.grad(lambda *a: layer(*a).sum(), (0, 2))(*args)

    choices = (4 * T, top_k)
    args = (jnp.ones((4 * T, H)), jnp.zeros(choices, jnp.int32), jnp.ones(choices))
    with caplog.at_level("INFO", "jax_turbobus"):
        traced = jax.jit(gradients).trace(*args)
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("turbobus_moe" in lowered) == (said is None)
    for op in ("dispatch", "combine", "combine_grad", "dispatch_grad"):
        assert (f"{op} over 'x': plain JAX collectives: {said}" in caplog.text) == (
            said is not None
        )
