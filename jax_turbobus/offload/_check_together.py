"""What the offload calls refuse in arguments that do not go together."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_turbobus import _compat
from jax_turbobus.offload._checks import devices_of

__all__ = ["check_distinct", "check_together"]


def check_together(call: str, trees: dict[str, Any]) -> None:
    """Refuses arrays that no program could take all of.

    Where something is being traced, JAX knows nothing of devices yet.

    Args:
      call: whose arguments they are.
      trees: trees of checked values by the names of the arguments.

    Raises:
      ValueError: two arrays were put on different devices or meshes.
    """
    first = None
    for name, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if _compat.is_tracer(x):
                return
            if not isinstance(x, jax.Array) or not x.committed:
                continue
            named = name + jax.tree_util.keystr(path)
            if first is None:
                first = named, x
            else:
                _check_two(call, named, x.sharding, *first)


def _check_two(call: str, name: str, found: Any, other: str, x: Any) -> None:
    expected = x.sharding
    are_named = isinstance(found, NamedSharding) and isinstance(expected, NamedSharding)
    if are_named and found.mesh == expected.mesh:
        return
    if found.device_set != expected.device_set or (
        are_named and devices_of(found) != devices_of(expected)
    ):
        raise ValueError(
            f"{call}: argument {name}: expected it on the devices of {other}, "
            f"{devices_of(expected)}, got {devices_of(found)}; move it with "
            "jax.device_put"
        )
    if are_named:
        raise ValueError(
            f"{call}: argument {name}: expected it on the mesh of {other}, "
            f"{expected.mesh}, got {found.mesh}; put it there with jax.device_put"
        )


def check_distinct(call: str, name: str, tree: Any) -> None:
    """Refuses an array that an eager call would donate twice.

    Raises:
      ValueError: one is in two places of the tree.
    """
    places: dict[int, str] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        place = name + jax.tree_util.keystr(path)
        if not isinstance(x, jax.Array) or _compat.is_tracer(x):
            continue
        if id(x) in places:
            raise ValueError(
                f"{call}: argument {place}: the same array as {places[id(x)]}; it is "
                "written to, so expected another one for each leaf"
            )
        places[id(x)] = place
