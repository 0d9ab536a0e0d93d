"""One run of the demo, from text to pictures."""

import collections
import dataclasses
import json
import sys
import time
from typing import Any, TextIO

import jax
import numpy as np

from jax_turbobus import moe
from jax_turbobus.demo import (
    backends,
    compare,
    emulate,
    plots,
    report,
    sample,
    text,
    timeline,
)
from jax_turbobus.demo.observe import Recorder
from jax_turbobus.demo.options import (
    Options,
    choose_devices,
    load_emulation,
    make_places,
)
from jax_turbobus.demo.progress import ProgressBar
from jax_turbobus.demo.timeline import Span
from jax_turbobus.demo.traffic import ExchangeBytes
from jax_turbobus.demo.train import Point, Step, Trainer

__all__ = ["run"]


@dataclasses.dataclass(frozen=True)
class _Setup:
    """All that a training needs, made before anything is printed."""

    options: Options
    emulation: emulate.Emulation | None
    corpus: text.Corpus
    devices: list[jax.Device]
    trainer: Trainer

    @property
    def is_on_gpus(self) -> bool:
        return self.devices[0].platform == "gpu"


@dataclasses.dataclass(frozen=True)
class _Training:
    """What a training left behind.

    Attributes:
      steps: in order.
      held_out: losses on text that was not trained on; the first from before it.
      exchanged: what experts' rows moved.
      recorder: what host transfers moved, and when.
    """

    steps: list[Step]
    held_out: list[Point]
    exchanged: ExchangeBytes
    recorder: Recorder

    @property
    def step_seconds(self) -> float:
        """Of the median step."""
        ends = [0.0, *(step.seconds for step in self.steps)]
        return float(np.median(np.diff(ends)))


def run(options: Options, stdout: TextIO = sys.stdout) -> dict[str, Any]:
    """Trains, writes the files, prints the report.

    Args:
      options: the command line's choices.
      stdout: where the report goes; progress goes to stderr.

    Returns:
      The figures that ``--json`` writes.

    Raises:
      ValueError: an option or a text cannot be used; the message names it.
    """
    started = time.perf_counter()

    def say(line: str = "") -> None:
        stdout.write(line + "\n")
        stdout.flush()

    setup = _prepare(options)
    say(_describe(setup.trainer, setup.corpus))
    if setup.emulation is not None:
        say(report.emulation(setup.emulation))
    say()
    training = _train(setup)
    say()
    say(_outcome(options, training))
    say()
    compared = _compare(setup)
    if compared is not None:
        say(report.comparison(compared))
        say()
    if options.sample_bytes:
        say("what it writes")
        for written in sample.write(setup.trainer, options.sample_bytes)[:2]:
            say(report.framed(written))

    files = _draw(options, training, {} if compared is None else compared.panels)
    figures = _figures(setup, training, time.perf_counter() - started)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    say(f"{options.out}/: {', '.join(files)}")
    say(f"{figures['seconds']:.0f} s in all")
    return figures


def _prepare(options: Options) -> _Setup:
    emulation = load_emulation(options)
    corpus = (
        text.load_files(options.text, options.model.context)
        if options.text
        else text.load_standard_library(options.model.context)
    )
    backend = backends.get(options.backend)
    # Device i plays GPU i.
    num_usable = None if emulation is None else len(emulation.topology.gpus)
    devices = choose_devices(options, jax.devices()[:num_usable])
    make_places(options)
    trainer = Trainer(options.model, options.train, backend, corpus, devices)
    return _Setup(options, emulation, corpus, devices, trainer)


def _count(tree: Any) -> int:
    return sum(int(leaf.size) for leaf in jax.tree.leaves(tree))


def _host_bytes(tree: Any) -> int:
    return sum(
        int(leaf.nbytes)
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind == "pinned_host"
    )


def _describe(trainer: Trainer, corpus: text.Corpus) -> str:
    config = trainer.model_config
    device = trainer.mesh.devices.flat[0]
    return "\n".join(
        (
            f"text      {corpus.name}: {corpus.num_files} files, "
            f"{report.size(corpus.train.size)} to train on, "
            f"{report.size(corpus.held_out.size)} held out",
            f"model     {config.num_layers} layers, {config.num_experts} experts "
            f"each, top-{config.top_k}; {_count(trainer.params):,} parameters",
            f"devices   {trainer.mesh.size} x {device.device_kind}, "
            f"{config.num_experts // trainer.mesh.size} experts of a layer on each",
            f"on host   {report.size(_host_bytes(trainer.opt_state))} of Adam's "
            "moments, in and out every step",
            f"backend   {trainer.backend.name}",
        )
    )


