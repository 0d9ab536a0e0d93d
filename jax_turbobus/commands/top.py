"""`python -m jax_turbobus top`: live use of every link.

Where there are GPUs, NVML's rates: what all processes of the machine move over PCIe
and NVLink, and which process lends a GPU's link to others. Below, what each process
that uses jax_turbobus moves over which lane, by its own counters (docs/engine.md,
"Live counters"): on GPUs as on CPU devices.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jax_turbobus.commands import _live_view

__all__ = ["Sample", "add_arguments", "bar", "lenders", "run", "table"]

_GB = 1e9
# Rates need two looks; the first update comes after so long.
_FIRST_LOOK_S = 0.25
_DAY_S = 86400


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one GPU's links carried of late.

    Attributes:
      index: NVML's number of the GPU.
      name: its model.
      in_bytes_per_s: over PCIe, from the host.
      out_bytes_per_s: over PCIe, to the host.
      link_bytes_per_s: what its PCIe link could carry.
      nvlink_bytes_per_s: over all NVLinks, both directions; None: unknown.
      lender: the process that lends its link, or None.
    """

    index: int
    name: str
    in_bytes_per_s: float
    out_bytes_per_s: float
    link_bytes_per_s: float
    nvlink_bytes_per_s: float | None
    lender: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--interval", type=float, default=1.0, help="seconds between updates"
    )
    parser.add_argument(
        "--count", type=int, default=0, help="stop after so many updates; 0: never"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON for each update"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 for an option that cannot be used."""
    if (mistake := _mistake(args)) is not None:
        print(f"top: {mistake}", file=sys.stderr)
        return 2
    nvml, remark = _nvml()
    try:
        _show(args, nvml, remark)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # The reader has seen enough; Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()
    return 0


def _mistake(args: argparse.Namespace) -> str | None:
    if not 0 <= args.interval <= _DAY_S:
        return (
            f"--interval: expected seconds from 0 to {_DAY_S}, got {args.interval:g}; "
            "leave it out for one a second"
        )
    if args.count < 0:
        return f"--count: expected 1 or more updates, or 0 for no end, got {args.count}"
    return None


def _nvml() -> tuple[Any, str]:
    """Returns NVML, or None and why there are no rates of it."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except (ImportError, OSError) as error:
        return None, f"no rates of GPUs: NVML cannot be loaded: {error}"
    except pynvml.NVMLError as error:
        return None, f"no rates of GPUs: no NVIDIA driver here: {error}"
    return pynvml, ""


def _show(args: argparse.Namespace, nvml: Any, remark: str) -> None:
    nvlink: dict[int, tuple[float, float]] = {}
    watch = _live_view.Watch(_lock_directory())
    watch.look()
    time.sleep(min(max(args.interval, 0.05), _FIRST_LOOK_S))
    height = 0
    rounds = 0
    while args.count == 0 or rounds < args.count:
        samples = [] if nvml is None else list(_samples(nvml, nvlink))
        now_s = time.time()
        processes = watch.look()
        if args.json:
            print(json.dumps(_as_json(now_s, samples, remark, processes)), flush=True)
        else:
            lines = [remark] if remark else table(samples)
            columns, rows = shutil.get_terminal_size()
            is_terminal = sys.stdout.isatty()
            lines += _live_view.lines(processes, width=columns if is_terminal else 240)
            if is_terminal:
                # What has scrolled away cannot be painted over.
                lines = [line[:columns] for line in lines[: max(rows - 1, 1)]]
                if height:
                    print(f"\x1b[{height}F\x1b[J", end="")
            print("\n".join(lines), flush=True)
            height = len(lines)
        rounds += 1
        if args.count == 0 or rounds < args.count:
            time.sleep(max(args.interval, 0.05))


def _as_json(
    now_s: float,
    samples: list[Sample],
    remark: str,
    processes: list[_live_view.Process],
) -> dict[str, Any]:
    return {
        "time_s": now_s,
        "remark": remark,
        "gpus": [dataclasses.asdict(sample) for sample in samples],
        "processes": [process.as_json() for process in processes],
    }


def _lock_directory() -> pathlib.Path:
    return pathlib.Path(os.environ.get("JAX_TURBOBUS_LOCK_DIR") or "/tmp")


def table(samples: Iterable[Sample]) -> list[str]:
    """Returns one heading and one line a GPU."""
    lines = [
        f"{'GPU':24} {'from host GB/s':>30} {'to host GB/s':>30} {'NVLink':>8}  lender"
    ]
    for one in samples:
        nvlink = (
            ""
            if one.nvlink_bytes_per_s is None
            else f"{one.nvlink_bytes_per_s / _GB:.1f}"
        )
        lender = "" if one.lender is None else f"process {one.lender}"
        lines.append(
            f"{one.index:2} {one.name[:21]:21} "
            f"{bar(one.in_bytes_per_s, one.link_bytes_per_s):>30} "
            f"{bar(one.out_bytes_per_s, one.link_bytes_per_s):>30} "
            f"{nvlink:>8}  {lender}"
        )
    return lines


def bar(bytes_per_s: float, most: float, width: int = 20) -> str:
    """Returns a rate with a bar that says how much of the link it is."""
    share = min(bytes_per_s / most, 1.0) if most > 0 else 0.0
    filled = round(share * width)
    return f"{'█' * filled}{'·' * (width - filled)} {bytes_per_s / _GB:6.1f}"


def lenders(locks: str, directory: pathlib.Path) -> dict[str, int]:
    """Returns who lends which GPU.

    Args:
      locks: the content of ``/proc/locks``.
      directory: where the lenders' locks are.

    Returns:
      Process ids by GPU UUID.
    """
    inodes = {}
    for path in directory.glob("jax_turbobus-lender-*.lock"):
        uuid = path.name.removeprefix("jax_turbobus-lender-").removesuffix(".lock")
        inodes[path.stat().st_ino] = uuid
    found = {}
    for line in locks.splitlines():
        fields = line.split()
        # 1: FLOCK ADVISORY WRITE 4711 08:01:131 0 EOF
        if len(fields) < 6 or fields[1] != "FLOCK":
            continue
        inode = int(fields[5].rpartition(":")[2])
        if inode in inodes:
            found[inodes[inode]] = int(fields[4])
    return found


def _samples(nvml: Any, nvlink: dict[int, tuple[float, float]]) -> Iterator[Sample]:
    try:
        who = lenders(pathlib.Path("/proc/locks").read_text(), _lock_directory())
    except OSError:
        who = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle)).lower().removeprefix("gpu-")
        yield Sample(
            index=index,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            in_bytes_per_s=_pcie(nvml, handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
            out_bytes_per_s=_pcie(nvml, handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
            link_bytes_per_s=_link_rate(nvml, handle),
            nvlink_bytes_per_s=_nvlink(nvml, handle, index, nvlink),
            lender=who.get(uuid),
        )


def _pcie(nvml: Any, handle: Any, counter: int) -> float:
    try:
        return float(nvml.nvmlDeviceGetPcieThroughput(handle, counter)) * 1e3
    except nvml.NVMLError:
        return 0.0


def _link_rate(nvml: Any, handle: Any) -> float:
    try:
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        width = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except nvml.NVMLError:
        return 0.0
    lane = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
    return float(width) * lane.get(generation, 0.0)


def _nvlink(
    nvml: Any, handle: Any, index: int, before: dict[int, tuple[float, float]]
) -> float | None:
    total = 0.0
    try:
        fields = (
            nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
            nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        )
        for value in nvml.nvmlDeviceGetFieldValues(handle, fields):
            if value.nvmlReturn != 0:
                return None
            total += float(value.value.ullVal) * 1024
    except (AttributeError, nvml.NVMLError):
        return None
    now = time.monotonic()
    old = before.get(index)
    before[index] = (now, total)
    if old is None or now <= old[0]:
        return None
    return (total - old[1]) / (now - old[0])


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
