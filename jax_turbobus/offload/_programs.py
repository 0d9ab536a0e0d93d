"""Programs around functions of the user, compiled once for each function."""

import weakref
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["compiled_for"]

# body -> user's function -> program. A program holds the user's function weakly, or
# the entry, with all that the function closes over, would never go.
_programs: dict[Any, "weakref.WeakKeyDictionary[Any, Any]"] = {}


def compiled_for(body: Callable[..., Any], f: Callable[..., Any]) -> Any:
    """Returns `jax.jit` of `lambda *args: body(f, *args)`.

    Compiling keeps what `body` does in one program under every transform, also
    where the caller is not traced.

    Args:
      body: takes a function and trees of arrays.
      f: the function.

    Returns:
      The program.
    """
    try:
        programs = _programs.setdefault(body, weakref.WeakKeyDictionary())
        found = programs.get(f)
        if found is None:
            reference = weakref.ref(f)
            found = jax.jit(lambda *args: body(reference(), *args))
            programs[f] = found
    except TypeError:  # unhashable, or without weak references
        return jax.jit(lambda *args: body(f, *args))
    return found
