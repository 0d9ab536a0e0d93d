"""A model larger than its device: layers wait in host memory and come in one by one.

The stack of weights `[layers, hidden, hidden]` never lies on the device. `scan_layers`
computes with one layer while the next comes in, so two of them are there at any time.
Its gradient fetches the layers again, last to first.
Run: python examples/stream_layers.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_turbobus as jtb


def layer(weights, x):
    return x + jax.nn.relu(x @ weights["up"]) @ weights["down"]


def main(num_layers=24, hidden=512, batch=64):
    device = jax.devices()[0]
    on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    rng = np.random.default_rng(0)
    shape = (num_layers, hidden, hidden)
    stack = {
        name: (rng.standard_normal(shape) * 0.3 / hidden**0.5).astype(np.float32)
        for name in ("up", "down")
    }
    x = jax.device_put(rng.standard_normal((batch, hidden)).astype(np.float32), device)
    on_device = jax.device_put(stack, device)  # only to compare with
    stack = jax.device_put(stack, on_host)

    def streamed(stack, x):
        return jnp.mean(jtb.scan_layers(layer, stack, x) ** 2)

    def resident(stack, x):
        return jnp.mean(
            jax.lax.scan(lambda x, w: (layer(w, x), None), x, stack)[0] ** 2
        )

    value, grad_x = jax.jit(jax.value_and_grad(streamed, argnums=1))(stack, x)
    expected, expected_grad = jax.jit(jax.value_and_grad(resident, argnums=1))(
        on_device, x
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(stack))
    print(f"{num_layers} layers, {size / 2**20:.1f} MiB in host memory")
    print(f"on the device at any time: {2 * size / num_layers / 2**20:.1f} MiB of them")
    print(f"result {float(value):.6f}, with all layers resident {float(expected):.6f}")
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad_x, expected_grad, rtol=1e-4, atol=1e-7)
    return value, grad_x


if __name__ == "__main__":
    main()
