"""Checks that several expert calls share; `name` is what messages call an argument."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["MOST", "check_array", "check_dtype", "check_integer", "check_numpy_dtype"]

# Ids, sizes and places of rows are int32.
MOST = np.iinfo(np.int32).max

# Scalar types of NumPy's that no JAX array has.
_NOT_OF_JAX = (np.object_, np.flexible, np.datetime64, np.timedelta64)


def check_array(name: str, x: Any) -> None:
    """Refuses what is no array.

    Raises:
      TypeError: `x` is neither a JAX nor a NumPy array, or of a dtype that JAX has not.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(
            f"{name}: expected an array, got {type(x).__name__}; make it one with"
            " jnp.asarray"
        )
    if isinstance(x, np.ndarray):
        check_numpy_dtype(name, x.dtype)


def check_numpy_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Refuses the dtype of a NumPy array that JAX has not.

    Raises:
      TypeError: no numbers, or not in this machine's byte order.
    """
    if issubclass(dtype.type, _NOT_OF_JAX):
        raise TypeError(f"{name}: expected an array of numbers, got dtype {dtype}")
    if not dtype.isnative:
        raise TypeError(
            f"{name}: expected this machine's byte order, got dtype {dtype.str};"
            " convert with .astype(x.dtype.newbyteorder('='))"
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
