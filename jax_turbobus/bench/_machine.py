"""What a benchmark ran on: the header of every recorded run."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

__all__ = ["header"]


def header() -> dict[str, Any]:
    """Returns command, machine, versions and date of this run.

    Returns:
      A dict that `json` can write: ``command`` (str), ``machine`` (``cpu``,
      ``cores``, ``memory_bytes``, ``gpus``, ``driver``), ``versions`` (by
      distribution, and ``commit`` where the source tree is a git checkout) and
      ``date`` (UTC, ISO 8601).
    """
    gpus, driver = _gpus()
    return {
        "command": _command(),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": gpus,
            "driver": driver,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("jax", "jaxlib", "jax_turbobus")},
            "commit": _commit(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _command() -> str:
    return shlex.join(["python", "-m", "jax_turbobus", *sys.argv[1:]])


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> tuple[list[str], str | None]:
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return [], None
    except pynvml.NVMLError:
        return [], None
    try:
        handles = map(
            pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())
        )
        names = [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        return names, _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """Returns the checkout's commit, ``+`` behind it if files differ; else None."""
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")
