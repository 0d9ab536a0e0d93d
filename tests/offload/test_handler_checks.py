"""Handlers check what they are called with, and which FFI they were built for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from offload_arrays import on_device

from jax_turbobus import _ffi


def call(target, operands, result, **attributes):
    """One of our targets, called as nobody should: handlers check what they get."""
    _ffi.register()
    aval = jax.ShapeDtypeStruct(*result)
    program = jax.jit(lambda *xs: jax.ffi.ffi_call(target, aval)(*xs, **attributes))
    return jax.block_until_ready(program(*operands))


@pytest.mark.parametrize(
    ("target", "operands", "result", "attributes", "parts"),
    [
        (
            "turbobus_h2d_copy",
            [on_device],
            ((8, 32), jnp.float32),
            {},
            ["turbobus_h2d_copy", "source", "[16,32]", "result", "[8,32]"],
        ),
        (
            "turbobus_d2h_copy",
            [on_device, lambda: on_device((16, 31))],
            ((16, 32), jnp.float32),
            {},
            ["turbobus_d2h_copy", "out", "[16,31]"],
        ),
        (
            "turbobus_fetch",
            [on_device, lambda: jnp.int32(0)],
            ((31,), jnp.float32),
            {"axis": np.int64(0)},
            ["turbobus_fetch", "no row along axis 0"],
        ),
        (
            "turbobus_fetch",
            [on_device, lambda: jnp.float32(0)],
            ((32,), jnp.float32),
            {"axis": np.int64(0)},
            ["turbobus_fetch", "expected one int32"],
        ),
        (
            "turbobus_fetch",
            [on_device, lambda: jnp.int32(0)],
            ((32,), jnp.float32),
            {"axis": np.int64(7)},
            ["turbobus_fetch", "axis 7"],
        ),
        (
            "turbobus_store",
            [on_device, lambda: jnp.int32(0), lambda: on_device((32,), jnp.int32)],
            ((16, 32), jnp.float32),
            {"axis": np.int64(0)},
            ["turbobus_store", "no row along axis 0"],
        ),
    ],
)
def test_handlers_check_what_they_get(target, operands, result, attributes, parts):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        call(target, [make() for make in operands], result, **attributes)
    message = str(caught.value)
    assert message.startswith("INVALID_ARGUMENT: jax_turbobus: ")
    for part in parts:
        assert part in message


def test_an_alias_that_is_not_shared_still_gives_the_right_bytes():
    """XLA may drop one; here there is none to begin with."""
    x, stack = on_device() * 3, on_device((4, 16, 32))
    copied = call("turbobus_d2h_copy", [x, on_device()], (x.shape, x.dtype))
    np.testing.assert_array_equal(copied, x)
    stored = call(
        "turbobus_store",
        [stack, jnp.int32(2), x],
        (stack.shape, stack.dtype),
        axis=np.int64(0),
    )
    np.testing.assert_array_equal(stored, stack.at[2].set(x))


def test_a_library_for_another_ffi_is_refused_before_jax_sees_it():
    found = _ffi._compat.ffi_api_version()
    for version in ((found[0], found[1] + 1), (found[0] + 1, 0)):
        with pytest.raises(ImportError, match="was built against XLA FFI"):
            _ffi.check_api_version("a library", version)
    _ffi.check_api_version("a library", (found[0], 0))
