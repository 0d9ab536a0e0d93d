"""How fast bytes travel: every row goes to another rank, and nothing else happens."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from jax_turbobus import _ffi, moe
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._kernels import kernel_name, kernel_seconds
from jax_turbobus.bench.experts_gpu._setup import AXIS, Setup

__all__ = ["links"]

_ROWS, _HIDDEN = 16384, 4096
# A program of so many exchanges, less one of a single one, is what they take.
_REPEATS = 9
# Plain copies in a row, so that their start matters little.
_COPIES = 4


def _swap(setup: Setup) -> Callable[[jax.Array, int], jax.Array]:
    """Returns a function that sends all rows to the next rank, some times over."""

    def run(tokens: jax.Array, repeats: int) -> jax.Array:
        num_tokens = tokens.shape[0]
        other = (lax.axis_index(AXIS) + 1) % setup.num_ranks
        ids = jnp.full((num_tokens, 1), other, jnp.int32)
        weights = jnp.ones((num_tokens, 1), jnp.float32)
        for _ in range(repeats):
            tokens, _, _ = moe.dispatch(
                tokens,
                ids,
                weights,
                num_experts=setup.num_ranks,
                axis_name=AXIS,
                recv_capacity=num_tokens,
            )
        return tokens

    return run


def _nccl() -> Callable[[jax.Array, int], jax.Array]:
    """Returns the same, of two ranks, through XLA's all-to-all.

    A rank keeps one of the two blocks, so each all-to-all sends as many rows. They are
    doubled once, before the first, and cut once, behind the last.
    """

    def run(tokens: jax.Array, repeats: int) -> jax.Array:
        blocks = jnp.tile(tokens, (2, 1))
        for _ in range(repeats):
            blocks = lax.all_to_all(blocks, AXIS, 0, 0, tiled=True)
        num_rows = tokens.shape[0]
        start = (lax.axis_index(AXIS) + repeats) % 2 * num_rows
        return lax.dynamic_slice_in_dim(blocks, start, num_rows)

    return run


def links(setup: Setup) -> Iterator[Row]:
    """Yields GB/s that a GPU sends while all do: ours, and NCCL's of the same bytes."""
    num_rows, hidden = setup.small(_ROWS), max(_HIDDEN // setup.shrink, 64)
    tokens = setup.normal((setup.num_ranks * num_rows, hidden), jnp.bfloat16, 0)
    size_bytes = num_rows * hidden * 2
    case = f"{setup.access}: {num_rows} rows of {hidden * 2} bytes to the next rank"

    def seconds(scheme: Callable[[jax.Array, int], jax.Array]) -> tuple[float, Any]:
        one, many = (
            setup.on_mesh(lambda x, n=n: scheme(x, n), 1) for n in (1, 1 + _REPEATS)
        )
        np.testing.assert_array_equal(
            np.asarray(one(tokens).astype(jnp.float32)),
            np.roll(
                np.asarray(tokens.astype(jnp.float32)).reshape(
                    setup.num_ranks, num_rows, hidden
                ),
                1,
                axis=0,
            ).reshape(-1, hidden),
        )
        times = setup.times({"one": lambda: one(tokens), "many": lambda: many(tokens)})
        return max(times["many"] - times["one"], 1e-9) / _REPEATS, one

    own, one = seconds(_swap(setup))
    rate = size_bytes / own / 1e9
    if setup.has_peers:
        yield Row.make(case, "the whole dispatch, GB/s sent", rate, required=">= 300")
    if setup.num_ranks == 2:
        theirs, _ = seconds(_nccl())
        yield Row.make(
            case,
            "GB/s sent, both ways at once",
            rate,
            peer=size_bytes / theirs / 1e9,
            peer_name="lax.all_to_all",
            required=None if setup.has_peers else ">= 1.9",
        )
    for name, limit in _limits(setup, tokens).items():
        yield Row.make(
            case, "GB/s sent, beside a limit", rate, peer=limit, peer_name=name
        )
    if not setup.has_peers:
        yield Row.make(
            case, "of 44 GB/s, 80 % of the link", rate / 44, note="the goal: 1"
        )
        alone = _rings_alone(setup, size_bytes)
        if alone is not None:
            yield Row.make(case, "rings alone, nothing packed, GB/s sent", alone)
    if setup.has_peers:
        yield from _kernels_of(case, lambda: one(tokens), size_bytes)


def _kernels_of(
    case: str, dispatch: Callable[[], jax.Array], size_bytes: int
) -> Iterator[Row]:
    """Yields what the profiler says of a dispatch, its send kernel's rate among it."""
    kernels: dict[str, float] = {}
    for name, spent in kernel_seconds(dispatch).items():
        label = kernel_name(name)[:60]
        kernels[label] = kernels.get(label, 0.0) + spent
    for label, spent in sorted(kernels.items(), key=lambda item: -item[1]):
        if spent > sum(kernels.values()) / 100:
            yield Row.make(case, f"kernel {label}, us", spent * 1e6)
    if kernels:
        spent = kernels.get("Send", float("inf"))
        figure = size_bytes / spent / 1e9
        yield Row.make(case, "send kernel, GB/s sent", figure, required=">= 340")


def _limits(setup: Setup, tokens: jax.Array) -> dict[str, float]:
    """Returns GB/s in one direction of one GPU's links, by plain copies of JAX."""
    parts = [shard.data for shard in tokens.addressable_shards]
    homes = [SingleDeviceSharding(part.device) for part in parts]
    if setup.has_peers:
        nexts = homes[1:] + homes[:1]
        return {
            "plain copies to the next GPU, all GPUs at once": _rate(
                setup, list(zip(parts, nexts, strict=True))
            )
        }
    on_host = [home.with_memory_kind("pinned_host") for home in homes]
    there = [jax.device_put(x, to) for x, to in zip(parts, on_host, strict=True)]
    out = list(zip(parts, on_host, strict=True))
    back = list(zip(there, homes, strict=True))
    return {
        "plain copies to the host, one GPU alone": _rate(setup, out[:1]),
        "plain copies from the host, one GPU alone": _rate(setup, back[:1]),
        "plain copies to and from the host, all GPUs at once": _rate(
            setup, [*out, *back]
        ),
    }


def _rate(setup: Setup, copies: Sequence[tuple[jax.Array, Sharding]]) -> float:
    """Returns GB/s of each of some copies, all at once, some times over."""

    def run() -> list[jax.Array]:
        return [jax.device_put(x, to) for _ in range(_COPIES) for x, to in copies]

    size_bytes = copies[0][0].nbytes * _COPIES
    return float(size_bytes / setup.times({"copies": run})["copies"] / 1e9)


def _rings_alone(setup: Setup, size_bytes: int) -> float | None:
    """Returns GB/s of the slowest way to the next rank, nothing else being done."""
    library = _ffi.cuda()
    if library is None:  # CPU devices stand in.
        return None
    gpus = [device.local_hardware_id for device in setup.devices]
    ways = [(a, b, "host") for a, b in zip(gpus, gpus[1:] + gpus[:1], strict=True)]
    slots = library.exchange_slots()
    seconds = library.time_ways(ways, size_bytes, *slots, max(setup.rounds, 1))
    return float(size_bytes / max(seconds) / 1e9)
