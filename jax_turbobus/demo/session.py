"""One run of the demo, from text to pictures."""

import argparse
import collections
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from jax_turbobus import moe
from jax_turbobus.bench import _options
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
from jax_turbobus.demo.model import ModelConfig
from jax_turbobus.demo.observe import Recorder
from jax_turbobus.demo.progress import ProgressBar
from jax_turbobus.demo.timeline import Span
from jax_turbobus.demo.traffic import ExchangeBytes
from jax_turbobus.demo.train import Point, Step, TrainConfig, Trainer

__all__ = ["Options", "choose_devices", "from_arguments", "run"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line chose.

    Attributes:
      backend: a name from `backends.BACKENDS`.
      text: files to train on; the standard library's sources if there are none.
      num_devices: how many to use; None takes as many as the experts allow.
      emulate: name or file of a topology whose links to emulate, or None.
      out: folder for the pictures and the trace.
      json: file for the figures, or None.
      sample_bytes: how much the model writes at the end, a prompt.
      model: sizes of the model.
      train: length and speed of the training.
    """

    backend: str = "turbobus"
    text: tuple[Path, ...] = ()
    num_devices: int | None = None
    emulate: str | None = None
    out: Path = Path("turbobus-demo")
    json: Path | None = None
    sample_bytes: int = 320
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)


def from_arguments(args: argparse.Namespace) -> Options:
    """Returns the options that parsed command-line arguments ask for.

    Args:
      args: see `jax_turbobus.commands.demo`.

    Raises:
      ValueError: an argument is out of range; the message names it.
    """
    train = TrainConfig(seed=args.seed)
    if args.steps is not None:
        if args.steps < 1:
            raise ValueError(f"--steps: expected at least 1, got {args.steps}")
        train = dataclasses.replace(train, num_steps=args.steps)
    if args.seed < 0:
        raise ValueError(f"--seed: expected 0 or more, got {args.seed}")
    if args.devices is not None and args.devices < 1:
        raise ValueError(f"--devices: expected at least 1, got {args.devices}")
    _options.check_folder("--out", args.out)
    if args.json is not None:
        _options.check_file("--json", args.json)
    return Options(
        backend=args.backend,
        text=tuple(args.text),
        num_devices=args.devices,
        emulate=args.emulate,
        out=args.out,
        json=args.json,
        train=train,
    )


def choose_devices(
    options: Options, available: Sequence[jax.Device]
) -> list[jax.Device]:
    """Returns the devices to use: a number that divides experts and batch.

    Args:
      options: the command line's choices.
      available: what JAX found.

    Raises:
      ValueError: `--devices` asks for more than there are, or doesn't divide.
    """
    fits = [
        count
        for count in range(1, len(available) + 1)
        if options.model.num_experts % count == 0 and options.train.batch % count == 0
    ]
    count = options.num_devices
    if count is None:
        count = fits[-1]
    if count not in fits:
        raise ValueError(
            f"--devices: expected one of {', '.join(map(str, fits))} (there are "
            f"{len(available)} devices, and the {options.model.num_experts} experts "
            f"must split evenly), got {count}"
        )
    return list(available[:count])


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

    emulation = _load_emulation(options)
    corpus = (
        text.load_files(options.text, options.model.context)
        if options.text
        else text.load_standard_library(options.model.context)
    )
    backend = backends.get(options.backend)
    devices = choose_devices(options, _usable(emulation))
    # What fails fails now, not after the training.
    with _named("--out"):
        options.out.mkdir(parents=True, exist_ok=True)
    if options.json is not None:
        with _named("--json"):
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.touch()
    trainer = Trainer(options.model, options.train, backend, corpus, devices)
    say(_describe(trainer, corpus))
    if emulation is not None:
        say(report.emulation(emulation))
    say()

    on_gpus = devices[0].platform == "gpu"
    recorder = Recorder(
        options.out / "trace.json",
        on_gpus=on_gpus,
        **({} if emulation is None else emulation.arguments()),
    )
    topology = None if emulation is None else emulation.topology
    exchanged = ExchangeBytes(options.model, len(devices), backend.peer, topology)
    moe.reset_exchange_stats()
    held_out = [Point(0, trainer.held_out_loss())]
    with recorder:
        steps = _train(trainer, exchanged, held_out)
    tokens_per_step = options.train.batch * options.model.context
    step_seconds = np.diff([0.0, *(step.seconds for step in steps)])
    tokens_per_s = tokens_per_step / float(np.median(step_seconds))
    slots = tokens_per_step * options.model.top_k * options.model.num_layers

    say()
    say(
        f"held-out loss {held_out[0].loss:.3f} -> {held_out[-1].loss:.3f} nats per "
        f"byte, {tokens_per_s:,.0f} tokens/s"
    )
    dropped = sum(step.dropped for step in steps)
    say(f"{dropped / (slots * len(steps)):.2%} of the rows found their expert full")
    say()
    say(report.bytes_moved(recorder.bytes_by_link, exchanged, len(steps)))
    say()
    panels: dict[str, list[Span]] = {}
    pooling: dict[str, list[Span]] = {}
    if recorder.spans:
        newest = timeline.newest(recorder.spans, 3e3 * float(np.median(step_seconds)))
        panels["training, the last steps: Adam's moments come and go"] = newest
        panels["one burst of them"] = timeline.fullest_burst(newest)
    compared = None
    if emulation is not None:
        compared = compare.over_emulated_links(emulation, devices, options.out)
    elif on_gpus and options.backend == "turbobus" and jax.local_device_count() > 1:
        compared = compare.over_own_links(devices, options.out)
    if compared is not None:
        say(report.comparison(compared))
        say()
        pooling = compared.panels
    if options.sample_bytes:
        say("what it writes")
        for written in sample.write(trainer, options.sample_bytes)[:2]:
            say(report.framed(written))

    files = _draw(options, steps, held_out, recorder.links, panels, pooling)
    figures = {
        "eval_loss_first": held_out[0].loss,
        "eval_loss_last": held_out[-1].loss,
        "seconds": time.perf_counter() - started,
        "tokens_per_s": tokens_per_s,
        "backend": options.backend,
        "devices": len(devices),
        "bytes_by_link": dict(
            collections.Counter(recorder.bytes_by_link)
            + collections.Counter(exchanged.by_link)
        ),
        "bytes_by_peer": exchanged.by_peer,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    say(f"{options.out}/: {', '.join(files)}")
    say(f"{figures['seconds']:.0f} s in all")
    return figures


@contextlib.contextmanager
def _named(option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: cannot be made: {error}; give another") from error


def _load_emulation(options: Options) -> emulate.Emulation | None:
    if options.emulate is None:
        return None
    if options.backend != "turbobus":
        raise ValueError(
            f"--emulate: expected --backend turbobus, got {options.backend}, whose "
            "transfers are XLA's own"
        )
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"--emulate: expected CPU devices, got {jax.default_backend()}; run with "
            "JAX_PLATFORMS=cpu in the environment"
        )
    return emulate.Emulation.load(options.emulate)


def _usable(emulation: emulate.Emulation | None) -> list[jax.Device]:
    # Device i plays GPU i.
    return jax.devices()[: None if emulation is None else len(emulation.topology.gpus)]


def _train(
    trainer: Trainer, exchanged: ExchangeBytes, held_out: list[Point]
) -> list[Step]:
    """Returns all steps, run behind a progress bar; adds to what it is given."""
    config = trainer.config
    tokens_per_step = config.batch * trainer.model_config.context
    steps: list[Step] = []
    with ProgressBar(config.num_steps, sys.stderr) as bar:
        for step in trainer.run():
            steps.append(step)
            exchanged.add(step)
            if step.held_out is not None:
                held_out.append(Point(step.step, step.held_out))
            recent = steps[-50:]
            took = np.diff([one.seconds for one in recent]) if step.step > 1 else [1.0]
            bar.update(
                step.step,
                f"loss {step.loss:.3f}  held out {held_out[-1].loss:.3f} "
                f"(step {held_out[-1].step})  "
                f"{tokens_per_step / np.median(took):,.0f} tokens/s",
            )
    return steps


def _draw(
    options: Options,
    steps: Sequence[Step],
    held_out: Sequence[Point],
    links: Sequence[str],
    training: Mapping[str, Sequence[Span]],
    pooling: Mapping[str, Sequence[Span]],
) -> list[str]:
    """Returns the names of the files that are there, having drawn the pictures."""
    title = f"{options.train.batch * options.model.context} bytes a step, "
    title += f"--backend {options.backend}"
    losses = [Point(step.step, step.loss) for step in steps]
    plots.draw_loss(options.out / "loss.png", losses, held_out, title)
    files = ["loss.png"]
    if training:
        plots.draw_timeline(options.out / "links.png", training, links)
        files += ["links.png", "trace.json (open it at ui.perfetto.dev)"]
    if pooling:
        plots.draw_timeline(options.out / "pooling.png", pooling, links, one_scale=True)
        files += ["pooling.png"]
    return files
