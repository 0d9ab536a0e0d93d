"""Exchange handlers check the buffers that they are called with."""

import jax
import pytest
from exchange_targets import CHOICES, F16, F32, TARGETS, call

# What a handler calls a buffer, where not by its own name.
CALLED = {"sums": "tokens", "sum_grads": "tokens"}


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
    call(target, {}, jax.devices("cpu")[0])


def test_a_gradient_hands_on_its_slots_as_the_bits_of_floats():
    call("dispatch_grad", {"slots": (CHOICES, F32)}, jax.devices("cpu")[0])


@pytest.mark.parametrize(("target", "name", "wrong"), list(buffers()))
def test_a_wrong_buffer_is_refused_by_name(target, name, wrong):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        call(target, {name: wrong}, jax.devices("cpu")[0])
    assert f"{CALLED.get(name, name)}: expected" in str(error.value)
