"""Where the ranks of an exchange are: the mesh is known when a program is lowered."""

import itertools
from typing import Any

import jax
import numpy as np

from jax_turbobus import _compat, _ffi

__all__ = [
    "MAX_GPU_RANKS",
    "ranks_of",
    "sizes_of",
    "why_apart",
    "why_apart_on_gpus",
    "why_not_on_gpus",
    "why_through_host",
    "why_too_large_for_gpus",
]

# What handlers for GPUs take: `kMaxRanks`, `kMaxExperts` and `kMaxTopK` in
# cc/moe/cuda/kernels.h.
MAX_GPU_RANKS = 16
_MAX_GPU_EXPERTS = 1024
_MAX_GPU_TOP_K = 32


def _mesh(ctx: Any) -> Any:
    return ctx.module_context.axis_context.mesh


def sizes_of(ctx: Any, axes: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns the sizes of mesh axes.

    Args:
      ctx: of a lowering inside `jax.shard_map`.
      axes: mesh axes.
    """
    return tuple(_mesh(ctx).shape[axis] for axis in axes)


def why_apart(ctx: Any, axes: tuple[Any, ...] | None) -> str | None:
    """Returns why ranks along `axes` cannot meet in this process; None if they can.

    Args:
      ctx: of a lowering inside `jax.shard_map`.
      axes: mesh axes of the ranks; None: all devices of the mesh must be here.
    """
    mesh = _mesh(ctx)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        # Lowered ahead of time, or under a shard_map that maps other axes.
        if jax.process_count() == 1 and axes is not None:
            return None
        return "its mesh is abstract, and does not say where its ranks are"
    devices = mesh.devices
    processes = np.vectorize(lambda d: d.process_index, otypes=[int])(devices)
    if axes is None:
        by_group = processes.reshape(1, -1)
    else:
        by_group = _by_group(processes, mesh.axis_names, axes)
    if (by_group == by_group[:, :1]).all():
        return None
    return f"its ranks are in {len(np.unique(processes))} processes"


def why_apart_on_gpus(ctx: Any) -> str | None:
    """Returns why GPUs cannot exchange by calls of ours; None if they can.

    Args:
      ctx: of a lowering inside `jax.shard_map`. If this process has no GPU the program
        is for another machine, which is taken to be able.
    """
    reason = why_apart(ctx, None)
    if reason is None and _compat.has_cuda_devices() and _ffi.cuda() is None:
        return "the CUDA half of jax_turbobus was not built: there was no nvcc"
    return reason


def why_too_large_for_gpus(
    *, num_ranks: int, num_experts: int, top_k: int
) -> str | None:
    """Returns why an exchange is too large for handlers for GPUs; None if it is not.

    Args:
      num_ranks: that exchange with each other.
      num_experts: of all ranks together.
      top_k: choices of a token.
    """
    limits = (
        (num_ranks, MAX_GPU_RANKS, "ranks"),
        (num_experts, _MAX_GPU_EXPERTS, "experts"),
        (top_k, _MAX_GPU_TOP_K, "choices a token"),
    )
    for number, most, what in limits:
        if number > most:
            return f"{number} {what}, at most {most} on GPUs"
    return None


def why_through_host(ctx: Any) -> str | None:
    """Returns why some GPUs exchange through host memory; None if none has to.

    Args:
      ctx: of a lowering that `why_apart_on_gpus` finds nothing against.
    """
    library = _ffi.cuda()
    if library is None:
        return None
    gpus = sorted({d.local_hardware_id for d in _mesh(ctx).devices.flat})
    for gpu, peer in itertools.permutations(gpus, 2):
        if not library.can_access_peer(gpu, peer):
            reason: str = library.why_no_peer_access(gpu, peer)
            return reason
    return None


def why_not_on_gpus(ctx: Any) -> str | None:
    """Returns why GPUs cannot write into each other's memory; None if they can.

    Args:
      ctx: as for `why_apart_on_gpus`.
    """
    return why_apart_on_gpus(ctx) or why_through_host(ctx)


def _by_group(x: Any, axis_names: tuple[Any, ...], axes: tuple[Any, ...]) -> Any:
    """Returns `x`, laid out as the mesh, as ``[group, rank]``: each row exchanges."""
    order = [axis_names.index(axis) for axis in axes]
    others = [i for i in range(x.ndim) if i not in order]
    num_ranks = int(np.prod([x.shape[i] for i in order], dtype=int))
    return x.transpose(*others, *order).reshape(-1, num_ranks)


def ranks_of(ctx: Any, axes: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Returns the attributes ``devices``, ``ranks`` and ``groups`` of a GPU handler.

    A GPU's handler enqueues and returns: it cannot wait for the value of an operand,
    so that its rank is no datum there.

    Args:
      ctx: of a lowering inside `jax.shard_map`, all of whose devices are this
        process's.
      axes: mesh axes of the ranks, major first.

    Returns:
      For each device of the mesh, ``int64[num_devices]`` each: its ordinal in this
      process, its rank along `axes`, and a number that the devices which exchange
      with each other share.
    """
    mesh = _mesh(ctx)
    by_group = _by_group(mesh.devices, mesh.axis_names, axes)
    groups, ranks = np.indices(by_group.shape, dtype=np.int64)
    ordinals = [getattr(d, "local_hardware_id", d.id) or 0 for d in by_group.flat]
    return {
        "devices": np.asarray(ordinals, np.int64),
        "ranks": ranks.ravel(),
        "groups": groups.ravel(),
    }
