"""`ragged_all_to_all` on the ranks of a mesh."""

import jax
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
