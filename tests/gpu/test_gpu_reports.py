"""What the tests of public bug reports say of CPU devices holds on GPUs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from gpu_programs import PLATFORM, gpus

pytestmark = [pytest.mark.multigpu, pytest.mark.slow]

TESTS = pathlib.Path(__file__).parent.parent / "moe"
FILES = (
    "test_exchange_cases.py",
    "test_exchange_counts.py",
    "test_exchange_idle_ranks.py",
    "test_exchange_padding.py",
    "test_expert_parallel.py",
    "test_payload.py",
)


@pytest.mark.parametrize("access", ["peer", "none"])
def test_reports_of_the_exchange(access):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf"),
            # Of the traced program, which is another one for GPUs.
            *("-k", "not waits_only"),
            *(str(TESTS / name) for name in FILES),
        ],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu,cuda" if PLATFORM == "cuda" else "cpu",
            "TURBOBUS_MOE_PLATFORM": PLATFORM,
            "TURBOBUS_MOE_RANKS": str(4 if len(gpus()) >= 4 else 2),
            "JAX_TURBOBUS_PEER_ACCESS": "1" if access == "peer" else "0",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
        cwd=TESTS.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 45
