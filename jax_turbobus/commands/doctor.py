"""`python -m jax_turbobus doctor`: what works here, what does not, and why."""

import argparse
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import jax_turbobus
from jax_turbobus import _environment, _ffi, _observe, config, gpu, moe
from jax_turbobus._discovery.limits import read_limits
from jax_turbobus._discovery.sysfs import Sysfs
from jax_turbobus.commands._findings import (
    Check,
    engine_checks,
    exchange_checks,
    gpu_checks,
    host_checks,
)
from jax_turbobus.moe import _measured
from jax_turbobus.topology import discover

__all__ = ["add_arguments", "run"]

_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if anything is broken, 0 otherwise, after printing findings."""
    # Other jobs may have most of a GPU's memory; the round trips need little.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    checks = [
        check
        for group in (
            _software,
            _settings,
            _live_counters,
            _memory_kinds,
            _round_trip,
            _exchange,
            _gpus,
            _engine,
            _exchange_figures,
            _host,
        )
        for check in _guarded(group)
    ]
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        for check in checks:
            word = "BROKEN" if check.status == "broken" else check.status
            print(f"{word:6} {check.text}")
            if check.hint:
                print(f"{'':6}   -> {check.hint}")
    return int(any(check.status == "broken" for check in checks))


def _guarded(group: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yields the group's findings, and its failure as one more."""
    try:
        yield from group()
    except Exception as error:  # noqa: BLE001 - whatever fails here is the finding
        name = group.__name__.strip("_").replace("_", " ")
        lines = str(error).strip().splitlines() or [""]
        yield Check("broken", f"{name}: {type(error).__name__}: {lines[0]}")


def _software() -> Iterator[Check]:
    yield Check(
        "ok",
        f"jax_turbobus {jax_turbobus.__version__}, jax {jax.__version__}, jaxlib "
        f"{jaxlib.version.__version__}, Python {platform.python_version()}",
    )
    core = _ffi.core()
    major, minor = core.ffi_api_version
    targets = core.ffi_targets()
    yield Check("ok", f"C++ core: XLA FFI {major}.{minor}, {len(targets)} targets")


def _settings() -> Iterator[Check]:
    """Yields what the environment makes of this process's transfers."""
    config.apply_environment()
    _environment.flag("PEER_ACCESS")  # refuses what is no switch, without GPUs too
    used = config.current()
    if used.topology is not None:
        pooled = "pooled over" if used.pooled else "direct on"
        yield Check("ok", f"transfers: {pooled} the links of {used.topology.name!r}")
    elif _environment.flag("DISABLE"):
        yield Check(
            "warn",
            "transfers: plain copies, because JAX_TURBOBUS_DISABLE is set",
            "unset it to pool links",
        )
    else:
        yield Check("ok", "transfers: no engine configured for this process")


def _live_counters() -> Iterator[Check]:
    """Yields whether `top` of another process sees what this one moves."""
    try:
        folder = _ffi.core().try_live_page()
    except Exception as error:  # noqa: BLE001 - transfers do without, whatever it is
        yield Check("note", f"top does not see what this process moves: {error}")
        return
    yield Check("ok", f"top sees what this process moves (in {folder})")


def _memory_kinds() -> Iterator[Check]:
    devices = jax.local_devices()
    kinds = sorted({device.device_kind for device in devices})
    yield Check(
        "ok",
        f"backend {jax.default_backend()}: {len(devices)} device(s), "
        f"{', '.join(kinds)}",
    )
    for device in devices[:1]:
        memories = [memory.kind for memory in device.addressable_memories()]
        text = f"memory kinds: {', '.join(memories)}"
        if "pinned_host" in memories:
            yield Check("ok", text)
        else:
            yield Check(
                "broken",
                f"{text}; no pinned_host, so nothing can be offloaded",
                "use a CPU, GPU or TPU backend of jax >= 0.10.2",
            )


