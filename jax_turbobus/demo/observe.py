"""Watches the links while the demo trains."""

import collections
import contextlib
import functools
from pathlib import Path
from typing import Any

from jax_turbobus import _observe, config, gpu
from jax_turbobus.demo import timeline
from jax_turbobus.demo.timeline import Span

__all__ = ["Recorder"]

# Blocks and transfers that the trace keeps, the newest: a few training steps.
_TRACE_EVENTS = 4096


class Recorder:
    """Puts an engine in that records, for the body of a ``with``.

    Attributes:
      path: the trace, written when the body ends; there is none if no block was timed.
      bytes_by_link: bytes that crossed each link and direction.
      spans: the newest blocks, by link.
      links: the links that `spans` may name, in order.
    """

    def __init__(self, path: Path, *, on_gpus: bool = False, **arguments: Any) -> None:
        """Prepares; nothing is recorded yet.

        Args:
          path: where the trace goes.
          on_gpus: whether to watch the engine of this process's GPUs instead, which
            their first use has started.
          **arguments: besides those that record: for `jax_turbobus.configure`, or on
            GPUs for `gpu.configured`.
        """
        self.path = path
        self.bytes_by_link: dict[str, float] = {}
        self.spans: list[Span] = []
        self.links: list[str] = []
        self._on_gpus = on_gpus
        self._before: dict[str, int] = {}
        self._arguments = arguments
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Recorder":
        if not self._on_gpus:
            self._stack.enter_context(
                config.configured(trace=_TRACE_EVENTS, **self._arguments)
            )
            return self
        if (engine := gpu.engine()) is not None:
            self._stack.enter_context(gpu.configured(is_traced=True, **self._arguments))
            engine.trace()  # what was recorded before is not ours
            self._before = _observe.stats_of(engine).bytes_by_link()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self._collect()

    def _collect(self) -> None:
        self.path.unlink(missing_ok=True)
        engine = gpu.engine() if self._on_gpus else config.engine()
        if engine is None:
            return
        seen = _observe.stats_of(engine)
        moved = collections.Counter(seen.bytes_by_link())
        self.bytes_by_link = dict(moved - collections.Counter(self._before))
        if not self.bytes_by_link:
            return
        _observe.write_trace(engine, self.path)
        topology = config.current().topology
        hops_of = timeline.hops_on_gpus
        if self._on_gpus or topology is None:
            self.links = [link.name for link in seen.links]
        else:
            self.links = timeline.link_names(topology)
            hops_of = functools.partial(timeline.hops, topology)
        self.spans = timeline.spans(self.path, seen.lanes, hops_of)
        if not self.spans:  # small copies are on XLA's stream, and not timed
            self.path.unlink()
