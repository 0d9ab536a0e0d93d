"""The engine that pools the host links of this process's GPUs.

It starts with the first use of this package on CUDA devices, over the links that
NVML and sysfs show, at the speeds that `python -m jax_turbobus profile` measured
if it did. docs/gpu_offload.md explains it.

Environment: ``JAX_TURBOBUS_DISABLE=1`` (every transfer is one plain copy),
``JAX_TURBOBUS_POOLED=0`` (own links only), ``JAX_TURBOBUS_MODE=lock-step``,
``JAX_TURBOBUS_BLOCK_BYTES``, ``JAX_TURBOBUS_TRACE=1``, ``JAX_TURBOBUS_PROFILE``
(a file), ``JAX_TURBOBUS_PEER_ACCESS=0`` (as if no GPU reached another's memory),
``JAX_TURBOBUS_EXCHANGE_SLOTS`` and ``JAX_TURBOBUS_EXCHANGE_SLOT_BYTES`` (of the rings
that experts' rows take through host memory, docs/gpu_exchange.md),
``JAX_TURBOBUS_LOCK_DIR`` (where lenders' locks and live counters are; default
``/tmp``), ``JAX_TURBOBUS_TOP=0`` (no live counters),
``JAX_TURBOBUS_TOPOLOGY`` (a file that names this machine's GPUs by UUID, instead of
what NVML and sysfs show).
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from jax_turbobus import _environment, _gpu_paths, _profile_file

__all__ = ["Engine", "configured", "engine", "start"]

_log = logging.getLogger("jax_turbobus")

_BLOCK_BYTES = 64 << 10, 1 << 30  # least and most
_SLOT_VARIABLES = (
    "JAX_TURBOBUS_EXCHANGE_SLOTS",
    "JAX_TURBOBUS_EXCHANGE_SLOT_BYTES",
)

_engine: "Engine | None" = None


class Engine:
    """This process's engine for GPUs.

    Attributes:
      library: the C++ library.
      remarks: sentences for a reader: why there is no profile, and the like.
      profile: what was measured on this machine; None: nothing that can be used.
      why_no_exchange: why exchanges have no measured figures; empty: they have.
    """

    def __init__(
        self,
        library: ModuleType,
        remarks: tuple[str, ...],
        profile: _profile_file.Profile | None = None,
        why_no_exchange: str = "it was started without a profile",
    ) -> None:
        self.library = library
        self.remarks = remarks
        self.profile = profile
        self.why_no_exchange = why_no_exchange

    def slots(self) -> tuple[int, int, str]:
        """Returns how many slots a new ring has, their bytes, and who says so.

        Raises:
          ValueError: an environment variable says what cannot be.
        """
        num_slots, slot_bytes = self.library.exchange_slots()
        named = [n for n in _SLOT_VARIABLES if os.environ.get(n, "").strip()]
        sources = [" and ".join(named)] if named else []
        if len(named) < len(_SLOT_VARIABLES):
            if self.profile is not None and self.profile.exchange is not None:
                sources.append(f"the profile of {self.profile.date}")
            else:
                sources.append(f"the default: {self.why_no_exchange}")
        return num_slots, slot_bytes, "; ".join(sources)

    @property
    def is_traced(self) -> bool:
        """Whether the time of every block is kept."""
        return bool(self.library.settings()["is_traced"])

    def set(self, **settings: Any) -> None:
        """Changes settings for later transfers.

        Args:
          **settings: any of ``block_bytes``, ``min_pooled_bytes``, ``split``
            (``"finish-time"``, ``"even"``, ``"direct"``), ``is_lock_step``,
            ``has_yields``, ``relay_streams`` (``"leg"``, ``"slot"``,
            ``"loose-slot"``), ``late_factor``, ``direct_latency_ns``,
            ``relay_latency_ns``, ``is_disabled``, ``is_traced``.

        Raises:
          ValueError: a setting does not exist or cannot work.
        """
        self.library.set_settings(settings)

    def links(self, gpu: int, direction: str | None = None) -> list[int]:
        """Returns the indices of a GPU's own links among ``raw()["paths"]``.

        Args:
          gpu: its CUDA ordinal in this process.
          direction: ``"h2d"`` or ``"d2h"``; None: both.
        """
        return [
            i
            for i, path in enumerate(self.raw()["paths"])
            if (path["gpu"], path["relay"]) == (gpu, None)
            and direction in (None, path["direction"])
        ]

    def raw(self) -> dict[str, Any]:
        """Returns every counter of the C++ engine."""
        stats: dict[str, Any] = self.library.stats()
        for message in self.library.take_messages():
            _log.warning("%s", message)
        return stats

    def stats(self) -> dict[str, Any]:
        """Returns what `jax_turbobus.stats` shows."""
        raw = self.raw()
        num_completed = raw["num_completed"] + raw["num_plain"]
        num_over = num_completed + raw["num_failed"]
        return {
            "now_ns": raw["now_ns"],
            "created_ns": raw["created_ns"],
            "num_submitted": num_over + raw["num_in_flight"],
            "num_in_flight": raw["num_in_flight"],
            "num_completed": num_completed,
            "num_failed": raw["num_failed"],
            "num_cancelled": 0,  # nothing can be
            "num_completed_bytes": raw["completed_bytes"] + raw["plain_bytes"],
            "num_blocks_in_flight": raw["num_blocks_in_flight"],
            "num_reissued_blocks": raw["num_reissued_blocks"],
            "num_late_copies": 0,  # nothing is emulated
            "staging_bytes": raw["staging_bytes"],
            "lanes": [_lane(path) for path in raw["paths"]],
            "links": _links(raw["paths"]),
            "recent_transfers": [_transfer(one) for one in raw["recent_transfers"]],
        }

    def trace(self) -> list[dict[str, Any]]:
        """Returns blocks and transfers since the last call, for `trace`."""
        spans = self.library.take_spans()
        raw = self.raw()
        events = [
            {
                "transfer": span["transfer"],
                "lane": span["path"],
                "gpu": raw["paths"][span["path"]]["gpu"],
                "direction": raw["paths"][span["path"]]["direction"],
                "issued_ns": min(span["issued_ns"], span["start_ns"]),
                **{
                    name: span[name]
                    for name in (
                        "offset_bytes",
                        "size_bytes",
                        "start_ns",
                        "relayed_ns",
                        "resumed_ns",
                        "end_ns",
                        "status",
                    )
                },
            }
            for span in spans
        ]
        traced = {span["transfer"] for span in spans}
        events += [
            {
                "transfer": one["id"],
                "lane": -1,
                "gpu": one["gpu"],
                "direction": one["direction"],
                "size_bytes": one["size_bytes"],
                "issued_ns": min(one["submitted_ns"], one["ended_ns"]),
                "end_ns": one["ended_ns"],
                "status": one["status"],
            }
            for one in raw["recent_transfers"]
            if one["id"] in traced
        ]
        return events


def _lane(path: dict[str, Any]) -> dict[str, Any]:
    relay = path["relay"]
    via = "" if relay is None else f" via gpu{relay}"
    return {
        "name": f"gpu{path['gpu']} {path['direction']}{via}",
        "gpu": path["gpu"],
        "relay": relay,
        "direction": path["direction"],
        "numa_node": None,
        "bandwidth_bytes_per_s": path["bandwidth_bytes_per_s"],
        "num_bytes": path["num_bytes"],
        "num_blocks": path["num_blocks"],
        "busy_ns": path["busy_ns"],
        "queued_ns": None,
        "num_late_blocks": path["num_late"],
        "num_failed_blocks": path["num_failed"],
        "num_bytes_in_flight": path["num_bytes_in_flight"],
        "is_removed": bool(path["dropped"]),
        "reason": path["dropped"] or path["left_out"] or _why_spared(path),
    }


def _why_spared(path: dict[str, Any]) -> str:
    """Returns why a relay that works gets less than its share; may be empty."""
    if path["has_rival"]:
        return f"GPU {path['relay']} is busy itself whenever GPU {path['gpu']} is"
    if path["is_backed_off"]:
        return "its blocks were late: it gets a probe at most, until they are not"
    return ""


def _links(paths: list[dict[str, Any]]) -> list[dict[str, Any]]:
    links: dict[str, dict[str, Any]] = {}
    for path in paths:
        gpu = path["gpu"] if path["relay"] is None else path["relay"]
        name = f"pcie gpu{gpu} {path['direction']}"
        link = links.setdefault(
            name,
            {
                "name": name,
                "bandwidth_bytes_per_s": path["bandwidth_bytes_per_s"],
                "num_bytes": 0,
                "num_blocks": 0,
                "busy_ns": 0,
            },
        )
        for field in ("num_bytes", "num_blocks", "busy_ns"):
            link[field] += path[field]
    return list(links.values())


def _transfer(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": one["id"],
        "gpu": one["gpu"],
        "direction": one["direction"],
        "size_bytes": one["size_bytes"],
        "status": one["status"],
        "message": one["message"],
        "submitted_ns": one["submitted_ns"],
        "started_ns": one["started_ns"],
        "ended_ns": one["ended_ns"],
        "num_blocks": one["num_blocks"],
        "num_relayed_bytes": one["num_relayed_bytes"],
        "num_reissued_blocks": one["num_reissued_blocks"],
        "reissue_reason": one["reissue_reason"],
    }


def engine() -> Engine | None:
    """Returns the engine, or None where this process has not used CUDA devices."""
    return _engine


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """Runs its body under other settings of the engine, then restores them.

    Args:
      **settings: as for `Engine.set`.

    Yields:
      Nothing.

    Raises:
      ValueError: there is no engine, or as for `Engine.set`.
    """
    if _engine is None:
        raise ValueError("configured: this process has not used CUDA devices")
    before = _engine.library.settings()
    _engine.set(**settings)
    try:
        yield
    finally:
        _engine.set(**before)


def start(library: ModuleType) -> None:
    """Starts the engine; what loading the CUDA library ends with.

    It makes streams and staging memory, and needs CUDA contexts on all GPUs of
    this process.

    Args:
      library: the CUDA library.

    Raises:
      ValueError: an environment variable says what cannot be.
    """
    global _engine
    if _engine is not None:
        return
    for name in ("PEER_ACCESS", "TOP"):  # The library reads them.
        _environment.flag(name)
    remarks: list[str] = []
    gpus = library.gpus()
    uuids = [gpu["uuid"] for gpu in gpus]
    rates, driver = _gpu_paths.estimated(uuids, remarks)
    profile, reason = _profile_file.load(
        _profile_file.default_path(uuids), driver=driver, gpus=uuids
    )
    if reason:
        remarks.append(reason)
    why_no_exchange = _use_exchange(library, profile, reason)
    if profile is not None and why_no_exchange:
        remarks.append(f"exchanges use defaults: {why_no_exchange}")
    settings = _settings(profile)
    if profile is not None and profile.yield_kind in ("word", "kernel"):
        library.set_yield_kind(profile.yield_kind)
    paths = list(_gpu_paths.paths(library, uuids, rates, profile))
    if settings.get("is_disabled"):
        paths = [path for path in paths if path[1] is None]
    library.start(paths, settings)
    for message in library.take_messages():
        remarks.append(message)
        _log.warning("%s", message)
    for remark in remarks:
        _log.info("%s", remark)
    _engine = Engine(library, tuple(remarks), profile, why_no_exchange)


def _use_exchange(
    library: ModuleType, profile: _profile_file.Profile | None, reason: str
) -> str:
    """Gives rings the slots that were measured.

    Returns:
      Why it did not; empty: it did.
    """
    if profile is None:
        return reason
    if profile.exchange is None:
        return profile.why_no_exchange
    library.set_measured_slots(profile.exchange.num_slots, profile.exchange.slot_bytes)
    return ""


def _settings(profile: _profile_file.Profile | None) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if profile is not None:
        settings["block_bytes"] = profile.block_bytes
    if _environment.flag("DISABLE", default=False):
        settings["is_disabled"] = True
    if not _environment.flag("POOLED", default=True):
        settings["split"] = "direct"
    mode = os.environ.get("JAX_TURBOBUS_MODE", "").strip() or "free-running"
    if mode not in ("free-running", "lock-step"):
        raise ValueError(
            f"JAX_TURBOBUS_MODE: expected 'free-running' or 'lock-step', got {mode!r}"
        )
    settings["is_lock_step"] = mode == "lock-step"
    block_bytes = os.environ.get("JAX_TURBOBUS_BLOCK_BYTES", "").strip()
    if block_bytes:
        least, most = _BLOCK_BYTES
        if not block_bytes.isdecimal() or not least <= int(block_bytes) <= most:
            raise ValueError(
                f"JAX_TURBOBUS_BLOCK_BYTES: expected a whole number from {least} to "
                f"{most} on GPUs, got {block_bytes!r}"
            )
        settings["block_bytes"] = int(block_bytes)
    # On CPU devices it may be a file's name.
    trace = os.environ.get("JAX_TURBOBUS_TRACE", "").strip()
    settings["is_traced"] = bool(
        trace and _environment.as_trace("JAX_TURBOBUS_TRACE", trace)
    )
    return settings
