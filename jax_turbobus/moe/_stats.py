"""What exchanges have moved between ranks."""

import dataclasses

import numpy as np
import numpy.typing as npt

from jax_turbobus import _ffi

__all__ = ["ExchangeStats", "exchange_stats", "reset_exchange_stats"]


@dataclasses.dataclass(frozen=True)
class ExchangeStats:
    """One kind of exchange, since the process began or the last reset.

    Attributes:
      op: ``"dispatch"``, ``"combine"``, ``"dispatch_grad"`` or ``"combine_grad"``.
      schedule: the schedule that ran.
      num_ranks: ranks of each call.
      num_calls: calls of all ranks together count as one.
      pair_bytes: ``int64[num_ranks, num_ranks]`` (from, to): what the schedule puts on
        links, rows and gradients of weights; 0 within a rank. CPU devices share one
        memory, where each row is moved once, straight to its place, under every
        schedule.
    """

    op: str
    schedule: str
    num_ranks: int
    num_calls: int
    pair_bytes: npt.NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Bytes that crossed from one rank to another."""
        return int(self.pair_bytes.sum())


def exchange_stats() -> list[ExchangeStats]:
    """Returns what exchanges that are complete have moved, one entry for each kind.

    Of ranks on CPU devices of one process: exchanges on GPUs, and those of several
    processes, are not counted.
    """
    return [
        ExchangeStats(
            op=kind["op"],
            schedule=kind["schedule"],
            num_ranks=kind["num_ranks"],
            num_calls=kind["num_calls"],
            pair_bytes=np.array(kind["bytes"], np.int64),
        )
        for kind in _ffi.core().exchange_traffic()
    ]


def reset_exchange_stats() -> None:
    """Starts the counts of `exchange_stats` again from zero."""
    _ffi.core().reset_exchange_traffic()
