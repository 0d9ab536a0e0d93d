"""`ragged_all_to_all` on the ranks of a mesh."""

from typing import ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moe_mesh import make_mesh

from jax_turbobus.moe import ragged_all_to_all

RANKS = 4


def mapped(function, mesh=None, **kwargs):
    """Runs `function` per rank; arguments and result have the rank in front."""
    mesh = make_mesh() if mesh is None else mesh
    spec = P(mesh.axis_names)

    def per_rank(*args):
        return jax.tree.map(lambda y: y[None], function(*(x[0] for x in args)))

    wrapped = jax.jit(
        jax.shard_map(per_rank, mesh=mesh, in_specs=spec, out_specs=spec, **kwargs)
    )
    return lambda *args: wrapped(
        *(jax.device_put(x, NamedSharding(mesh, spec)) for x in args)
    )


def call(*args):
    return ragged_all_to_all(*args, axis_name="x")


class Mixture:
    """Arguments under `vmap`, of which some are mapped: `batched` says which.

    Attributes:
      in_axes: for `vmap`.
      args: what is mapped has its batch behind the ranks; the rest is entry 0's.
    """

    MAPPED: ClassVar = {
        "rows": (0, 0, None),
        "operand": (0, None, None),
        "output": (None, 0, None),
        "fields": (None, None, 0),
        "all": (0, 0, 0),
    }

    def __init__(self, batched, operands, outputs, plans):
        operand, output, fields = self.MAPPED[batched]
        self.in_axes = (operand, output, *[fields] * 4)
        self._all = (
            operands,
            outputs,
            *(np.stack(f, 1) for f in zip(*plans, strict=True)),
        )
        self.args = [
            x if axis == 0 else x[:, 0]
            for x, axis in zip(self._all, self.in_axes, strict=True)
        ]

    def entry(self, i):
        """Returns operand, output and fields of entry `i`."""
        operand, output, *fields = (
            x[:, i if axis == 0 else 0]
            for x, axis in zip(self._all, self.in_axes, strict=True)
        )
        return operand, output, fields
