"""Who takes part in a call, and how the ranks of one call find each other.

On CPU devices the calls of a program run in any order, and a jitted helper that is
called eight times is eight calls with the same attributes. So a call is known by a
key that each rank makes anew and XLA's own all-gather carries to the others: it is
data, and data cannot be confused. Rank 0's key names the meeting.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_turbobus import _environment, _ffi
from jax_turbobus.moe import _keys

__all__ = [
    "AxisName",
    "Group",
    "exchange_timeout",
    "keys_of",
    "rank_of",
    "set_exchange_timeout",
    "vary_alike",
]

AxisName = Hashable | tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """The ranks along one mesh axis, or along several taken together.

    Attributes:
      axes: mesh axis names, major first.
      num_ranks: the product of their sizes.
    """

    axes: tuple[Hashable, ...]
    num_ranks: int

    @property
    def axis_name(self) -> Any:
        """What JAX's collectives take as `axis_name`."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def label(self) -> str:
        """The axis, as messages name it."""
        return repr(self.axis_name)

    @classmethod
    def of(cls, axis_name: AxisName, *, op: str) -> "Group":
        """Returns the group that `axis_name` means here, inside `jax.shard_map`.

        Args:
          axis_name: a mesh axis, or a non-empty tuple of them.
          op: who asks, for messages.

        Raises:
          TypeError: a list or a set of axes.
          ValueError: outside `jax.shard_map`, unknown or repeated axes, or a mesh of
            which other axes are left to the compiler.
        """
        axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        if any(isinstance(a, list | dict | set | frozenset) for a in axes):
            raise TypeError(
                f"{op}: axis_name: expected one mesh axis, or a tuple of different"
                f" ones, major first, got {axis_name!r}"
            )
        mesh = jax.sharding.get_abstract_mesh()
        manual = tuple(mesh.manual_axes)
        if not manual:
            raise ValueError(
                f"{op}: axis_name={axis_name!r}: called outside jax.shard_map; the"
                " ranks of an exchange are the devices along a mesh axis, so call it"
                " in a function under jax.shard_map over a mesh that has this axis"
            )
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        if not axes or len(set(axes)) != len(axes):
            raise ValueError(
                f"{op}: axis_name: expected one mesh axis, or a tuple of different"
                f" ones, got {axis_name!r}"
            )
        for axis in axes:
            if axis not in manual:
                raise ValueError(
                    f"{op}: axis_name: {axis!r} is not an axis of the enclosing"
                    f" jax.shard_map, which has {', '.join(map(repr, manual))}"
                )
        left = [a for a in mesh.axis_names if a not in manual and sizes[a] > 1]
        if left:
            raise ValueError(
                f"{op}: mesh axes {left} are not manual here; XLA would gather whole"
                " arrays over them in front of the exchange. Let jax.shard_map map"
                " all axes of the mesh (leave out its axis_names)"
            )
        return cls(axes=axes, num_ranks=math.prod(sizes[a] for a in axes))


def keys_of(group: Group, operands: Sequence[jax.Array]) -> jax.Array:
    """Returns ``int32[num_ranks, 4]``: this call's keys of all ranks.

    Args:
      group: the ranks that meet.
      operands: all that the exchange reads, varying alike.
    """
    return _keys.gather_keys(group.axes, operands)


def rank_of(group: Group, *, like: jax.Array) -> jax.Array:
    """Returns ``int32[]``: the rank that runs this.

    Args:
      group: the ranks that meet.
      like: an operand of the exchange, which it varies like.
    """
    rank = jnp.asarray(lax.axis_index(group.axis_name), jnp.int32)
    return _vary(rank, _varying(like))


def vary_alike(group: Group, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the operands, all varying over the group's axes and each other's.

    Args:
      group: the ranks of a call.
      operands: of that call.
    """
    varying = frozenset(group.axes).union(*map(_varying, operands))
    return [_vary(x, varying) for x in operands]


def _varying(x: jax.Array) -> frozenset[Hashable]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: jax.Array, axes: frozenset[Hashable]) -> jax.Array:
    missing = tuple(a for a in _mesh_order(axes) if a not in _varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _mesh_order(axes: frozenset[Hashable]) -> list[Hashable]:
    return [a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes]


def exchange_timeout() -> float:
    """Returns how long, in seconds, a rank waits for the others of its call."""
    return float(_ffi.core().exchange_timeout())


def set_exchange_timeout(seconds: float) -> None:
    """Sets how long a rank waits for the others of its call before all of them fail.

    At first it is 60 seconds, or what the environment variable
    ``JAX_TURBOBUS_EXCHANGE_TIMEOUT_S`` says, if that is not empty. It must outlast the
    longest computation that one rank does while another already waits.

    Args:
      seconds: from 0.001 to 1e9, of a resolution of a millisecond; holds for calls that
        begin from now on.

    Raises:
      ValueError: `seconds` is no such number.
    """
    _ffi.set_exchange_timeout(
        _environment.check_seconds("set_exchange_timeout", seconds)
    )
