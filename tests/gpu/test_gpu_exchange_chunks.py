"""Exchanges under way beside the experts, on one GPU: the same program as on many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_exchanges import mesh_of
from gpu_programs import PLATFORM, gpus
from jax.sharding import PartitionSpec as P

from jax_turbobus import _ffi, moe
from jax_turbobus.moe import _devices

pytestmark = pytest.mark.gpu

T, H, E, K = 512, 256, 8, 2


def on_mesh(layer, num_args):
    return jax.shard_map(
        layer, mesh=mesh_of(gpus()[:1]), in_specs=(P("x"),) * num_args, out_specs=P("x")
    )


def gradients(num_chunks):
    def layer(tokens, ids, weights, params):
        return moe.expert_parallel(
            lambda rows, _: rows * params[:, None],
            tokens,
            ids,
            weights,
            num_experts=E,
            axis_name="x",
            num_chunks=num_chunks,
            expert_capacity=T,
        )

    def loss(*args):
        return (on_mesh(layer, 4)(*args) ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 2, 3)))


@pytest.mark.parametrize("reason", [None, "a test says so"], ids=["direct", "counted"])
def test_gradients_of_chunks_are_those_of_the_whole(monkeypatch, reason):
    # The program of GPUs that do not reach each other counts its chunks early.
    monkeypatch.setattr(_devices, "why_through_host", lambda ctx: reason)
    rng = np.random.default_rng(0)
    # Small integers: sums are exact in any order.
    args = (
        rng.integers(-2, 3, (T, H)).astype(np.float32),
        rng.integers(0, E, (T, K)).astype(np.int32),
        rng.integers(-2, 3, (T, K)).astype(np.float32),
        rng.integers(-2, 3, (E, H)).astype(np.float32),
    )
    in_chunks = gradients(3)
    text = in_chunks.lower(*args).as_text()
    assert ("turbobus_moe_count" in text) == (reason is not None)
    results = jax.tree.leaves(in_chunks(*args))
    expected = jax.tree.leaves(gradients(1)(*args))
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.skipif(PLATFORM != "cuda", reason="on CPU devices nothing is beside")
def test_what_is_under_way_is_awaited_where_another_op_ends_the_program():
    """Else it would write into memory that has become another's."""

    def refused(rows, _):
        # By XLA: it has other operands.
        return jax.ffi.ffi_call("turbobus_moe_combine", jax.typeof(rows))(rows)

    def layer(*args):
        return moe.expert_parallel(
            refused, *args, num_experts=E, axis_name="x", num_chunks=3
        )

    args = (jnp.ones((T, H)), jnp.zeros((T, K), jnp.int32), jnp.ones((T, K)))
    program = jax.jit(on_mesh(layer, 3))
    moe.reset_exchange_stats()
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="number of arguments"):
            jax.block_until_ready(program(*args))
    # In each the next chunk's dispatch, too, and nothing behind the experts.
    calls = {kind.op: kind.num_calls for kind in moe.exchange_stats()}
    assert calls == {"dispatch": 6}
    assert _ffi.cuda().num_exchanges_under_way() == 0
