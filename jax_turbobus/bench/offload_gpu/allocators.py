"""The same under each of XLA's allocators, every one in a process of its own."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import jax

from jax_turbobus import _ffi
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.offload_gpu import transfers
from jax_turbobus.bench.offload_gpu._setup import GIB, MIB, Setup

__all__ = ["allocators", "measure_here"]

_CODE = (
    "import sys; from jax_turbobus.bench.offload_gpu import allocators; "
    "allocators.measure_here(*sys.argv[1:])"
)
_MARK = "rows: "
_TIMEOUT_S = 150


def allocators(setup: Setup) -> Iterator[Row]:
    """Large transfers under the platform and cuda_async allocators.

    The default one is what the rest of the benchmark runs under.

    Raises:
      RuntimeError: a process ended without its rows.
    """
    platform = setup.devices[0].platform.replace("gpu", "cuda")
    for name in ("platform", "cuda_async"):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", _CODE, platform, str(setup.shrink)],
                env={
                    **os.environ,
                    "XLA_PYTHON_CLIENT_ALLOCATOR": name,
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                    # This process lends as well, but transfers nothing meanwhile.
                    "JAX_TURBOBUS_LOCK_DIR": folder,
                },
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        said, _, rows = done.stdout.partition(_MARK)
        if not rows:
            raise RuntimeError(
                f"the process under {name} ended with {done.returncode}: "
                f"{(said + done.stderr)[-1000:]}"
            )
        for row in json.loads(rows):
            if not row["case"].endswith("a single call"):
                yield Row(**{**row, "case": f"{row['case']}, allocator {name}"})


def measure_here(platform: str, shrink: str) -> None:
    """Prints the rows of large transfers in this process, as JSON.

    Args:
      platform: of the devices, ``"cuda"`` or ``"cpu"``.
      shrink: as `Setup.shrink`.
    """
    _ffi.register()
    # On CPU devices: the smallest, so that something is tried.
    sizes = (256 * MIB, GIB) if shrink == "1" else (32 * MIB, 32 * MIB)
    setup = Setup(jax.devices(platform), 3, int(shrink), *sizes)
    rows = [
        dataclasses.replace(row, required=None, ok=None)
        for row in transfers.one_way(setup)
    ]
    sys.stdout.write(_MARK + json.dumps([dataclasses.asdict(row) for row in rows]))
