"""The exchange handlers, called as nobody should: by the names of their targets."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_turbobus import _ffi

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


def call(target, changes, device):
    """Runs a target on one device, a rank alone, with some of its buffers changed.

    `changes`: shape and dtype by the name of an operand or a result.
    """
    _ffi.register()
    operands, results = TARGETS[target]
    args = [jnp.zeros(*changes.get(name, kind)) for name, kind in operands.items()]
    avals = [
        jax.ShapeDtypeStruct(*changes.get(name, kind)) for name, kind in results.items()
    ]
    attributes = {
        "axis": "x",
        "num_experts": np.int64(E),
        "expert_capacity": np.int64(0),
        "schedule": np.int64(0),
    }
    if device.platform != "cpu":
        attributes |= {
            "is_counted": False,
            "devices": np.array([device.local_hardware_id or 0], np.int64),
            "ranks": np.zeros(1, np.int64),
            "groups": np.zeros(1, np.int64),
        }

    def program(*xs):
        if device.platform == "cpu":
            aval = jax.ShapeDtypeStruct((4,), jnp.int32)
            key = jax.ffi.ffi_call("turbobus_moe_key", aval, has_side_effect=True)()
            xs = (key.reshape(1, 4), jnp.int32(0), *xs)
        return jax.ffi.ffi_call(f"turbobus_moe_{target}", avals)(*xs, **attributes)

    return jax.block_until_ready(jax.jit(program)(*jax.device_put(args, device)))
