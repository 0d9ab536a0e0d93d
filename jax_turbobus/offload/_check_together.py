"""What the offload calls refuse in arguments that do not go together."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_turbobus import _compat

__all__ = ["check_distinct", "check_together"]


def check_together(call: str, trees: dict[str, Any]) -> None:
    """Refuses arrays that no program could take all of.

    Where something is being traced, JAX knows nothing of devices yet.

    Args:
      call: whose arguments they are.
      trees: trees of checked values by the names of the arguments.

    Raises:
      ValueError: two arrays were put on different devices.
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
            elif not _have_equal_devices(x.sharding, first[1].sharding):
                raise ValueError(
                    f"{call}: argument {named}: expected it on the devices of "
                    f"{first[0]}, {_devices(first[1].sharding)}, got "
                    f"{_devices(x.sharding)}; move it with jax.device_put"
                )


def _have_equal_devices(a: Any, b: Any) -> bool:
    if isinstance(a, NamedSharding) and isinstance(b, NamedSharding):
        return a.mesh is b.mesh or _devices(a) == _devices(b)
    return bool(a.device_set == b.device_set)


def _devices(sharding: Any) -> list[Any]:
    if isinstance(sharding, NamedSharding):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)


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
