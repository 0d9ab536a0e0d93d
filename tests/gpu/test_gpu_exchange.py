"""The expert exchange on GPUs equals the dense layer and the CPU's rows."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import gpus
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "moe"))

import moe_reference as ref
from moe_mesh import KINDS, integers, on_mesh, routing, scaling_layer

from jax_turbobus import moe

pytestmark = pytest.mark.multigpu

T, K, E, H = 300, 3, 8, 520
OPTIONS = {
    "dropless": {},
    "half": {"recv_capacity": 450},
    "padded": {"expert_capacity": 140},
}


def mesh_of_gpus():
    devices = np.array(gpus()[:4] if len(gpus()) >= 4 else gpus()[:2])
    return Mesh(devices, ("x",), axis_types=(AxisType.Auto,))


def num_ranks():
    return mesh_of_gpus().size


def inputs(kind="distinct", dtype=jnp.float32, num_tokens=None, hidden=H):
    num_tokens = T if num_tokens is None else num_tokens
    ids = routing(kind, num_ranks(), num_tokens, K, E)
    rows = num_ranks() * num_tokens
    return (
        integers((rows, hidden), dtype, seed=1, most=1),
        jnp.asarray(ids.reshape(-1, K)),
        integers((rows, K), seed=2, most=2),
        integers((E, hidden), seed=3, most=2),
    )


def dense(tokens, ids, weights, scale):
    def expert(e, x):
        return (x * scale[e].astype(x.dtype)).astype(jnp.float32)

    return ref.moe_layer(tokens, ids, weights, expert, E).astype(tokens.dtype)


def on_cpu(function, *args):
    """Runs a function on the first CPU device."""
    with jax.default_device(jax.devices("cpu")[0]):
        return function(*map(np.asarray, args))


def assert_same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def masked_where_dropped(ids, options):
    kept = ref.rows_kept(np.asarray(ids).reshape(num_ranks(), T, K), E, **options)
    kept = [set(rows) for rows in kept]
    masked = np.array(ids)
    for i, j in np.argwhere((masked >= 0) & (masked < E)):
        if divmod(int(i), T) not in kept[masked[i, j]]:
            masked[i, j] = -1
    return masked


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_gradients_are_the_dense_ones(kind, options):
    tokens, ids, weights, scale = inputs(kind)
    layer = on_mesh(scaling_layer(E, **options), mesh_of_gpus())

    def loss(f):
        def run(x, w, s, ids):
            y = f(x, ids, w, s)
            return (y * jnp.arange(H) % 3).sum(), y

        return jax.value_and_grad(run, (0, 1, 2), has_aux=True)

    got = jax.jit(loss(layer))(tokens, weights, scale, ids)
    ids = masked_where_dropped(ids, options)
    assert_same(got, on_cpu(jax.jit(loss(dense)), tokens, weights, scale, ids))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_lie_where_they_do_on_cpu_devices(kind, options):
    tokens, ids, weights, _ = inputs(kind)

    def run(tokens, ids, weights):
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x", **options
        )
        return rows[None], sizes[None], state.wanted[None], state.overflow[None]

    rows, sizes, wanted, overflow = jax.jit(on_mesh(run, mesh_of_gpus()))(
        tokens, ids, weights
    )
    by_rank = np.asarray(ids).reshape(num_ranks(), T, K)
    want_rows, want_sizes = ref.dispatched_rows(
        np.asarray(tokens).reshape(num_ranks(), T, H),
        ref.rows_kept(by_rank, E, **options),
        num_ranks(),
        int(np.prod(rows.shape[1:-1])),
        options.get("expert_capacity"),
    )
    assert_same(np.asarray(rows).reshape(want_rows.shape), want_rows)
    assert_same(sizes, want_sizes)
    everything = np.array([len(pairs) for pairs in ref.rows_wanted(by_rank, E)])
    assert_same(np.asarray(wanted).reshape(-1), everything)
    lost = np.asarray(wanted).sum(-1) > np.asarray(sizes).sum(-1)
    assert_same(overflow, np.where(lost, np.asarray(wanted).sum(-1), 0))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "bool"]
)
@pytest.mark.parametrize("hidden", [1, 7, 520])
def test_every_dtype_and_odd_rows(dtype, hidden):
    tokens, ids, weights, _ = inputs(dtype=jnp.dtype(dtype), hidden=hidden)

    def run(tokens, ids, weights):
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine(rows.astype(jnp.float32), state), sizes

    got, _ = jax.jit(on_mesh(run, mesh_of_gpus(), out_specs=P("x")))(
        tokens, ids, weights
    )
    ones = np.ones((E, hidden), np.float32)
    assert_same(got, on_cpu(dense, tokens.astype(jnp.float32), ids, weights, ones))


@pytest.mark.parametrize("schedule", ["auto", "packed", "broadcast", "direct", "relay"])
def test_schedules_never_change_a_result(schedule):
    args = inputs("duplicates")
    layer = on_mesh(scaling_layer(E, schedule=schedule), mesh_of_gpus())
    assert_same(jax.jit(layer)(*args), on_cpu(dense, *args))


def test_nobody_has_tokens():
    args = inputs("distinct", num_tokens=0)
    layer = on_mesh(scaling_layer(E, recv_capacity=16), mesh_of_gpus())
    assert jax.jit(layer)(*args).shape == (0, H)


def test_two_exchanges_beside_psum_in_many_runs():
    """Calls of one helper that look alike, among XLA's own collectives."""
    tokens, ids, weights, scale = inputs("masked")
    one = jax.jit(scaling_layer(E))

    def step(tokens, ids, weights, scale):
        a = one(tokens, ids, weights, scale)
        b = one(tokens + 1, ids, weights, scale)
        total = lax.psum(a.sum(), "x")
        return a, b, one(a + total, ids, weights, scale)

    layer = on_mesh(step, mesh_of_gpus())
    run = jax.jit(layer)
    args = (tokens, ids, weights, scale)
    a = on_cpu(dense, *args)
    b = on_cpu(dense, tokens + 1, ids, weights, scale)
    c = on_cpu(dense, a + np.asarray(a).sum(), ids, weights, scale)
    for _ in range(200):
        assert_same(run(*args), (a, b, c))


