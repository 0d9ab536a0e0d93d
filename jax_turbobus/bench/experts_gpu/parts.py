"""What a GPU does during our exchange: the share of each step, by the profiler."""

from collections.abc import Iterator

from jax_turbobus.bench import peers, routing
from jax_turbobus.bench._layer import METRICS, Layer, ours
from jax_turbobus.bench._report import Row
from jax_turbobus.bench.experts_gpu._kernels import (
    by_step,
    copy_seconds,
    kernel_seconds,
)
from jax_turbobus.bench.experts_gpu._setup import AXIS, Setup
from jax_turbobus.bench.experts_gpu.layers import SIZES

__all__ = ["parts"]

_SLACK = 1.25


def parts(setup: Setup) -> Iterator[Row]:
    """Yields how long one GPU works at each step of the layers that are compared.

    A step's share is of the time that kernels and copies take, added up: copies run
    beside kernels, and there are gaps between them, so the sum is not the call's time.
    """
    mine = ours()
    for tokens, hidden, num_experts, top_k in SIZES:
        shape = setup.shape(tokens, hidden, num_experts, top_k)
        case = peers.Case.with_slack(shape, _SLACK, axis_name=AXIS)
        ids = routing.expert_ids("uniform", shape)
        layer = Layer.make(case, setup.mesh, ids, 0)
        name = (
            f"{setup.access}: steps of ours, {shape.tokens_per_rank} tokens, hidden"
            f" {shape.hidden}, {num_experts} experts, top-{top_k}"
        )
        for metric in METRICS:
            run = layer.program(metric, mine)
            seconds = kernel_seconds(run)
            total = sum(seconds.values())
            if not total:
                yield Row.make(
                    name, f"{metric}: not measured", 0.0, note="there is no GPU here"
                )
                continue
            yield Row.make(name, f"{metric}: a GPU works, us", total * 1e6)
            copies = copy_seconds(seconds)
            kernels = total - copies - by_step(seconds)["experts"]
            yield Row.make(
                name,
                f"{metric}: the exchange's kernels, us",
                kernels * 1e6,
                note="as long it takes SMs from the experts; copies do not",
            )
            yield Row.make(name, f"{metric}: copies, us", copies * 1e6)
            for step, spent in by_step(seconds).items():
                yield Row.make(
                    name,
                    f"{metric}: {step}, us",
                    spent * 1e6,
                    note=f"{spent / total:.1%} of what the GPU works",
                )
