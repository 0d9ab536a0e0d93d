"""What doctor makes of GPUs, links and host memory: findings from facts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jax_turbobus._discovery.limits import HostLimits
from jax_turbobus._observe import Stats
from jax_turbobus.topology import Discovery

__all__ = ["Check", "engine_checks", "exchange_checks", "gpu_checks", "host_checks"]

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
      status: ``"ok"``; ``"note"``: good to know; ``"warn"``: works, but slower or
        smaller than it could; ``"broken"``: does not work.
      text: what was found.
      hint: what to do; may be empty.
    """

    status: Literal["ok", "note", "warn", "broken"]
    text: str
    hint: str = ""


def gpu_checks(
    found: Discovery,
    *,
    num_jax_gpus: int,
    has_cuda: bool,
    node_cpus: Mapping[str, frozenset[int]],
    own_cpus: frozenset[int],
    environ: Mapping[str, str],
) -> Iterator[Check]:
    """Yields what can be said about GPUs and their links.

    Args:
      found: what discovery found.
      num_jax_gpus: local GPUs that JAX sees.
      has_cuda: the CUDA half of the package was built.
      node_cpus: processors by NUMA node.
      own_cpus: processors that this process may run on.
      environ: environment variables.
    """
    topology = found.topology
    if not topology.gpus:
        why = f" ({found.remarks[0]})" if found.remarks else ""
        yield Check("note", f"no GPU{why}: transfers are plain copies in host memory")
        return
    names = ", ".join(sorted({gpu.name for gpu in topology.gpus}))
    yield Check("ok", f"{len(topology.gpus)} GPU(s): {names}; driver {found.driver}")
    for remark in found.remarks:
        yield Check("note", remark)
    if num_jax_gpus == 0:
        yield Check(
            "warn",
            "the driver shows GPUs, but JAX does not use them",
            "pip install 'jax[cuda13]', and see that JAX_PLATFORMS allows cuda",
        )
    elif num_jax_gpus != len(topology.gpus):
        yield Check(
            "warn",
            f"JAX sees {num_jax_gpus} of {len(topology.gpus)} GPUs",
            "check CUDA_VISIBLE_DEVICES and jax_cuda_visible_devices",
        )
    if not has_cuda:
        yield Check(
            "broken" if num_jax_gpus else "warn",
            "the package was built without its CUDA half: its calls do not compile "
            "for GPUs",
            "install nvcc, then `pip install --force-reinstall .`",
        )
    for gpu in topology.gpus:
        relays = [path.relay for path in topology.paths(gpu.index, "h2d")[1:]]
        if relays:
            pooled = topology.pooled_bandwidth(gpu.index, "h2d")
            direct = topology.paths(gpu.index, "h2d")[0].bandwidth_bytes_per_s
            lenders = ", ".join(f"gpu{relay}" for relay in relays)
            yield Check(
                "ok",
                f"gpu{gpu.index}: can borrow the links of {lenders}; to the device "
                f"up to {pooled / 1e9:.0f} GB/s instead of {direct / 1e9:.0f}",
            )
        else:
            why = _why_no_relay(found, gpu.index)
            yield Check("note", f"gpu{gpu.index}: borrows no link: {why}")
        node = topology.numa_nodes[gpu.numa_node].id
        near = node_cpus.get(node, frozenset())
        if near and not near & own_cpus:
            yield Check(
                "warn",
                f"gpu{gpu.index} is near {node}, whose processors this process may "
                f"not use: host buffers will lie on the far side",
                "run it with `numactl --cpunodebind` on that node, or on all nodes",
            )
    if environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "cuda_async":
        yield Check(
            "note",
            "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async: its memory is closed to other "
            "GPUs and processes: transfers use no other GPU's link and no node "
            "service, and exchanges go through host memory",
        )


