"""Where the measured speeds of this machine's links are kept.

One JSON file a machine. A file of another version of the driver or of this package,
that names other GPUs or that cannot be read is ignored, and why is said. What it says
of exchanges may be missing or damaged for itself: the rest is used all the same.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jax_turbobus import _profile_exchange
from jax_turbobus._profile_exchange import Exchange, is_amount
from jax_turbobus._version import __version__

__all__ = ["VERSION", "PathRate", "Profile", "default_path", "load", "save"]

VERSION = 1
_FORMAT = "jax_turbobus/profile"


@dataclasses.dataclass(frozen=True)
class PathRate:
    """What one path carries, other links idle.

    Attributes:
      gpu: UUID of the GPU whose memory it is.
      relay: UUID of the GPU that lends its link; None: direct.
      direction: ``"h2d"`` or ``"d2h"``.
      bytes_per_s: bytes per second.
    """

    gpu: str
    relay: str | None
    direction: str
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """What `python -m jax_turbobus profile` measured.

    Attributes:
      made_by: version of jax_turbobus.
      driver: version of the NVIDIA driver.
      gpus: UUIDs.
      date: UTC, ISO 8601.
      block_bytes: the smallest block that reaches 98 % of the best rate of each kind
        of path.
      yield_kind: the cheapest way to let others in between blocks.
      paths: rates.
      groups: UUIDs of GPUs that share a link upstream, by group.
      sweep: rates by kind of path, block size and yield, for a reader.
      exchange: what was measured of exchanges between the GPUs; None: nothing.
      why_no_exchange: why not, if so.
    """

    made_by: str
    driver: str
    gpus: tuple[str, ...]
    date: str
    block_bytes: int
    yield_kind: str
    paths: tuple[PathRate, ...]
    groups: tuple[tuple[str, ...], ...]
    sweep: tuple[dict[str, Any], ...] = ()
    exchange: Exchange | None = None
    why_no_exchange: str = dataclasses.field(default="", compare=False)

    def rate(self, gpu: str, relay: str | None, direction: str) -> float | None:
        """Returns what a path carries in bytes per second; None: not measured."""
        for path in self.paths:
            if (path.gpu, path.relay, path.direction) == (gpu, relay, direction):
                return path.bytes_per_s
        return None

    def is_one_group(self, a: str, b: str) -> bool:
        """Returns whether two GPUs share a link upstream: neither helps the other."""
        return any(a in group and b in group for group in self.groups)


def default_path(gpus: Sequence[str]) -> pathlib.Path:
    """Returns where the profile of a machine with these GPUs is kept.

    ``JAX_TURBOBUS_PROFILE`` names another file.
    """
    named = os.environ.get("JAX_TURBOBUS_PROFILE")
    if named:
        return pathlib.Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    digest = hashlib.sha256("\n".join(sorted(gpus)).encode()).hexdigest()[:16]
    return pathlib.Path(cache) / "jax_turbobus" / f"profile-{digest}.json"


def save(profile: Profile, path: pathlib.Path) -> None:
    """Writes a profile; a reader sees the old file or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"format": _FORMAT, "version": VERSION, **dataclasses.asdict(profile)},
        indent=1,
    )
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(path)


def load(
    path: pathlib.Path, *, driver: str, gpus: Sequence[str]
) -> tuple[Profile | None, str]:
    """Returns a machine's profile, or None and why there is none to use.

    Args:
      path: the file.
      driver: version of the driver in use; empty: unknown, not compared.
      gpus: UUIDs of the GPUs in use. The profile may know more.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, f"no profile at {path}; run `python -m jax_turbobus profile`"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path} cannot be read: {error}"
    try:
        data = json.loads(text)
        profile = _parse(data)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        return None, f"{path} is no profile of version {VERSION}: {error!r}"
    if profile.made_by != __version__:
        return None, (
            f"{path} is of jax_turbobus {profile.made_by or 'without a version'}, this "
            f"is {__version__}; run `python -m jax_turbobus profile` again"
        )
    if driver and profile.driver != driver:
        return None, f"{path} is of driver {profile.driver}, this is {driver}"
    unknown = [uuid for uuid in gpus if uuid not in profile.gpus]
    if unknown:
        return None, f"{path} does not know GPU {', '.join(unknown)}"
    exchange, why = _exchange_of(data, path)
    return dataclasses.replace(profile, exchange=exchange, why_no_exchange=why), ""


def _exchange_of(
    data: dict[str, Any], path: pathlib.Path
) -> tuple[Exchange | None, str]:
    again = "run `python -m jax_turbobus profile` again"
    part = data.get("exchange")
    if part is None:
        why = data.get("why_no_exchange") or "it is older than such measurements"
        return None, f"{path} says nothing of exchanges ({why}); {again}"
    try:
        return _profile_exchange.parse(part), ""
    except (AttributeError, ValueError, TypeError, KeyError) as error:
        return None, f"{path}: its part on exchanges is damaged: {error!r}; {again}"


def _parse(data: Any) -> Profile:
    if data["format"] != _FORMAT or data["version"] != VERSION:
        raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
    paths = tuple(PathRate(**path) for path in data["paths"])
    for path in paths:
        if not is_amount(path.bytes_per_s) or path.direction not in ("h2d", "d2h"):
            raise ValueError(f"an impossible path: {path}")
    block_bytes = int(data["block_bytes"])
    if block_bytes <= 0:
        raise ValueError(f"block_bytes {block_bytes}")
    return Profile(
        made_by=str(data.get("made_by", "")),
        driver=str(data["driver"]),
        gpus=tuple(map(str, data["gpus"])),
        date=str(data["date"]),
        block_bytes=block_bytes,
        yield_kind=str(data["yield_kind"]),
        paths=paths,
        groups=tuple(tuple(map(str, group)) for group in data["groups"]),
        sweep=tuple(data.get("sweep", ())),
    )
