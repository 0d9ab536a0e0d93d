"""What NVML says about GPUs, their PCIe links, NVLinks and peer access."""

import importlib
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "NVSWITCH",
    "Brick",
    "NvmlFacts",
    "NvmlGpu",
    "load",
    "normalize_pci_address",
    "read",
]

NVSWITCH = "nvswitch"

# Arguments of nvmlDeviceGetP2PStatus, by value: pynvml's own
# NVML_P2P_CAPS_INDEX_READ is a tuple by accident and not accepted by the call.
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2
_P2P_STATUS_OK = 0
_REMOTE_IS_SWITCH = 2
# nvmlDeviceGetNvLinkVersion -> NVLink generation.
_NVLINK_GENERATION = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
# Performance states up to this one run the PCIe link at full speed; slower ones
# let it drop to generation 1 until there is work.
_BUSY_PSTATE = 2


@dataclass(frozen=True)
class Brick:
    """One NVLink of a GPU.

    Attributes:
      is_active: the link is up.
      generation: of NVLink; 0: unknown.
      remote: what is at its other end: a PCI address, `NVSWITCH`, or None where
        NVML does not say.
      bytes_per_s: nominal, one direction; None: unknown.
    """

    is_active: bool
    generation: int = 0
    remote: str | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU. A zero stands for what NVML does not know.

    Attributes:
      uuid: as ``CUDA_VISIBLE_DEVICES`` takes it.
      name: of the product.
      pci_address: as sysfs writes it.
      generation: of PCIe, now.
      system_max_generation: what GPU and slot could do together.
      max_generation: what the GPU could do in a better slot.
      width: PCIe lanes now.
      system_max_width: what GPU and slot could do together.
      is_at_full_speed: the GPU is in a performance state that keeps its PCIe
        link at full speed, so that `generation` means something.
      is_mig: the GPU is partitioned.
      bricks: its NVLinks.
    """

    uuid: str
    name: str
    pci_address: str
    generation: int = 0
    system_max_generation: int = 0
    max_generation: int = 0
    width: int = 0
    system_max_width: int = 0
    is_at_full_speed: bool = False
    is_mig: bool = False
    bricks: tuple[Brick, ...] = ()


@dataclass(frozen=True)
class NvmlFacts:
    """All GPUs in NVML's order, which is that of PCI addresses.

    Attributes:
      driver: version of the driver; empty: there is none.
      gpus: in NVML's order.
      peer_access: pairs (i < j) that can read and write each other's memory.
      nvlink_pairs: the pairs of those that do so over NVLink.
      problems: what could not be read, and why.
    """

    driver: str = ""
    gpus: tuple[NvmlGpu, ...] = ()
    peer_access: frozenset[tuple[int, int]] = frozenset()
    nvlink_pairs: frozenset[tuple[int, int]] = frozenset()
    problems: tuple[str, ...] = ()


def load() -> Any:
    """Returns pynvml, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def normalize_pci_address(address: str) -> str:
    """Returns a PCI address as sysfs writes it: ``0000:06:00.0``.

    NVML writes the domain with eight digits and in upper case.
    """
    domain, bus, device = address.strip().lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device}"


@dataclass
class _Reader:
    """Calls NVML functions, noting those that fail instead of giving up."""

    nvml: Any
    problems: list[str] = field(default_factory=list)

    def ask(self, default: Any, function: str, *args: Any, quiet: bool = True) -> Any:
        try:
            return getattr(self.nvml, function)(*args)
        except AttributeError:  # an older pynvml
            return default
        except self.nvml.NVMLError as error:
            if not quiet:
                self.problems.append(f"{function}: {error}")
            return default


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def read(nvml: Any) -> NvmlFacts:
    """Returns what NVML says about every GPU of the machine.

    Args:
      nvml: the pynvml module, or something that behaves like it.
    """
    if nvml is None:
        return NvmlFacts(problems=("pynvml is not installed (nvidia-ml-py)",))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return NvmlFacts(problems=(f"NVML: {error}",))
    try:
        return _read_all(_Reader(nvml))
    finally:
        nvml.nvmlShutdown()