def engine_checks(stats: Stats) -> Iterator[Check]:
    """Yields what the engine of this process's GPUs holds, and which relays it lacks.

    Args:
      stats: of that engine.
    """
    if not stats.staging_bytes:
        yield Check("note", "staging: none, as no GPU of this process lends its link")
    for size in sorted(set(stats.staging_bytes.values())):
        lenders = [gpu for gpu, own in stats.staging_bytes.items() if own == size]
        names = ", ".join(f"gpu{gpu}" for gpu in sorted(lenders))
        yield Check("ok", f"staging: {_size(size)} on each of {names}, allocated once")
    said = set()
    for lane in stats.lanes:
        finding = f"gpu{lane.gpu} borrows no link of gpu{lane.relay}: {lane.reason}"
        if lane.is_removed and finding not in said:
            said.add(finding)
            yield Check("warn", finding)


def exchange_checks(
    slots: tuple[int, int, str], links: Any, why_no_links: str
) -> Iterator[Check]:
    """Yields which figures exchanges between GPUs go by.

    Args:
      slots: number, bytes and who says so, as `gpu.Engine.slots` returns them.
      links: what was measured of this process's GPUs (`moe._measured`), or None.
      why_no_links: why there are none, if so.
    """
    number, size, source = slots
    text = f"exchange through host memory: {number} slots of {_size(size)} a pair"
    yield Check("ok", f"{text} ({source})")
    if links is not None:
        yield Check("ok", f"schedules are chosen by {links.source}")
    else:
        yield Check("note", f"schedules are chosen by assumed rates: {why_no_links}")


def _why_no_relay(found: Discovery, gpu: int) -> str:
    topology = found.topology
    others = [other.index for other in topology.gpus if other.index != gpu]
    if not others:
        return "there is no other GPU"
    peers = [other for other in others if topology.has_peer_access(gpu, other)]
    if not peers:
        return "no GPU has peer access to it"
    if not any(topology.can_relay(gpu, peer) for peer in peers):
        return "its peers are reached at less than twice a PCIe link's rate"
    return "its peers share its PCIe switch"


def _size(size_bytes: int) -> str:
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.1f} GiB"
    return f"{size_bytes / _MIB:.1f} MiB"


def host_checks(limits: HostLimits, *, thp: str, uses_gpus: bool) -> Iterator[Check]:
    """Yields what can be said about host memory.

    Args:
      limits: of this process.
      thp: the kernel's mode of transparent huge pages; empty: unknown.
      uses_gpus: JAX's backend is CUDA.
    """
    pinnable = limits.pinnable()
    if pinnable is not None:
        size, reason = pinnable
        free = "" if limits.available is None else f", {_size(limits.available)} free"
        used = (
            "" if limits.cgroup_used is None else f", {_size(limits.cgroup_used)} used"
        )
        yield Check(
            "ok",
            f"host memory: at most {_size(size)} ({reason}"
            f"{used if reason == 'the cgroup' else free})",
        )
    if uses_gpus:
        size = limits.xla_pinned
        is_too_much = pinnable is not None and size > pinnable[0]
        yield Check(
            "warn" if is_too_much else "note",
            f"XLA pins at most {_size(size)} of host memory"
            + (", which is more than there is" if is_too_much else ""),
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB changes it",
        )
    if limits.memlock is None:
        yield Check("ok", "locked memory (RLIMIT_MEMLOCK): no limit")
    else:
        yield Check(
            "note",
            f"locked memory (RLIMIT_MEMLOCK): {_size(limits.memlock)}; memory that "
            f"CUDA pins does not count",
            "raise it with `ulimit -l` where a program locks memory itself",
        )
    if limits.shm_total is None or limits.shm_free is None:
        yield Check("warn", "/dev/shm: not there", "mount a tmpfs on it")
    elif limits.shm_total < _GIB:
        yield Check(
            "warn",
            f"/dev/shm: {_size(limits.shm_total)}, {_size(limits.shm_free)} free; NCCL "
            f"and shared host buffers need more",
            "start the container with --shm-size=8g or more",
        )
    else:
        yield Check(
            "ok",
            f"/dev/shm: {_size(limits.shm_total)}, {_size(limits.shm_free)} free",
        )
    if thp == "never":
        yield Check(
            "warn",
            "transparent huge pages are off: first use of large buffers is slow",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
