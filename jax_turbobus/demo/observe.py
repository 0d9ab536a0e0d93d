"""Watches the links while the demo trains."""

import contextlib
from pathlib import Path
from typing import Any

from jax_turbobus import config
from jax_turbobus._observe import stats, trace
from jax_turbobus.demo import timeline
from jax_turbobus.demo.timeline import Span

__all__ = ["Recorder"]

# Blocks and transfers that the trace keeps, the newest: a few training steps.
_TRACE_EVENTS = 4096


class Recorder:
    """Puts an engine in that records, for the body of a ``with``.

    Attributes:
      path: the trace, written when the body ends; there is none if nothing moved.
      bytes_by_link: bytes that crossed each link and direction.
      spans: the newest blocks, by link.
      links: the links that `spans` may name, in order.
    """

    def __init__(self, path: Path, **arguments: Any) -> None:
        """Prepares; nothing is recorded yet.

        Args:
          path: where the trace goes.
          **arguments: for `jax_turbobus.configure`, besides ``trace``.
        """
        self.path = path
        self.bytes_by_link: dict[str, float] = {}
        self.spans: list[Span] = []
        self.links: list[str] = []
        self._arguments = {"trace": _TRACE_EVENTS, **arguments}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Recorder":
        self._stack.enter_context(config.configured(**self._arguments))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self._collect()

    def _collect(self) -> None:
        seen = stats()
        topology = config.current().topology
        self.bytes_by_link = dict(seen.bytes_by_link())
        self.path.unlink(missing_ok=True)
        if topology is None or not self.bytes_by_link:
            return
        trace(self.path)
        self.links = timeline.link_names(topology)
        self.spans = timeline.spans(self.path, topology, seen.lanes)