def test_scan_remat_and_vmap():
    tokens, ids, weights, scale = inputs("masked")
    batch = jnp.stack([tokens, tokens + 1, -tokens])

    def layers(one):
        def run(batch, ids, weights, scale):
            def body(x, _):
                y = jax.vmap(one, in_axes=(0, None, None, None))(x, ids, weights, scale)
                return jnp.clip(y, -2, 2), None

            return lax.scan(jax.checkpoint(body), batch, None, length=3)[0]

        return run

    mapped = jax.shard_map(
        layers(scaling_layer(E)),
        mesh=mesh_of_gpus(),
        in_specs=(P(None, "x"), P("x"), P("x"), P("x")),
        out_specs=P(None, "x"),
    )

    def gradients(f):
        return jax.jit(jax.grad(lambda *args: f(*args).sum(), (0, 2, 3)))

    args = (batch, ids, weights, scale)
    assert_same(gradients(mapped)(*args), on_cpu(gradients(layers(dense)), *args))


def test_chunks_give_what_the_whole_does():
    tokens, ids, weights, scale = inputs("distinct")

    def layer(num_chunks):
        def run(tokens, ids, weights, scale):
            def experts(rows, group_sizes):
                ends = jnp.cumsum(group_sizes)
                expert = (jnp.arange(len(rows))[:, None] >= ends).sum(-1)
                return rows * scale.at[expert].get(mode="fill", fill_value=0)

            return moe.expert_parallel(
                experts,
                tokens,
                ids,
                weights,
                num_experts=E,
                axis_name="x",
                num_chunks=num_chunks,
            )

        return on_mesh(run, mesh_of_gpus())

    def gradients(f):
        return jax.jit(jax.grad(lambda *args: f(*args).sum(), (0, 2, 3)))

    args = (tokens, ids, weights, scale)
    want = on_cpu(dense, *args), on_cpu(gradients(dense), *args)
    for num_chunks in (1, 2, 4):
        one = layer(num_chunks)
        assert_same((jax.jit(one)(*args), gradients(one)(*args)), want)
