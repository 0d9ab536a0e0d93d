"""What `jax.export` needs to be told about our calls."""

from jax.export import DisabledSafetyCheck

from jax_turbobus import _ffi

__all__ = ["export_checks"]


def export_checks() -> list[DisabledSafetyCheck]:
    """Returns the checks to switch off for programs with calls of ours in them.

    JAX refuses to export custom calls that it does not know. Ours keep the meaning
    of a name for good: one whose operands change gets a new name. To be passed on
    as `jax.export.export(…, disabled_checks=export_checks())`.

    It also registers the calls, so a process that runs a deserialized program calls
    it before.
    """
    _ffi.register()
    names = sorted({*_ffi.core().ffi_targets(), *_ffi.CUDA_ONLY})
    return [
        DisabledSafetyCheck.custom_call(name)
        for name in (*names, "AllocateBuffer", "annotate_device_placement")
    ]
