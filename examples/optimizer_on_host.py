"""Adam's moments live in host memory; the devices hold only parameters.

Adam keeps two numbers for every parameter, so its state is twice the model. Here it
lies in pinned host memory, split over the devices (each keeps its own part). A training
step brings it in, updates it, and writes it back into the same buffers, all inside one
`jax.jit`. Run: python examples/optimizer_on_host.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as jtb


def loss(params, x, y):
    hidden = jax.nn.relu(x @ params["in"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def main(hidden=1024, batch=256, steps=20):
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    on_device = NamedSharding(mesh, P("devices"))
    on_host = NamedSharding(mesh, P("devices"), memory_kind="pinned_host")

    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    params = {"in": normal(64, hidden) / 8, "out": normal(hidden, 64) / hidden**0.5}
    params = jax.device_put(params, NamedSharding(mesh, P()))
    data = jax.device_put((normal(batch, 64), normal(batch, 64)), on_device)

    optimizer = optax.adam(1e-3)
    adam, *rest = optimizer.init(params)
    moments = jax.device_put((adam.mu, adam.nu), on_host)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, moments, count, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        mu, nu = jtb.to_device(moments)  # host -> devices, each its own part
        state = (adam._replace(count=count, mu=mu, nu=nu), *rest)
        updates, (new, *_) = optimizer.update(grads, state)
        # devices -> host, into the donated buffers: no new host memory.
        moments = jtb.to_host((new.mu, new.nu), out=moments)
        return optax.apply_updates(params, updates), moments, new.count, value

    losses, count = [], adam.count
    for _ in range(steps):
        params, moments, count, value = step(params, moments, count, *data)
        losses.append(float(value))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moments)}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(moments))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
    print(f"optimizer state: {size / 2**20:.2f} MiB, all of it in {', '.join(kinds)}")
    return losses, moments


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
