"""Pooled host offload and packed expert all-to-all for JAX, as XLA FFI calls."""

import pathlib
import sys

from jax_turbobus import _compat as _compat
from jax_turbobus._version import __version__

_compat.check_jax_version()


def _add_installed_core() -> None:
    # In a source tree `python -m` finds this folder before the installed package,
    # which alone holds the compiled core: look for `_core` there too.
    here = pathlib.Path(__file__).parent
    if any(here.glob("_core.*")):
        return
    for entry in sys.path:
        installed = pathlib.Path(entry) / "jax_turbobus"
        if installed != here and any(installed.glob("_core.*")):
            __path__.append(str(installed))
            return


_add_installed_core()

from jax_turbobus import moe  # noqa: E402
from jax_turbobus._observe import stats, trace  # noqa: E402
from jax_turbobus.config import configure, configured  # noqa: E402
from jax_turbobus.offload import (  # noqa: E402
    device_put,
    fetch,
    overlap,
    scan_layers,
    store,
    to_device,
    to_host,
)

__all__ = [
    "__version__",
    "configure",
    "configured",
    "device_put",
    "fetch",
    "moe",
    "overlap",
    "scan_layers",
    "stats",
    "store",
    "to_device",
    "to_host",
    "trace",
]
