"""Host transfers against JAX's own: `python -m jax_turbobus bench offload`.

Every case is one whole call of an eager transfer, from Python until the result is
ready, ours and the peers' in alternating rounds. Results are fresh arrays on both
sides, except for `out=`, which nothing in JAX has. On GPUs: see `offload_gpu`.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_turbobus as tb
from jax_turbobus import _compat
from jax_turbobus.bench import _options, offload_gpu
from jax_turbobus.bench._report import Row, Timing, alternate

__all__ = ["add_arguments", "run"]

_KIB, _MIB = 1 << 10, 1 << 20
_SMALL = (_KIB, 16 * _KIB, 63 * _KIB)
_LARGE = (16 * _MIB, 64 * _MIB, 256 * _MIB)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds how long to measure, and up to which size; on GPUs, which cases."""
    if _compat.has_cuda_devices():
        offload_gpu.add_arguments(parser)
        return
    parser.add_argument(
        "--rounds", type=int, default=11, metavar="N", help="measured rounds"
    )
    parser.add_argument(
        "--max-mib", type=int, default=256, metavar="N", help="largest array, MiB"
    )


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row for each size, direction and peer; on GPUs, for each case."""
    _options.check_whole("--rounds", args.rounds, 1, 1 << 20)
    if _compat.has_cuda_devices():
        return offload_gpu.run(args)
    _options.check_whole("--max-mib", args.max_mib, 0, 1 << 20)
    rows = []
    for size in _SMALL:
        rows += _small(size, args.rounds)
    for size in _LARGE:
        if size <= args.max_mib * _MIB:
            rows += _large(size, args.rounds)
    return rows


def _functions(size: int) -> dict[str, Callable[[], Any]]:
    """Returns the transfers to time, each blocking until its result is ready."""
    x = jax.block_until_ready(jnp.arange(size // 4, dtype=jnp.float32))
    host = jax.block_until_ready(tb.to_host(x))
    out = [tb.to_host(x)]

    def into() -> None:
        out[0] = jax.block_until_ready(tb.to_host(x, out[0]))

    def put(value: Any, space: Any) -> Any:
        return jax.block_until_ready(jax.device_put(value, space, may_alias=False))

    return {
        "to_device": lambda: jax.block_until_ready(tb.to_device(host)),
        "to_host": lambda: jax.block_until_ready(tb.to_host(x)),
        "to_host(out=)": into,
        "jax to_device": lambda: put(host, DEVICE),
        "jax to_host": lambda: put(x, HOST),
        "jnp.copy": lambda: jax.block_until_ready(jnp.copy(x)),
    }


def _small(size: int, rounds: int) -> list[Row]:
    """Returns what a call costs where there is next to nothing to copy.

    Our own time is a whole call less what JAX takes, in the same rounds, to run a
    compiled copy of the array: checks, look-ups and the handler are ours, the
    dispatch of a program is not.
    """
    functions = _functions(size)
    x = jax.block_until_ready(jnp.arange(size // 4, dtype=jnp.float32))
    copy = jax.jit(jnp.copy)
    replace = jax.jit(lambda x, _: jnp.copy(x), donate_argnums=1, keep_unused=True)
    spare = [jax.block_until_ready(x + 1)]

    def compiled_copy_into() -> None:
        spare[0] = jax.block_until_ready(replace(x, spare[0]))

    functions["copy"] = lambda: jax.block_until_ready(copy(x))
    functions["copy into"] = compiled_copy_into
    times = alternate(functions, rounds=rounds, repeat=200)
    case = f"{size // _KIB} KiB"
    rows = []
    for name, dispatch, peer in (
        ("to_device", "copy", "jax to_device"),
        ("to_host", "copy", "jax to_host"),
        ("to_host(out=)", "copy into", "jax to_host"),
    ):
        pairs = zip(times[name].seconds, times[dispatch].seconds, strict=True)
        own = statistics.median(ours - jax_alone for ours, jax_alone in pairs)
        rows += [
            Row.make(f"{name} {case}", "own time, us", own * 1e6, required="< 30"),
            Row.make(
                f"{name} {case}",
                "whole call, us",
                times[name].median * 1e6,
                peer=times[peer].median * 1e6,
                peer_name="jax.device_put",
            ),
        ]
    return rows


def _large(size: int, rounds: int) -> list[Row]:
    """Returns throughputs against `jax.device_put` and `jnp.copy`."""
    times = alternate(_functions(size), rounds=rounds, warmup=2)
    case = f"{size // _MIB} MiB"
    pairs = (
        ("to_device", "jax to_device", "jax.device_put"),
        ("to_device", "jnp.copy", "jnp.copy"),
        ("to_host", "jax to_host", "jax.device_put"),
        ("to_host", "jnp.copy", "jnp.copy"),
        ("to_host(out=)", "jax to_host", "jax.device_put"),
    )

    def rate(timing: Timing) -> float:
        return size / timing.median / 1e9

    return [
        Row.make(
            f"{ours} {case}",
            "GB/s",
            rate(times[ours]),
            peer=rate(times[peer]),
            peer_name=name,
            required=">= 0.9",
        )
        for ours, peer, name in pairs
    ]
