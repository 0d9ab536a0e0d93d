"""Choices that are masked after dispatch: their rows have zero gradients."""

import pytest
from gpu_exchange_edited import check
from gpu_programs import run_python

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("field", ["expert_ids", "slots"])
def test_gradients_of_rows_that_no_choice_names_are_zero(field):
    check(field)


@pytest.mark.parametrize("field", ["expert_ids", "slots"])
def test_the_same_without_peer_access(field):
    code = f"from gpu_exchange_edited import check; check({field!r})"
    run_python(code, JAX_TURBOBUS_PEER_ACCESS="0")
