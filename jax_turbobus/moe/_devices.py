"""Where the ranks of an exchange are, for handlers that cannot read it as data.

A GPU's handler enqueues and returns: it cannot wait for the value of an operand. But
the mesh is known when a program is lowered, and with it each device's rank.
"""

from typing import Any

import numpy as np

__all__ = ["ranks_of"]


def ranks_of(ctx: Any, axes: tuple[Any, ...], op: str) -> dict[str, np.ndarray]:
    """Returns the attributes ``devices``, ``ranks`` and ``groups`` of a GPU handler.

    Args:
      ctx: of a lowering inside `jax.shard_map`.
      axes: mesh axes of the ranks, major first.
      op: for messages.

    Returns:
      For each device of the mesh, ``int64[num_devices]`` each: its ordinal in this
      process, its rank along `axes`, and a number that the devices which exchange
      with each other share.

    Raises:
      NotImplementedError: the mesh spans several processes.
    """
    mesh = ctx.module_context.axis_context.mesh
    devices = mesh.devices
    if len({d.process_index for d in devices.flat}) > 1:
        raise NotImplementedError(
            f"{op}: the mesh {dict(mesh.shape)} spans several processes; on GPUs the"
            " ranks of an exchange must be driven by one process"
        )
    order = [mesh.axis_names.index(axis) for axis in axes]
    others = [i for i in range(devices.ndim) if i not in order]
    num_ranks = int(np.prod([devices.shape[i] for i in order], dtype=int))
    # [group, rank]: each row exchanges.
    by_group = devices.transpose(*others, *order).reshape(-1, num_ranks)
    groups, ranks = np.indices(by_group.shape, dtype=np.int64)
    ordinals = [getattr(d, "local_hardware_id", d.id) or 0 for d in by_group.flat]
    return {
        "devices": np.asarray(ordinals, np.int64),
        "ranks": ranks.ravel(),
        "groups": groups.ravel(),
    }
