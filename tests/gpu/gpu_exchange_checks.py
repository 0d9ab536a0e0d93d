"""Whole checks of exchanges on GPUs: with peer access here, without it elsewhere.

Peer access is decided once for a process, so that tests without it run these in
processes of their own (`gpu_programs.run_python`).
"""

import gpu_exchanges as g
import jax
import jax.numpy as jnp
import moe_reference as ref
import numpy as np
from gpu_exchanges import E, H
from jax import lax
from jax.sharding import PartitionSpec as P
from moe_mesh import on_mesh, scaling_layer

from jax_turbobus import moe


def check_layers_and_gradients(kind, options, num_tokens=g.FEW):
    """They are those of the dense layer."""
    tokens, ids, weights, scale = g.inputs(kind, num_tokens)
    layer = on_mesh(scaling_layer(E, **options), g.mesh_of_gpus())

    def loss(f):
        def run(x, w, s, ids):
            y = f(x, ids, w, s)
            return (y * jnp.arange(H) % 3).sum(), y

        return jax.value_and_grad(run, (0, 1, 2), has_aux=True)

    got = jax.jit(loss(layer))(tokens, weights, scale, ids)
    ids = g.masked_where_dropped(ids, options)
    want = g.on_cpu(jax.jit(loss(g.dense)), tokens, weights, scale, ids)
    g.assert_same(got, want)


def check_rows(kind, options, num_tokens=g.FEW):
    """They lie where they do on CPU devices."""
    tokens, ids, weights, _ = g.inputs(kind, num_tokens)

    def run(tokens, ids, weights):
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x", **options
        )
        return rows[None], sizes[None], state.wanted[None], state.overflow[None]

    rows, sizes, wanted, overflow = jax.jit(on_mesh(run, g.mesh_of_gpus()))(
        tokens, ids, weights
    )
    ids = g.by_rank(ids)
    want_rows, want_sizes = ref.dispatched_rows(
        np.asarray(tokens).reshape(g.num_ranks(), num_tokens, H),
        ref.rows_kept(ids, E, **options),
        g.num_ranks(),
        int(np.prod(rows.shape[1:-1])),
        options.get("expert_capacity"),
    )
    g.assert_same(np.asarray(rows).reshape(want_rows.shape), want_rows)
    g.assert_same(sizes, want_sizes)
    everything = np.array([len(pairs) for pairs in ref.rows_wanted(ids, E)])
    g.assert_same(np.asarray(wanted).reshape(-1), everything)
    lost = np.asarray(wanted).sum(-1) > np.asarray(sizes).sum(-1)
    g.assert_same(overflow, np.where(lost, np.asarray(wanted).sum(-1), 0))


def check_dtype(dtype, hidden, num_tokens=g.FEW):
    """Rows of any dtype and width arrive."""
    tokens, ids, weights, _ = g.inputs(
        num_tokens=num_tokens, dtype=jnp.dtype(dtype), hidden=hidden
    )

    def run(tokens, ids, weights):
        rows, sizes, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine(rows.astype(jnp.float32), state), sizes

    got, _ = jax.jit(on_mesh(run, g.mesh_of_gpus(), out_specs=P("x")))(
        tokens, ids, weights
    )
    ones = np.ones((E, hidden), np.float32)
    want = g.on_cpu(g.dense, tokens.astype(jnp.float32), ids, weights, ones)
    g.assert_same(got, want)


def check_schedule(schedule, num_tokens=g.FEW):
    """It doesn't change the result."""
    args = g.inputs("duplicates", num_tokens)
    layer = on_mesh(scaling_layer(E, schedule=schedule), g.mesh_of_gpus())
    g.assert_same(jax.jit(layer)(*args), g.on_cpu(g.dense, *args))


def check_no_tokens():
    """Nothing is exchanged, and nothing fails."""
    args = g.inputs(num_tokens=0)
    layer = on_mesh(scaling_layer(E, recv_capacity=16), g.mesh_of_gpus())
    assert jax.jit(layer)(*args).shape == (0, H)


def check_calls_that_look_alike(num_tokens=g.FEW):
    """Calls of one helper, among XLA's own collectives, in many runs."""
    tokens, ids, weights, scale = g.inputs("masked", num_tokens)
    one = jax.jit(scaling_layer(E))

    def step(tokens, ids, weights, scale):
        a = one(tokens, ids, weights, scale)
        b = one(tokens + 1, ids, weights, scale)
        total = lax.psum(a.sum(), "x")
        return a, b, one(a + total, ids, weights, scale)

    layer = on_mesh(step, g.mesh_of_gpus())
    run = jax.jit(layer)
    args = (tokens, ids, weights, scale)
    a = g.on_cpu(g.dense, *args)
    b = g.on_cpu(g.dense, tokens + 1, ids, weights, scale)
    c = g.on_cpu(g.dense, a + np.asarray(a).sum(), ids, weights, scale)
    for _ in range(200):
        g.assert_same(run(*args), (a, b, c))


def check_scan_remat_and_vmap(num_tokens=g.FEW):
    """Their gradients are those of the dense layer."""
    tokens, ids, weights, scale = g.inputs("masked", num_tokens)
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
        mesh=g.mesh_of_gpus(),
        in_specs=(P(None, "x"), P("x"), P("x"), P("x")),
        out_specs=P(None, "x"),
    )

    def gradients(f):
        return jax.jit(jax.grad(lambda *args: f(*args).sum(), (0, 2, 3)))

    args = (batch, ids, weights, scale)
    g.assert_same(gradients(mapped)(*args), g.on_cpu(gradients(layers(g.dense)), *args))


def check_chunks(num_tokens=g.FEW):
    """`expert_parallel` gives what the whole does, in any number of chunks."""
    tokens, ids, weights, scale = g.inputs("distinct", num_tokens)

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

        return on_mesh(run, g.mesh_of_gpus())

    def gradients(f):
        return jax.jit(jax.grad(lambda *args: f(*args).sum(), (0, 2, 3)))

    args = (tokens, ids, weights, scale)
    want = g.on_cpu(g.dense, *args), g.on_cpu(gradients(g.dense), *args)
    for num_chunks in (1, 2, 4):
        one = layer(num_chunks)
        g.assert_same((jax.jit(one)(*args), gradients(one)(*args)), want)