def _read_all(reader: _Reader) -> NvmlFacts:
    driver = _text(reader.ask("", "nvmlSystemGetDriverVersion"))
    count = reader.ask(0, "nvmlDeviceGetCount", quiet=False)
    gpus: list[NvmlGpu] = []
    handles: list[Any] = []
    for index in range(count):
        # A GPU that fell off the bus fails here; the others still count.
        handle = reader.ask(None, "nvmlDeviceGetHandleByIndex", index, quiet=False)
        if handle is None:
            continue
        pci = reader.ask(None, "nvmlDeviceGetPciInfo", handle, quiet=False)
        uuid = reader.ask(None, "nvmlDeviceGetUUID", handle, quiet=False)
        if pci is None or uuid is None:
            continue
        handles.append(handle)
        gpus.append(_read_gpu(reader, handle, _text(pci.busId), _text(uuid)))
    peers: set[tuple[int, int]] = set()
    over_nvlink: set[tuple[int, int]] = set()
    for i in range(len(gpus)):
        for j in range(i + 1, len(gpus)):
            if all(
                _p2p_ok(reader, handles[a], handles[b], capability)
                for a, b in ((i, j), (j, i))
                for capability in (_P2P_READ, _P2P_WRITE)
            ):
                peers.add((i, j))
                if _p2p_ok(reader, handles[i], handles[j], _P2P_NVLINK):
                    over_nvlink.add((i, j))
    return NvmlFacts(
        driver=driver,
        gpus=tuple(gpus),
        peer_access=frozenset(peers),
        nvlink_pairs=frozenset(over_nvlink),
        problems=tuple(reader.problems),
    )


def _p2p_ok(reader: _Reader, a: Any, b: Any, capability: int) -> bool:
    status = reader.ask(None, "nvmlDeviceGetP2PStatus", a, b, capability)
    return bool(status == _P2P_STATUS_OK)


def _read_gpu(reader: _Reader, handle: Any, address: str, uuid: str) -> NvmlGpu:
    system_max = reader.ask(0, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    pstate = reader.ask(None, "nvmlDeviceGetPerformanceState", handle)
    # [current, pending]
    mig = reader.ask((0, 0), "nvmlDeviceGetMigMode", handle)
    return NvmlGpu(
        uuid=uuid,
        name=_text(reader.ask("", "nvmlDeviceGetName", handle)),
        pci_address=normalize_pci_address(address),
        generation=reader.ask(0, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
        system_max_generation=system_max,
        max_generation=reader.ask(
            system_max, "nvmlDeviceGetGpuMaxPcieLinkGeneration", handle
        ),
        width=reader.ask(0, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        system_max_width=reader.ask(0, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        is_at_full_speed=pstate is not None and pstate <= _BUSY_PSTATE,
        is_mig=bool(mig[0]),
        bricks=_read_bricks(reader, handle),
    )


def _read_bricks(reader: _Reader, handle: Any) -> tuple[Brick, ...]:
    bricks: list[Brick] = []
    for link in range(getattr(reader.nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        # NVML refuses the numbers that this GPU does not have.
        state = reader.ask(None, "nvmlDeviceGetNvLinkState", handle, link)
        if state is None:
            continue
        if state != 1:
            bricks.append(Brick(is_active=False))
            continue
        version = reader.ask(0, "nvmlDeviceGetNvLinkVersion", handle, link)
        bricks.append(
            Brick(
                is_active=True,
                generation=_NVLINK_GENERATION.get(version, 0),
                remote=_remote(reader, handle, link),
                bytes_per_s=_brick_rate(reader, handle, link),
            )
        )
    return tuple(bricks)


def _remote(reader: _Reader, handle: Any, link: int) -> str | None:
    kind = reader.ask(None, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
    if kind == _REMOTE_IS_SWITCH:
        return NVSWITCH
    pci = reader.ask(None, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    if pci is None:
        return None
    try:
        return normalize_pci_address(_text(pci.busId))
    except ValueError:  # a virtual machine that hides the address
        return None


def _brick_rate(reader: _Reader, handle: Any, link: int) -> float | None:
    field_id = getattr(reader.nvml, "NVML_FI_DEV_NVLINK_GET_SPEED", None)
    if field_id is None:
        return None
    values = reader.ask(None, "nvmlDeviceGetFieldValues", handle, [(field_id, link)])
    if not values or values[0].nvmlReturn != 0:
        return None
    megabytes = int(values[0].value.uiVal)
    return megabytes * 1e6 if megabytes > 0 else None
