"""How long a GPU works at what, by JAX's profiler."""

import glob
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax

__all__ = [
    "STEPS",
    "by_step",
    "copy_seconds",
    "kernel_name",
    "kernel_seconds",
    "matmul_seconds",
]

_COPIES = ("MemcpyP2P", "MemcpyD2H", "MemcpyH2D")
# The steps of an exchange, and our kernels of each. What copy engines move between
# GPUs, or over the host, is sending too.
STEPS: dict[str, tuple[str, ...]] = {
    "count": ("SmallPlan", "CountByBlock", "ScanBlocks"),
    "pack": ("Positions", "CountNumbered", "Number", "CopyWords", "PackRows"),
    "send": ("Send", "GradSend", *_COPIES),
    "expand": ("Expand", "UnpackRows", "GradExpand"),
    "partial sums": ("Partial",),
    "sums": ("Sum", "Merge"),
}
_ANY = "|".join(name for names in STEPS.values() for name in names)
# A kernel's name is demangled: return type, namespaces, template arguments.
_OURS = re.compile(rf"(?:^|[:\s])({_ANY})(?=[<(]|$)")
_MATMUL = re.compile(r"gemm|nvjet|cutlass|cublas|xmma|\bdot", re.IGNORECASE)


def kernel_seconds(function: Callable[[], Any], *, calls: int = 10) -> dict[str, float]:
    """Returns the time of each kernel and copy on one GPU in a call, by its name.

    Args:
      function: what to call; it has been compiled.
      calls: how many to take the mean of.

    Returns:
      Seconds; nothing where there is no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        for _ in range(calls):
            jax.block_until_ready(function())
        jax.profiler.stop_trace()
        (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        planes = list(jax.profiler.ProfileData.from_file(path).planes)
    seconds: dict[str, float] = {}
    for plane in planes:
        if "GPU:0" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                duration = event.duration_ns / 1e9 / calls
                seconds[event.name] = seconds.get(event.name, 0.0) + duration
    return seconds


def kernel_name(name: str) -> str:
    """Returns the bare name of one of our kernels, else the name as it is."""
    found = _OURS.search(name)
    return found[1] if found else name


def by_step(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the time of each of `STEPS`, and of what is not ours, "experts"."""
    step_of = {name: step for step, names in STEPS.items() for name in names}
    total = dict.fromkeys((*STEPS, "experts"), 0.0)
    for name, spent in seconds.items():
        total[step_of.get(kernel_name(name), "experts")] += spent
    return total


def copy_seconds(seconds: Mapping[str, float]) -> float:
    """Returns the time of copies between GPUs and to and from the host."""
    return sum(spent for name, spent in seconds.items() if name in _COPIES)


def matmul_seconds(seconds: Mapping[str, float]) -> float:
    """Returns the time of kernels that multiply matrices."""
    return sum(
        spent
        for name, spent in seconds.items()
        if kernel_name(name) == name and _MATMUL.search(name)
    )