def _round_trip() -> Iterator[Check]:
    """Yields whether bytes survive the way to the device and back, in jit."""
    device = jax.local_devices()[0]
    words = np.arange(_MIB // 4, dtype=np.uint32)
    on_host = jax.device_put(
        words, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    )

    def there_and_back(x: jax.Array) -> Any:
        return jax_turbobus.to_host(jax_turbobus.to_device(x) + np.uint32(1))

    back = np.asarray(jax.jit(there_and_back)(on_host))
    if np.array_equal(back, words + np.uint32(1)):
        yield Check("ok", "1 MiB to the device and back inside jit: every bit right")
    else:
        wrong = int(np.count_nonzero(back != words + np.uint32(1)))
        yield Check(
            "broken",
            f"1 MiB to the device and back inside jit: {wrong} of {words.size} words "
            f"wrong",
            "report this, with the output of this command",
        )


def _exchange() -> Iterator[Check]:
    """Yields whether tokens reach their experts on all devices and come back."""
    mesh = jax.sharding.Mesh(np.asarray(jax.local_devices()), ("rank",))
    num_ranks = mesh.size
    num_tokens, hidden = 32 * num_ranks, 128
    tokens = jnp.arange(num_tokens * hidden, dtype=jnp.float32)
    tokens = tokens.reshape(num_tokens, hidden) % 251
    # Two experts of a token on different ranks, and weights that add up to one.
    first = jnp.arange(num_tokens, dtype=jnp.int32) % (2 * num_ranks)
    ids = jnp.stack([first, (first + 2) % (2 * num_ranks)], axis=1)
    if num_ranks == 1:
        ids = ids.at[:, 1].set(-1)
    weights = jnp.where(ids >= 0, jnp.float32(0.5), jnp.float32(0))
    weights = weights / weights.sum(axis=1, keepdims=True)

    def identity_experts(x: jax.Array, e: jax.Array, w: jax.Array) -> jax.Array:
        rows, _, state = moe.dispatch(
            x, e, w, num_experts=2 * num_ranks, axis_name="rank"
        )
        return moe.combine(rows, state)

    spec = jax.sharding.PartitionSpec("rank")
    there_and_back = jax.shard_map(
        identity_experts, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec
    )
    back = jax.jit(there_and_back)(tokens, ids, weights)
    if np.array_equal(np.asarray(back), np.asarray(tokens)):
        yield Check(
            "ok", f"expert exchange over {num_ranks} device(s): every bit right"
        )
    else:
        wrong = int(np.count_nonzero(np.asarray(back != tokens).any(axis=1)))
        yield Check(
            "broken",
            f"expert exchange over {num_ranks} device(s): {wrong} of {num_tokens} "
            f"tokens wrong",
            "report this, with the output of this command",
        )


def _gpus() -> Iterator[Check]:
    sysfs = Sysfs()
    cpus = {f"numa{node.number}": node.cpus for node in sysfs.numa_nodes()}
    num_gpus = 0
    if jax.default_backend() == "gpu":
        num_gpus = len(jax.local_devices())
    has_cuda = importlib.util.find_spec("jax_turbobus._cuda") is not None
    return gpu_checks(
        discover(),
        num_jax_gpus=num_gpus,
        has_cuda=has_cuda,
        node_cpus=cpus,
        own_cpus=frozenset(os.sched_getaffinity(0)),
        environ=os.environ,
    )


def _engine() -> Iterator[Check]:
    """Yields what the engine of the GPUs holds; there is one after `_round_trip`."""
    engine = gpu.engine()
    if engine is not None:
        yield from engine_checks(_observe.stats_of(engine))


def _exchange_figures() -> Iterator[Check]:
    """Yields which figures experts' exchanges go by."""
    engine = gpu.engine()
    if engine is not None:
        links, why = _measured.of_this_process()
        yield from exchange_checks(engine.slots(), links, why)


def _host() -> Iterator[Check]:
    thp = Sysfs().transparent_hugepages()
    uses_gpus = jax.default_backend() == "gpu"
    return host_checks(read_limits(), thp=thp, uses_gpus=uses_gpus)
