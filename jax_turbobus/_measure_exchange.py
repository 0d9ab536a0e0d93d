"""Measures what exchanges between the GPUs of this machine need to know.

Every GPU sends to one and receives from one at the same time, in as many rounds as it
takes for each to have met each other one. One GPU alone copies to itself, which loads
its link both ways as an exchange does.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax_turbobus._profile_exchange import Exchange, PairRate
from jax_turbobus.moe import _measured, _starts

__all__ = ["measure", "rounds_of", "smallest_good_slots"]

_MIB = 1 << 20
_NUM_SLOTS = (2, 3, 4)
_SLOT_BYTES = tuple(n * _MIB for n in (1, 2, 4, 8))
# What ranks of a few thousand tokens send each other.
_MESSAGE_BYTES = 64 * _MIB
# Peers copy straight: what counts is that a block is not over at once.
_PEER_MESSAGE_BYTES = 256 * _MIB
_PEER_BLOCK_BYTES = 64 * _MIB
_GOOD = 0.98


def smallest_good_slots(rates: dict[tuple[int, int], float]) -> tuple[int, int]:
    """Returns the least memory that reaches 98 % of the best rate.

    Args:
      rates: bytes per second by number and bytes of slots.

    Returns:
      Number and bytes; of several of the same memory the fastest.
    """
    best = max(rates.values())
    good = [slots for slots, rate in rates.items() if rate >= _GOOD * best]
    return min(good, key=lambda slots: (slots[0] * slots[1], -rates[slots]))


def rounds_of(num_gpus: int) -> list[list[tuple[int, int]]]:
    """Returns ways (source, reader) in rounds that each use every GPU both ways.

    Args:
      num_gpus: GPUs; one alone has a round with itself.
    """
    if num_gpus == 1:
        return [[(0, 0)]]
    return [
        [(gpu, (gpu + step) % num_gpus) for gpu in range(num_gpus)]
        for step in range(1, num_gpus)
    ]


def measure(
    library: Any,
    devices: Sequence[Any],
    *,
    repeats: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> Exchange:
    """Returns the figures of exchanges. Takes seconds; needs idle GPUs.

    Args:
      library: the CUDA library.
      devices: JAX's GPUs in this process.
      repeats: the best of so many counts.
      progress: gets a line before each step.

    Raises:
      PoolExhaustedError: there is no room for messages or slots.
    """
    uuids = [one["uuid"] for one in library.gpus()]
    rounds = rounds_of(len(uuids))

    def rates(
        ways: Sequence[tuple[int, int]],
        path: str,
        slots: tuple[int, int],
        size: int = _MESSAGE_BYTES,
    ) -> list[float]:
        named = [(source, reader, path) for source, reader in ways]
        seconds = library.time_ways(named, size, *slots, repeats)
        return [size / spent for spent in seconds]

    progress("slots of exchanges through host memory")
    swept = {
        (number, size): sum(rates(rounds[0], "host", (number, size))) / len(rounds[0])
        for size in _SLOT_BYTES
        for number in _NUM_SLOTS
    }
    slots = smallest_good_slots(swept)
    progress("every pair of GPUs, all sending at once")
    pairs = []
    for ways in rounds:
        found = [("host", ways, rates(ways, "host", slots))]
        peers = [way for way in ways if _reach_each_other(library, *way)]
        if peers:
            block = (1, _PEER_BLOCK_BYTES)
            found.append(
                ("peer", peers, rates(peers, "peer", block, _PEER_MESSAGE_BYTES))
            )
        pairs += [
            PairRate(uuids[source], uuids[reader], path, rate)
            for path, those, carried in found
            for (source, reader), rate in zip(those, carried, strict=True)
        ]
    exchange = Exchange(
        num_slots=slots[0],
        slot_bytes=slots[1],
        pairs=tuple(pairs),
        sweep=tuple(
            {"num_slots": number, "slot_bytes": size, "bytes_per_s": rate}
            for (number, size), rate in swept.items()
        ),
    )
    library.set_measured_slots(*slots)
    progress("what a small exchange takes")
    return _with_starts(exchange, library, devices)


def _with_starts(exchange: Exchange, library: Any, devices: Sequence[Any]) -> Exchange:
    links, why = _measured.links_of(library, exchange, "what was just measured")
    if links is not None and len(devices) != links.num_gpus:
        why = f"JAX uses {len(devices)} of {links.num_gpus} GPUs"
        links = None
    if links is None:
        remark = f"what a small exchange takes was not measured: {why}"
        return dataclasses.replace(exchange, remarks=(remark,))
    remarks: tuple[str, ...] = ()
    if links.has_peer_access:
        remarks = (
            "how exchanges through host memory start was not measured: these GPUs "
            "reach each other's memory",
        )
    try:
        starts = _starts.measure(links, devices)
    except (RuntimeError, ValueError) as error:
        starts = {}
        remarks = (f"what a small exchange takes was not measured: {error}",)
    return dataclasses.replace(exchange, starts=starts, remarks=remarks)


def _reach_each_other(library: Any, a: int, b: int) -> bool:
    return a != b and library.can_access_peer(a, b) and library.can_access_peer(b, a)
