"""The exchange handlers for GPUs check what they are called with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import PLATFORM, gpus, on_device

from jax_turbobus import _ffi

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(PLATFORM != "cuda", reason="other operands on CPU devices"),
]

T, K, E, H, ROWS = 8, 2, 8, 160, 16
TOKENS, CHOICES, EXPERTS, RESULT = (T, H), (T, K), (E,), (ROWS, H)
F32, S32, F16 = jnp.float32, jnp.int32, jnp.float16
IDS, SLOTS, SIZES = (CHOICES, S32), (CHOICES, S32), (EXPERTS, S32)
ROW_VALUES, SUMS, WEIGHTS = (RESULT, F32), (TOKENS, F32), (CHOICES, F32)

# By target: operands and results by name.
TARGETS = {
    "dispatch": (
        {"tokens": SUMS, "expert_ids": IDS},
        {"rows": ROW_VALUES, "group_sizes": SIZES, "wanted": SIZES, "slots": SLOTS},
    ),
    "combine": (
        {"rows": ROW_VALUES, "expert_ids": IDS, "slots": SLOTS, "weights": WEIGHTS},
        {"sums": SUMS},
    ),
    "dispatch_grad": (
        {"rows": ROW_VALUES, "expert_ids": IDS, "slots": SLOTS},
        {"sums": SUMS},
    ),
    "combine_grad": (
        {
            "sum_grads": SUMS,
            "rows": ROW_VALUES,
            "expert_ids": IDS,
            "slots": SLOTS,
            "weights": WEIGHTS,
            "group_sizes": SIZES,
        },
        {"row_grads": ROW_VALUES, "weight_grads": WEIGHTS},
    ),
}

# What a handler calls a buffer, where not by its own name.
CALLED = {"sums": "tokens", "sum_grads": "tokens"}


def call(target, changes):
    """A target on one GPU, called as nobody should, with some buffers changed."""
    _ffi.register()
    operands, results = TARGETS[target]
    device = gpus()[0]
    args = [
        on_device(jnp.zeros(*changes.get(name, kind)), device)
        for name, kind in operands.items()
    ]
    avals = [
        jax.ShapeDtypeStruct(*changes.get(name, kind)) for name, kind in results.items()
    ]
    ordinal = np.array([device.local_hardware_id or 0], np.int64)
    attributes = {
        "axis": "x",
        "num_experts": np.int64(E),
        "expert_capacity": np.int64(0),
        "schedule": np.int64(0),
        "is_counted": False,
        "devices": ordinal,
        "ranks": np.zeros(1, np.int64),
        "groups": np.zeros(1, np.int64),
    }
    program = jax.jit(
        lambda *xs: jax.ffi.ffi_call(f"turbobus_moe_{target}", avals)(*xs, **attributes)
    )
    return jax.block_until_ready(program(*args))


def buffers():
    for target, (operands, results) in TARGETS.items():
        for name, (shape, dtype) in (operands | results).items():
            if name == "rows":
                continue  # The others are compared with it.
            yield pytest.param(target, name, (shape, F16), id=f"{target}-{name}-dtype")
            longer = ((shape[0] + 1, *shape[1:]), dtype)
            if name != "expert_ids":
                yield pytest.param(target, name, longer, id=f"{target}-{name}-shape")


@pytest.mark.parametrize("target", TARGETS)
def test_right_buffers_are_taken(target):
    call(target, {})


def test_a_gradient_hands_on_its_slots_as_the_bits_of_floats():
    call("dispatch_grad", {"slots": (CHOICES, F32)})


@pytest.mark.parametrize(("target", "name", "wrong"), list(buffers()))
def test_a_wrong_buffer_is_refused_by_name(target, name, wrong):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        call(target, {name: wrong})
    assert f"{CALLED.get(name, name)}: expected" in str(error.value)
