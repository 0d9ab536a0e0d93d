"""The only module that touches private JAX, and where JAX versions differ."""

import jax

__all__ = ["JAX_VERSION", "MINIMUM_JAX_VERSION", "check_jax_version"]

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
    import jaxlib

    for name, found in (("jax", jax.__version__), ("jaxlib", jaxlib.__version__)):
        if _parse(found) < MINIMUM_JAX_VERSION:
            wanted = ".".join(map(str, MINIMUM_JAX_VERSION))
            raise ImportError(
                f"jax_turbobus needs {name} >= {wanted}, found {found}; "
                f"run: pip install --upgrade 'jax>={wanted}'"
            )
