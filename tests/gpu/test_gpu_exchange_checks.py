"""The exchange handlers for GPUs check as those for CPU devices do.

tests/moe/test_exchange_checks.py has every buffer of every handler.
"""

import jax
import pytest
from exchange_targets import CHOICES, F16, F32, TARGETS, call
from gpu_programs import PLATFORM, gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(PLATFORM != "cuda", reason="tests/moe has it"),
]


@pytest.mark.parametrize("target", TARGETS)
def test_right_buffers_are_taken(target):
    call(target, {}, gpus()[0])


def test_a_gradient_hands_on_its_slots_as_the_bits_of_floats():
    call("dispatch_grad", {"slots": (CHOICES, F32)}, gpus()[0])


def test_a_wrong_buffer_is_refused_by_name():
    with pytest.raises(jax.errors.JaxRuntimeError, match="slots: expected XLA type"):
        call("dispatch", {"slots": (CHOICES, F16)}, gpus()[0])
