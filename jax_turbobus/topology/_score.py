"""What a path is worth to one message."""

import numbers
from typing import Any

from jax_turbobus import _ffi
from jax_turbobus.topology import _checks

_MOST_WHOLE = (1 << 62) - 1
_MOST_BYTES_PER_S = 1e15


def path_score(
    bandwidth_bytes_per_s: float, latency_ns: int, size_bytes: int = 1 << 20
) -> float:
    """Returns the bytes a second that one message achieves alone on a path.

    Args:
      bandwidth_bytes_per_s: of the path; above 0, up to 1e15.
      latency_ns: of the path.
      size_bytes: of the message.

    Raises:
      TypeError: one of them is no number.
      ValueError: one of them is negative, or no rate.
    """
    rate: Any = bandwidth_bytes_per_s
    is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
    if not is_number:
        raise TypeError(f"bandwidth_bytes_per_s: expected a number, got {rate!r}")
    if not 0 < rate <= _MOST_BYTES_PER_S:
        raise ValueError(
            f"bandwidth_bytes_per_s: expected a number above 0 and up to "
            f"{_MOST_BYTES_PER_S:g}, got {rate!r}"
        )
    score = _ffi.core().path_score(
        float(rate),
        _checks.whole("latency_ns", latency_ns, 0, _MOST_WHOLE),
        _checks.whole("size_bytes", size_bytes, 0, _MOST_WHOLE),
    )
    return float(score)
