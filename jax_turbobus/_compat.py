"""The only module that touches private JAX, and where JAX versions differ."""

import contextlib
import functools
import pathlib
import re
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.backend
from jax._src import core as _jax_core
from jax._src import dispatch, dtypes

__all__ = [
    "JAX_VERSION",
    "MINIMUM_JAX_VERSION",
    "bound_axes",
    "check_jax_version",
    "element_bits",
    "explicit_mesh",
    "ffi_api_version",
    "has_cuda_devices",
    "is_for_export",
    "is_tracer",
    "lowers_with_devices",
    "mark_side_effect",
    "partitions_automatically",
    "physical_aval",
    "tangent_aval",
    "varying_axes",
]

MINIMUM_JAX_VERSION = (0, 10, 2)


def _parse(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


JAX_VERSION = _parse(jax.__version__)


def check_jax_version() -> None:
    """Refuses a JAX that is too old, before anything is registered with it.

    Raises:
      ImportError: jax or jaxlib is older than 0.10.2.
    """
    from jaxlib.version import __version__ as jaxlib_version

    for name, found in (("jax", jax.__version__), ("jaxlib", jaxlib_version)):
        if _parse(found) < MINIMUM_JAX_VERSION:
            wanted = ".".join(map(str, MINIMUM_JAX_VERSION))
            raise ImportError(
                f"jax_turbobus needs {name} >= {wanted}, found {found}; "
                f"run: pip install --upgrade 'jax>={wanted}'"
            )


@functools.cache
def ffi_api_version() -> tuple[int, int]:
    """Returns the (major, minor) version of the XLA FFI in this jaxlib."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.is_file():  # a jaxlib without headers: that of our minimum
        return (0, 3)
    text = header.read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return int(found["MAJOR"]), int(found["MINOR"])


def has_cuda_devices() -> bool:
    """Returns whether JAX has CUDA devices in this process; starts its backends."""
    return "cuda" in jax.extend.backend.backends()


def element_bits(dtype: Any) -> int:
    """Returns how many bits an element takes in XLA's buffers: 4 for int4."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return 32  # keys are rows of uint32
    return int(dtypes.itemsize_bits(dtype))


def explicit_mesh(avals: Any) -> Any:
    """Returns the mesh if these types say how all values are split, else None."""
    meshes = [aval.sharding.mesh for aval in avals]
    meshes = [mesh for mesh in meshes if not mesh.empty]
    if meshes and all(mesh.are_all_axes_explicit for mesh in meshes):
        return meshes[0]
    return None


def is_for_export(context: Any) -> bool:
    """Returns whether the program being lowered will be serialized."""
    return bool(context.module_context.lowering_parameters.for_export)


def is_tracer(x: Any) -> bool:
    """Returns whether `x` is abstract: an argument of a function being traced."""
    return isinstance(x, jax.core.Tracer)


def lowers_with_devices(primitive: Any) -> None:
    """Tells JAX that lowering `primitive` needs to know the devices."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def mark_side_effect(values: Any) -> None:
    """Keeps the custom call that produced these IR values from being merged."""
    from jax.extend.mlir import ir

    for value in values if isinstance(values, (list, tuple)) else (values,):
        value.owner.attributes["has_side_effect"] = ir.BoolAttr.get(True)


def physical_aval(aval: Any) -> Any:
    """Returns the type of an array in a program: of keys, rows of uint32."""
    return _jax_core.physical_aval(aval)


def tangent_aval(value: Any) -> Any:
    """Returns the type of a tangent of `value`."""
    return jax.typeof(value).to_tangent_aval()


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which `x` differs inside `jax.shard_map`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def partitions_automatically(context: Any) -> bool:
    """Whether XLA will split the operations lowered in `context` over devices.

    Args:
      context: the `LoweringRuleContext` that a lowering rule gets.

    Returns:
      False on one device and where every mesh axis is manual: there, shapes in
      the program are those of one device.
    """
    axis_context = context.module_context.axis_context
    manual_axes = getattr(axis_context, "manual_axes", None)
    if manual_axes is None:
        return getattr(axis_context, "num_devices", 1) > 1
    mesh = axis_context.mesh
    return mesh.size > 1 and set(manual_axes) != set(mesh.axis_names)


def bound_axes(
    axes: Sequence[Hashable], sizes: Sequence[int]
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which mesh axes are bound, as inside `jax.shard_map`.

    A lowering rule that is written with collectives is traced after JAX has left the
    `jax.shard_map`; the collectives only ask for the names and sizes.

    Args:
      axes: axis names.
      sizes: their sizes.
    """
    pairs = list(zip(axes, sizes, strict=True))
    return _jax_core.extend_axis_env_nd(pairs)
