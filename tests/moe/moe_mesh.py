"""Meshes, routings, and the layer and the dispatch that most exchange tests run.

`tests/gpu/test_gpu_reports.py` runs some of them on GPUs, by the environment.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe

PLATFORM = os.environ.get("TURBOBUS_MOE_PLATFORM", "cpu")
NUM_RANKS = int(os.environ.get("TURBOBUS_MOE_RANKS", "4"))


def make_mesh(sizes=(NUM_RANKS,), names=("x",), *, is_reversed=False):
    count = int(np.prod(sizes))
    devices = np.array(jax.devices(PLATFORM)[:count])
    if len(devices) < count:
        pytest.skip(f"needs {count} devices, there are {len(devices)}")
    if is_reversed:
        devices = devices[::-1]
    return Mesh(devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))


def routing(kind, num_ranks, num_tokens, top_k, num_experts, seed=0):
    """Returns ``int32[num_ranks, num_tokens, top_k]`` ids of a kind by name."""
    rng = np.random.default_rng(seed)
    shape = (num_ranks, num_tokens, top_k)
    if kind == "distinct":
        ids = np.argsort(rng.random((*shape[:2], num_experts)), -1)[..., :top_k]
    elif kind == "duplicates":
        ids = rng.integers(0, max(2, num_experts // 3), shape)
    elif kind == "masked":
        ids = rng.integers(-2, num_experts + 2, shape)
    elif kind == "one":
        ids = np.zeros(shape)
    elif kind == "first_rank":
        ids = np.broadcast_to(np.arange(top_k) % (num_experts // num_ranks), shape)
    elif kind == "last_expert_or_none":
        ids = np.where(rng.random(shape) < 0.5, num_experts - 1, -1)
    elif kind == "none":
        ids = np.full(shape, -1)
    elif kind == "one_rank_sends":
        ids = rng.integers(0, num_experts, shape)
        ids[1:] = -1
    else:
        raise ValueError(kind)
    return np.array(ids, np.int32)


KINDS = (
    "distinct",
    "duplicates",
    "masked",
    "one",
    "first_rank",
    "last_expert_or_none",
    "none",
    "one_rank_sends",
)


def integers(shape, dtype=np.float32, *, seed=0, most=3):
    """Returns small integers of a dtype: sums of their products are exact."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(-most, most + 1, shape), dtype)


def expert_of_rows(group_sizes, num_rows, expert_capacity=None):
    """Returns ``int32[num_rows]``: the local expert of each row; -1 for padding."""
    num_local = group_sizes.shape[-1]
    row = jnp.arange(num_rows)
    if expert_capacity is None:
        expert = (row[:, None] >= jnp.cumsum(group_sizes)[None]).sum(-1)
        return jnp.where(expert < num_local, expert, -1)
    expert, place = row // expert_capacity, row % expert_capacity
    return jnp.where(place < group_sizes[expert], expert, -1)


def scaling_layer(num_experts, axis_name="x", **options):
    """Returns ``layer(tokens, ids, weights, scale)``; expert e scales by scale[e]."""

    def layer(tokens, expert_ids, weights, scale):
        rows, group_sizes, state = moe.dispatch(
            tokens,
            expert_ids,
            weights,
            num_experts=num_experts,
            axis_name=axis_name,
            **options,
        )
        flat = rows.reshape(-1, rows.shape[-1])
        expert = expert_of_rows(
            group_sizes, flat.shape[0], options.get("expert_capacity")
        )
        # Padding is poisoned: it must reach neither results nor gradients.
        out = jnp.where(
            (expert >= 0)[:, None], flat * scale[expert].astype(flat.dtype), jnp.nan
        )
        return moe.combine(out.astype(rows.dtype).reshape(rows.shape), state)

    return layer


def on_mesh(layer, mesh, axis_name="x", out_specs=None):
    """Returns the layer under shard_map, every argument split over `axis_name`."""

    def run(*args):
        return jax.shard_map(
            layer,
            mesh=mesh,
            in_specs=(P(axis_name),) * len(args),
            out_specs=P(axis_name) if out_specs is None else out_specs,
        )(*args)

    return run


def run_dispatch(ids, num_experts, *, tokens=None, valid=None, mesh=None, **options):
    """Returns rows, group sizes, wanted rows and overflow of each rank.

    `ids`: ``int32[num_ranks, num_tokens, top_k]``.
    """
    num_ranks, num_tokens, top_k = ids.shape
    if tokens is None:
        tokens = integers((num_ranks * num_tokens, 160))

    def step(tokens, ids, valid):
        rows, sizes, state = moe.dispatch(
            tokens,
            ids,
            jnp.ones(ids.shape),
            num_experts=num_experts,
            axis_name="x",
            valid=valid,
            **options,
        )
        return rows[None], sizes[None], state.wanted[None], state.overflow[None]

    if valid is None:
        valid = np.ones(num_ranks * num_tokens, bool)
    mapped = jax.jit(on_mesh(step, mesh or make_mesh((num_ranks,))))
    return map(np.asarray, mapped(tokens, jnp.asarray(ids.reshape(-1, top_k)), valid))
