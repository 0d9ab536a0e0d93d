"""Checks that several expert calls share; `name` is what messages call an argument."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "MOST",
    "check_array",
    "check_dtype",
    "check_integer",
    "check_number",
    "check_numpy_dtype",
]

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


def check_number(name: str, value: Any, *, may_be_zero: bool = False) -> float:
    """Returns a positive number, at most `MOST`.

    Raises:
      TypeError: no number.
      ValueError: out of range.
    """
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or isinstance(value, bool):
        raise TypeError(
            f"{name}: expected a number, got {value!r} ({type(value).__name__})"
        )
    if not 0 <= value <= MOST or (value == 0 and not may_be_zero):
        kind = "number from 0 to" if may_be_zero else "positive number of at most"
        raise ValueError(f"{name}: expected a {kind} {MOST}, got {value!r}")
    return float(value)


def check_dtype(name: str, value: Any) -> Any:
    """Returns the dtype of JAX arrays of numbers.

    Raises:
      TypeError: it is none.
    """
    try:
        if value is None:
            raise TypeError
        dtype = jnp.dtype(value)
        if dtype != jnp.bool_ and not jnp.issubdtype(dtype, jnp.number):
            raise TypeError
    except TypeError:
        raise TypeError(
            f"{name}: expected a dtype, such as 'bfloat16' or jnp.float32, got"
            f" {value!r}"
        ) from None
    return dtype
