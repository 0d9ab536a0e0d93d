"""Transfers between host and device memory, as calls inside `jax.jit`.

docs/offload.md says how each lowers, and what to watch out for.
"""

from jax_turbobus.offload import _rules as _rules
from jax_turbobus.offload._move import device_put, to_device, to_host

__all__ = ["device_put", "to_device", "to_host"]