def _train(setup: _Setup) -> _Training:
    """Returns what became of the training, run behind a progress bar."""
    options, emulation, trainer = setup.options, setup.emulation, setup.trainer
    recorder = Recorder(
        options.out / "trace.json",
        on_gpus=setup.is_on_gpus,
        **({} if emulation is None else emulation.arguments()),
    )
    exchanged = ExchangeBytes(
        options.model,
        len(setup.devices),
        trainer.backend.peer,
        None if emulation is None else emulation.topology,
    )
    moe.reset_exchange_stats()
    held_out = [Point(0, trainer.held_out_loss())]
    steps: list[Step] = []
    with recorder, ProgressBar(options.train.num_steps, sys.stderr) as bar:
        for step in trainer.run():
            steps.append(step)
            exchanged.add(step)
            if step.held_out is not None:
                held_out.append(Point(step.step, step.held_out))
            bar.update(step.step, _progress(options, steps, held_out[-1]))
    return _Training(steps, held_out, exchanged, recorder)


def _tokens_per_step(options: Options) -> int:
    return options.train.batch * options.model.context


def _progress(options: Options, steps: list[Step], held_out: Point) -> str:
    recent = steps[-50:]
    took = np.diff([one.seconds for one in recent]) if len(recent) > 1 else [1.0]
    return (
        f"loss {steps[-1].loss:.3f}  held out {held_out.loss:.3f} "
        f"(step {held_out.step})  "
        f"{_tokens_per_step(options) / np.median(took):,.0f} tokens/s"
    )


def _outcome(options: Options, training: _Training) -> str:
    """Returns losses, speed, rows that were dropped, and bytes that were moved."""
    steps, held_out = training.steps, training.held_out
    tokens = _tokens_per_step(options)
    choices = len(steps) * tokens * options.model.top_k * options.model.num_layers
    dropped = sum(step.dropped for step in steps)
    moved = report.bytes_moved(
        training.recorder.bytes_by_link, training.exchanged, len(steps)
    )
    return (
        f"held-out loss {held_out[0].loss:.3f} -> {held_out[-1].loss:.3f} nats per "
        f"byte, {tokens / training.step_seconds:,.0f} tokens/s\n"
        f"{dropped / choices:.2%} of the rows found their expert full\n\n{moved}"
    )


def _compare(setup: _Setup) -> compare.Comparison | None:
    """Returns transfers over own and over all links, where there are such links."""
    out = setup.options.out
    if setup.emulation is not None:
        return compare.over_emulated_links(setup.emulation, setup.devices, out)
    pools = setup.options.backend == "turbobus" and jax.local_device_count() > 1
    if setup.is_on_gpus and pools:
        return compare.over_own_links(setup.devices, out)
    return None


def _draw(
    options: Options, training: _Training, pooling: dict[str, list[Span]]
) -> list[str]:
    """Returns the names of the files that are there, having drawn the pictures."""
    title = f"{_tokens_per_step(options)} bytes a step, --backend {options.backend}"
    losses = [Point(step.step, step.loss) for step in training.steps]
    plots.draw_loss(options.out / "loss.png", losses, training.held_out, title)
    files = ["loss.png"]
    recorder = training.recorder
    if recorder.spans:
        newest = timeline.newest(recorder.spans, 3e3 * training.step_seconds)
        panels = {
            "training, the last steps: Adam's moments come and go": newest,
            "one burst of them": timeline.fullest_burst(newest),
        }
        plots.draw_timeline(options.out / "links.png", panels, recorder.links)
        files += ["links.png", "trace.json (open it at ui.perfetto.dev)"]
    if pooling:
        plots.draw_timeline(
            options.out / "pooling.png", pooling, recorder.links, one_scale=True
        )
        files += ["pooling.png"]
    return files


def _figures(setup: _Setup, training: _Training, seconds: float) -> dict[str, Any]:
    options, exchanged = setup.options, training.exchanged
    return {
        "eval_loss_first": training.held_out[0].loss,
        "eval_loss_last": training.held_out[-1].loss,
        "seconds": seconds,
        "tokens_per_s": _tokens_per_step(options) / training.step_seconds,
        "backend": options.backend,
        "devices": len(setup.devices),
        "bytes_by_link": dict(
            collections.Counter(training.recorder.bytes_by_link)
            + collections.Counter(exchanged.by_link)
        ),
        "bytes_by_peer": exchanged.by_peer,
    }
