"""A batch under vmap is exchanged whole, on any number of GPUs: one is enough."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_exchanges import mesh_of
from gpu_programs import gpus
from jax.sharding import PartitionSpec as P
from moe_mesh import integers, routing, scaling_layer

pytestmark = pytest.mark.gpu

T, K, E, H = 96, 2, 8, 260


@pytest.mark.parametrize("mapped", ["tokens", "all"])
def test_every_entry_of_a_batch_is_what_it_is_alone(mapped):
    mesh = mesh_of(gpus()[:2])
    ids = routing("distinct", mesh.size, T, K, E).reshape(-1, K)
    tokens = integers((mesh.size * T, H), seed=1, most=1)
    args = (
        jnp.stack([tokens, tokens + 1, -tokens]),
        jnp.stack([ids, (ids + 1) % E, (ids + 3) % E]),
        integers((3, mesh.size * T, K), seed=2, most=2),
        integers((E, H), seed=3, most=2),
    )
    if mapped == "tokens":
        args = (args[0], args[1][0], args[2][0], args[3])
    axes = (0, None, None, None) if mapped == "tokens" else (0, 0, 0, None)

    def gradients(layer, specs):
        def loss(*args):
            y = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=specs[0])(
                *args
            )
            return (y * (jnp.arange(H) % 3)).sum(), y

        def run(tokens, ids, weights, scale):
            return jax.value_and_grad(
                lambda x, w, s: loss(x, ids, w, s), (0, 1, 2), has_aux=True
            )(tokens, weights, scale)

        return jax.jit(run)

    one = scaling_layer(E)
    specs = tuple(P("x") if a is None else P(None, "x") for a in axes)
    (_, got), got_grads = gradients(jax.vmap(one, in_axes=axes), specs)(*args)
    alone = gradients(one, (P("x"),) * 4)
    scale_grad = 0
    for i in range(3):
        mine = [x if a is None else x[i] for x, a in zip(args, axes, strict=True)]
        (_, want), grads = alone(*mine)
        np.testing.assert_array_equal(got[i], want)
        np.testing.assert_array_equal(got_grads[0][i], grads[0])
        if mapped == "all":
            np.testing.assert_array_equal(got_grads[1][i], grads[1])
        scale_grad = scale_grad + np.asarray(grads[2])
    np.testing.assert_array_equal(got_grads[2], scale_grad)
