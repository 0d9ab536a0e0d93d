"""What exchanges have moved between ranks."""

import dataclasses
from types import ModuleType

import numpy as np
import numpy.typing as npt

from jax_turbobus import _ffi

__all__ = ["ExchangeStats", "exchange_stats", "reset_exchange_stats"]


@dataclasses.dataclass(frozen=True)
class ExchangeStats:
    """One kind of exchange, since the process began or the last reset.

    Attributes:
      op: ``"dispatch"``, ``"combine"``, ``"dispatch_grad"`` or ``"combine_grad"``.
      schedule: the schedule that ran. On GPUs not always the one that was asked for:
        ``"direct"`` between GPUs that reach each other's memory; else ``"broadcast"``
        is a dispatch of more than a small batch, and the rest is ``"packed"``.
      path: what the bytes went by: ``"memory"``, of the process, on CPU devices;
        between GPUs ``"peer"`` (the other's memory), ``"mail"`` and ``"host"``
        (pinned host memory, of small batches and of others) or ``"relay"`` (a third
        GPU's memory). A call that takes several paths is an entry of each.
      num_ranks: ranks of each call.
      num_calls: calls of all ranks together count as one, and so do those that
        ``vmap`` makes of one.
      pair_bytes: ``int64[num_ranks, num_ranks]`` (from, to): what the schedule puts on
        links, rows and gradients of weights; 0 within a rank. CPU devices share one
        memory, where each row is moved once, straight to its place, under every
        schedule.
    """

    op: str
    schedule: str
    path: str
    num_ranks: int
    num_calls: int
    pair_bytes: npt.NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Bytes that crossed from one rank to another."""
        return int(self.pair_bytes.sum())


def exchange_stats() -> list[ExchangeStats]:
    """Returns what exchanges that are complete have moved, one entry for each kind.

    Of ranks in one process: exchanges between several are XLA's and not counted. Waits
    until the GPUs have done what they were given.

    Raises:
      TurboBusError: a GPU has failed.
    """
    kinds = [kind for library in _libraries() for kind in library.exchange_traffic()]
    return [
        ExchangeStats(
            op=kind["op"],
            schedule=kind["schedule"],
            path=kind["path"],
            num_ranks=kind["num_ranks"],
            num_calls=kind["num_calls"],
            pair_bytes=np.array(kind["bytes"], np.int64),
        )
        for kind in kinds
    ]


def reset_exchange_stats() -> None:
    """Starts the counts of `exchange_stats` again from zero.

    Waits until the GPUs have done what they were given.
    """
    for library in _libraries():
        library.reset_exchange_traffic()


def _libraries() -> list[ModuleType]:
    return [_ffi.core(), *_ffi.loaded_cuda()]
