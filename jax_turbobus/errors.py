"""The exceptions that direct calls raise.

Inside a compiled program errors arrive as `jax.errors.JaxRuntimeError` with a
message that starts with ``jax_turbobus:``.
"""

__all__ = [
    "DaemonUnavailableError",
    "PoolExhaustedError",
    "TransferTimeoutError",
    "TurboBusError",
]


class TurboBusError(RuntimeError):
    """Something went wrong in the core; `code` names the kind of failure.

    Attributes:
      code: a canonical code's name, such as ``"FAILED_PRECONDITION"``.
    """

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self.code = code


class DaemonUnavailableError(TurboBusError, ConnectionError):
    """The node service cannot be reached."""


class TransferTimeoutError(TurboBusError, TimeoutError):
    """Something was awaited for longer than its limit."""


class PoolExhaustedError(TurboBusError, MemoryError):
    """Host memory, staging or descriptors have run out."""
