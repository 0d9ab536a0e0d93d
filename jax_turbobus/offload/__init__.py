"""Transfers between host and device memory, as calls inside `jax.jit`.

docs/offload.md says how each lowers, and what to watch out for.
"""

from jax_turbobus._export import export_checks
from jax_turbobus.offload import _batching as _batching
from jax_turbobus.offload import _derivatives as _derivatives
from jax_turbobus.offload._move import device_put, to_device, to_host
from jax_turbobus.offload._overlap import overlap
from jax_turbobus.offload._rows import fetch, store
from jax_turbobus.offload._scan_layers import scan_layers

__all__ = [
    "device_put",
    "export_checks",
    "fetch",
    "overlap",
    "scan_layers",
    "store",
    "to_device",
    "to_host",
]
