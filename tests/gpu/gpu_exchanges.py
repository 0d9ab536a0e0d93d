"""Exchanges on the GPUs at hand: inputs, the dense layer, and how results compare.

Whole checks on top of them, which several processes run: gpu_exchange_checks.py.
"""

import jax
import jax.numpy as jnp
import moe_reference as ref
import numpy as np
from gpu_programs import gpus
from jax.sharding import AxisType, Mesh
from moe_mesh import integers, routing

# With few tokens rows go by mail where GPUs do not reach each other's memory, with
# many through rings of slots.
FEW, MANY = 300, 2000
K, E, H = 3, 8, 520


def options_for(num_tokens):
    """Capacities by name: all rows fit, half of them, each expert has its own."""
    return {
        "dropless": {},
        "half": {"recv_capacity": num_tokens * 3 // 2},
        "padded": {"expert_capacity": 140},
    }


def mesh_of(devices):
    return Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))


def mesh_of_gpus():
    return mesh_of(gpus()[:4] if len(gpus()) >= 4 else gpus()[:2])


def num_ranks():
    return mesh_of_gpus().size


def inputs(kind="distinct", num_tokens=FEW, dtype=jnp.float32, hidden=H):
    """Returns tokens, ids, weights and scales of the experts, of all ranks."""
    ids = routing(kind, num_ranks(), num_tokens, K, E)
    rows = num_ranks() * num_tokens
    return (
        integers((rows, hidden), dtype, seed=1, most=1),
        jnp.asarray(ids.reshape(-1, K)),
        integers((rows, K), seed=2, most=2),
        integers((E, hidden), seed=3, most=2),
    )


def by_rank(ids):
    return np.asarray(ids).reshape(num_ranks(), -1, K)


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
    """Returns ids with -1 for the choices whose rows the exchange drops."""
    kept = [set(rows) for rows in ref.rows_kept(by_rank(ids), E, **options)]
    masked = np.array(ids)
    num_tokens = len(masked) // num_ranks()
    for i, j in np.argwhere((masked >= 0) & (masked < E)):
        if divmod(int(i), num_tokens) not in kept[masked[i, j]]:
            masked[i, j] = -1
    return masked
