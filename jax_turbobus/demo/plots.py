"""Draws the demo's pictures: how the loss fell, and when each link was busy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_turbobus.demo.timeline import Span
from jax_turbobus.demo.train import Point

__all__ = ["draw_loss", "draw_timeline"]

_COLOURS = (
    "#2a6fbb",
    "#e07a1f",
    "#3a9a5b",
    "#b5446e",
    "#7a5bb0",
    "#4fb3bf",
    "#8a6d3b",
    "#7f7f7f",
)


def _new_figure(width: float, height: float) -> Any:
    # The object interface: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_loss(
    path: Path, train: Sequence[Point], held_out: Sequence[Point], title: str
) -> None:
    """Writes a PNG with the loss of every batch, its mean, and the held-out loss.

    Args:
      path: the file to write.
      train: loss of each batch.
      held_out: loss on text never trained on.
      title: above the picture.
    """
    figure = _new_figure(8, 4.5)
    axes = figure.subplots()
    steps = [point.step for point in train]
    losses = np.array([point.loss for point in train])
    axes.plot(steps, losses, color=_COLOURS[0], alpha=0.3, linewidth=0.8)
    width = max(1, len(losses) // 25)
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(ends - width, 0)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    mean = (sums[ends] - sums[starts]) / (ends - starts)
    label = f"training, mean of {width} batches"
    axes.plot(steps, mean, color=_COLOURS[0], label=label)
    axes.plot(
        [point.step for point in held_out],
        [point.loss for point in held_out],
        "o-",
        color=_COLOURS[1],
        label="held-out files",
    )
    last = held_out[-1]
    axes.annotate(
        f"{last.loss:.2f}",
        (last.step, last.loss),
        textcoords="offset points",
        xytext=(0, 9),
        ha="center",
        color=_COLOURS[1],
    )
    axes.axhline(np.log(256), color="#999999", linewidth=0.8, linestyle=":")
    axes.annotate(
        "knowing nothing: ln 256",
        (1, np.log(256)),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(-4, -11),
        ha="right",
        fontsize="small",
        color="#777777",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="lower left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_timeline(
    path: Path,
    panels: Mapping[str, Sequence[Span]],
    links: Sequence[str],
    *,
    one_scale: bool = False,
) -> None:
    """Writes a PNG of when each link was busy, and with which device's bytes.

    Args:
      path: the file to write.
      panels: what each panel shows, by its title; one above the other.
      links: those that may be shown, in order; a row is drawn for each one used.
      one_scale: whether a millisecond is as wide in all panels.
    """
    used = {span.link for found in panels.values() for span in found}
    links = [link for link in links if link in used]
    height = 0.9 + 0.24 * len(links)
    figure = _new_figure(10, 0.5 + height * len(panels))
    all_axes = figure.subplots(len(panels), 1, sharex=one_scale, squeeze=False)[:, 0]
    ends = {
        title: max(span.start_ms + span.duration_ms for span in found)
        for title, found in panels.items()
    }
    gpus = sorted({span.gpu for found in panels.values() for span in found})
    for axes, (title, found) in zip(all_axes, panels.items(), strict=True):
        axes.set_xlim(0, 1.01 * (max(ends.values()) if one_scale else ends[title]))
        for gpu in gpus:
            for is_relayed in (False, True):
                _draw_spans(axes, found, links, gpu, is_relayed)
        axes.set_yticks(range(len(links)), links, fontsize="x-small")
        axes.set_ylim(len(links) - 0.4, -0.6)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    all_axes[-1].set_xlabel("milliseconds")
    entries = {
        label: handle
        for axes in all_axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside right upper",
        frameon=False,
        fontsize="small",
    )
    figure.savefig(path)


def _draw_spans(
    axes: Any, found: Sequence[Span], links: Sequence[str], gpu: int, is_relayed: bool
) -> None:
    """Draws the blocks of one device, direct or relayed."""
    colour = _COLOURS[gpu % len(_COLOURS)]
    # Gaps between blocks, where blocks are wide enough to have some.
    shortest = np.median([span.duration_ms for span in found])
    is_fine = shortest < 0.004 * axes.get_xlim()[1]
    label = f"device {gpu}" + (", relayed" if is_relayed else "")
    for row, link in enumerate(links):
        bars = [
            (span.start_ms, span.duration_ms)
            for span in found
            if (span.link, span.gpu, span.is_relayed) == (link, gpu, is_relayed)
        ]
        if bars:
            axes.broken_barh(
                bars,
                (row - 0.4, 0.8),
                facecolors=colour,
                alpha=0.55 if is_relayed else 1.0,
                hatch="////" if is_relayed else None,
                edgecolor=colour if is_fine else "white",
                linewidth=1.0 if is_fine else 0.3,
                label=label,
            )
