"""What the demo's command line chose, and what that means on this machine."""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jax_turbobus.bench import _options
from jax_turbobus.demo import emulate
from jax_turbobus.demo.model import ModelConfig
from jax_turbobus.demo.train import TrainConfig

__all__ = [
    "Options",
    "choose_devices",
    "from_arguments",
    "load_emulation",
    "make_places",
]


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


def load_emulation(options: Options) -> emulate.Emulation | None:
    """Returns the links that `--emulate` names; None without it.

    Args:
      options: the command line's choices.

    Raises:
      ValueError: they do not go with another option, or with this machine.
    """
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


def make_places(options: Options) -> None:
    """Makes the places of `--out` and `--json`: what fails fails before the training.

    Args:
      options: the command line's choices.

    Raises:
      ValueError: the system refuses one; the message names the option.
    """
    with _named("--out"):
        options.out.mkdir(parents=True, exist_ok=True)
    if options.json is not None:
        with _named("--json"):
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.touch()


@contextlib.contextmanager
def _named(option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: cannot be made: {error}; give another") from error
