"""What a scheduling decision costs, and what the policy gains."""

import argparse
import time

from jax_turbobus import _ffi, sim
from jax_turbobus.bench import _options
from jax_turbobus.bench._report import Row
from jax_turbobus.topology import Topology

__all__ = ["add_arguments", "run"]

_BLOCK_BYTES = 16 << 20
# (case, GPUs with transfers, blocks a transfer, transfers at once)
_CASES = (
    ("8 GPUs all busy, transfers of 64 blocks", 8, 64, 32),
    ("2 GPUs busy over 8 links, long transfers", 2, 4096, 8),
    ("4 GPUs busy over 8 links, 8 blocks each", 4, 8, 32),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    parser.add_argument(
        "--blocks", type=int, default=400_000, help="decisions a measurement"
    )


def run(args: argparse.Namespace) -> list[Row]:
    """Returns decisions per second of one core, and simulated speed-ups."""
    _options.check_whole("--blocks", args.blocks, 1, 1 << 30)
    rows = [
        Row.make(
            case,
            "block decisions per second of CPU time",
            _decisions_per_s(num_gpus, num_blocks, num_concurrent, args.blocks),
            required=">= 1e6",
        )
        for case, num_gpus, num_blocks, num_concurrent in _CASES
    ]
    transfer = [sim.Transfer(gpu=0, size_bytes=4 << 30)]
    for name in ("2xh200", "rtx3090-pairs", "dgx-v100", "8xh800"):
        topology = Topology.load(name)
        rows.append(
            Row.make(
                f"{name}: 4 GiB to GPU 0, others idle (simulated)",
                "seconds",
                sim.simulate(topology, transfer).makespan_ns * 1e-9,
                peer=sim.simulate(topology, transfer, "direct").makespan_ns * 1e-9,
                peer_name="direct",
                required="<= 0.52",
            )
        )
    return rows


def _decisions_per_s(
    num_gpus: int, num_blocks: int, num_concurrent: int, total: int
) -> float:
    """Returns the best of three: other work on the machine only makes it slower."""
    core = _ffi.core()
    directions = (core.Direction.H2D, core.Direction.D2H)
    config = core.SchedConfig()
    config.lanes = [
        core.LaneSpec(
            path=core.Path(
                gpu=gpu,
                relay=-1 if link == gpu else link,
                direction=direction,
                bandwidth_bytes_per_s=55e9,
            )
        )
        for direction in directions
        for gpu in range(8)
        for link in range(8)
    ]
    transfers = [
        (i % num_gpus, directions[i // num_gpus % 2], num_blocks * _BLOCK_BYTES)
        for i in range(max(total // num_blocks, num_concurrent))
    ]
    rates: list[float] = []
    for _ in range(3):
        start = time.process_time()
        count, _ = core.replay(config, transfers, num_concurrent)
        rates.append(float(count) / (time.process_time() - start))
    return max(rates)
