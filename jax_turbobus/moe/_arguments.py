"""Checks that several expert calls share; `name` is what messages call an argument."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["MOST", "check_array", "check_dtype", "check_integer"]

# Ids, sizes and places of rows are int32.
MOST = np.iinfo(np.int32).max


def check_array(name: str, x: Any) -> None:
    """Refuses what is no array.

    Raises:
      TypeError: `x` is neither a JAX nor a NumPy array.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(
            f"{name}: expected an array, got {type(x).__name__}; make it one with"
            " jnp.asarray"
        )


def check_integer(name: str, value: Any, *, least: int) -> int:
    """Returns a static size, at least `least` and at most `MOST`.

    Raises:
      TypeError: no integer, or one that is not known at trace time.
      ValueError: out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}: expected a Python integer, known at trace time, got {value!r}"
            f" ({type(value).__name__})"
        ) from None
    if not least <= number <= MOST:
        raise ValueError(
            f"{name}: expected an integer from {least} to {MOST}, got {number}"
        )
    return number


def check_dtype(name: str, value: Any) -> Any:
    """Returns a dtype.

    Raises:
      TypeError: it is none.
    """
    try:
        return jnp.dtype(value)
    except TypeError:
        raise TypeError(
            f"{name}: expected a dtype, such as 'bfloat16' or jnp.float32, got"
            f" {value!r}"
        ) from None
