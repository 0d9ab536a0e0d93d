"""A mixture-of-experts layer under `shard_map`, its experts as one grouped matmul.

Experts live on different devices. `dispatch` brings every token to the devices that own
its experts, packed and sorted by expert, as `jax.lax.ragged_dot` wants them; `combine`
brings the weighted sums home. Both differentiate. Run: python examples/moe_layer.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe


def moe_layer(params, tokens, *, num_experts, top_k, axis_name):
    """`tokens: f32[tokens, hidden]` of this device to the same shape."""
    logits = tokens @ params["router"]
    weights, expert_ids = jax.lax.top_k(jax.nn.softmax(logits), top_k)
    rows, group_sizes, state = moe.dispatch(
        tokens, expert_ids, weights, num_experts=num_experts, axis_name=axis_name
    )
    inner = jax.nn.gelu(jax.lax.ragged_dot(rows, params["up"], group_sizes))
    return moe.combine(jax.lax.ragged_dot(inner, params["down"], group_sizes), state)


def dense_layer(params, tokens, *, top_k):
    """The same on one device, every expert on every token: slow, obvious."""
    weights, expert_ids = jax.lax.top_k(
        jax.nn.softmax(tokens @ params["router"]), top_k
    )
    inner = jax.nn.gelu(jnp.einsum("th,ehf->etf", tokens, params["up"]))
    everyones = jnp.einsum("etf,efh->eth", inner, params["down"])
    chosen = everyones[expert_ids, jnp.arange(len(tokens))[:, None]]
    return jnp.einsum("tk,tkh->th", weights, chosen)


def main(tokens=1024, hidden=128, num_experts=16, top_k=2):
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32)

    params = {
        "router": normal(hidden, num_experts),
        "up": normal(num_experts, hidden, 2 * hidden),
        "down": normal(num_experts, 2 * hidden, hidden),
    }
    specs = {"router": P(), "up": P("devices"), "down": P("devices")}
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)

    def layer(params, x):
        return moe_layer(
            params, x, num_experts=num_experts, top_k=top_k, axis_name="devices"
        )

    spread = jax.shard_map(
        layer, mesh=mesh, in_specs=(specs, P("devices")), out_specs=P("devices")
    )
    grad = jax.jit(jax.grad(lambda p, x: jnp.sum(spread(p, x) ** 2)))
    expected_grad = jax.jit(
        jax.grad(lambda p, x: jnp.sum(dense_layer(p, x, top_k=top_k) ** 2))
    )
    y = jax.jit(spread)(params, x)
    np.testing.assert_allclose(y, dense_layer(params, x, top_k=top_k), atol=1e-4)
    for name, value in grad(params, x).items():
        np.testing.assert_allclose(value, expected_grad(params, x)[name], atol=2e-3)
    print(
        f"{num_experts} experts on {mesh.size} devices, {tokens} tokens, top-{top_k}:"
    )
    print("result and gradients equal the dense layer's on one device")
    return y


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    # GPUs round to TF32 otherwise, each product its own way.
    jax.config.update("jax_default_matmul_precision", "highest")
    main()
