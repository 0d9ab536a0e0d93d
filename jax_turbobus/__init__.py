"""Pooled host offload and packed expert all-to-all for JAX, as XLA FFI calls."""

from jax_turbobus import _compat as _compat

_compat.check_jax_version()

__version__ = "0.1.0"
