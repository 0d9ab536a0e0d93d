"""How much host memory this process may pin, lock and share, and who says so."""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostLimits", "read_limits"]

# What cgroup v1 writes for "no limit" is the largest multiple of a page.
_NO_LIMIT = 1 << 60
# XLA's own pool of pinned host memory on GPUs stops here unless told otherwise.
_XLA_POOL_GB = 64


@dataclass(frozen=True)
class HostLimits:
    """Limits in bytes; None: there is none, or it cannot be read.

    Attributes:
      memory: of the machine.
      available: of the machine, now.
      cgroup: the least of this process's control groups.
      cgroup_used: what that group uses now.
      memlock: ``RLIMIT_MEMLOCK``, for memory that the process locks itself.
      shm_total: size of ``/dev/shm``.
      shm_free: what is left of it.
      xla_pinned: XLA's pool of pinned memory on GPUs.
    """

    memory: int | None
    available: int | None
    cgroup: int | None
    cgroup_used: int | None
    memlock: int | None
    shm_total: int | None
    shm_free: int | None
    xla_pinned: int

    def pinnable(self) -> tuple[int, str] | None:
        """Returns how much can be pinned at most, and which limit says so."""
        limits = [(self.memory, "the machine's memory"), (self.cgroup, "the cgroup")]
        known = [(size, name) for size, name in limits if size is not None]
        return min(known) if known else None


def read_limits(
    environ: Mapping[str, str] | None = None, root: str | Path = "/"
) -> HostLimits:
    """Returns the limits that hold for this process.

    Args:
      environ: environment variables; None: the process's own.
      root: where ``proc``, ``sys`` and ``dev`` are; tests give a tree.
    """
    root = Path(root)
    environ = os.environ if environ is None else environ
    memory = _meminfo(root)
    cgroup, used = _cgroup(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm_total, shm_free = _shm(root)
    gigabytes = environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    pool = int(gigabytes) if gigabytes.isdigit() else _XLA_POOL_GB
    return HostLimits(
        memory=memory.get("MemTotal"),
        available=memory.get("MemAvailable"),
        cgroup=cgroup,
        cgroup_used=used,
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        shm_total=shm_total,
        shm_free=shm_free,
        xla_pinned=pool << 30,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _meminfo(root: Path) -> dict[str, int]:
    sizes = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    return sizes


def _cgroup(root: Path) -> tuple[int | None, int | None]:
    """Returns the tightest limit on the way up from our group, and its use."""
    found: list[tuple[int, int | None]] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            top, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the path is often the host's and not mounted here:
        # the top is then our own group.
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            if group != top and top not in group.parents:
                break
            size = _text(group / limit).strip()
            if size.isdigit() and int(size) < _NO_LIMIT:
                now = _text(group / used).strip()
                found.append((int(size), int(now) if now.isdigit() else None))
    return min(found, key=lambda entry: entry[0], default=(None, None))


def _shm(root: Path) -> tuple[int | None, int | None]:
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
