"""The drop-in for `lax.ragged_all_to_all`, alone."""

from collections.abc import Iterator

import numpy as np
from jax.sharding import AxisType, Mesh

from jax_turbobus.bench import ragged
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._setup import Setup

__all__ = ["drop_in"]

_MIB = (32, 512)


def drop_in(setup: Setup) -> Iterator[Row]:
    """Yields times of one exchange, of what a rank sends to all, itself included."""
    mesh = Mesh(np.array(setup.devices), ("x",), axis_types=(AxisType.Auto,))
    for mib in _MIB:
        yield from ragged.exchanges(
            mesh,
            mib / setup.shrink,
            setup.rounds,
            prefix=f"{setup.access}: drop-in, ",
            has_peers=setup.has_peers,
        )
