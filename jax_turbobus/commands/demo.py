"""`python -m jax_turbobus demo`: trains a small mixture of experts on real text."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

import jax

_CPU_DEVICES = 4
_EMULATED_DEVICES = 8  # at most: as many as the topology has GPUs
_MOST_CPU_DEVICES = 8  # a device has at least one of the experts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what to train on, how bytes move, and where the results go."""
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[],
        help="train on these files (default: Python's own standard library)",
    )
    parser.add_argument(
        "--backend",
        choices=("turbobus", "reference"),
        default="turbobus",
        help="move bytes by this library's calls, or by plain JAX",
    )
    parser.add_argument(
        "--emulate",
        metavar="TOPOLOGY",
        help="emulate this topology's links (a name or a file; CPU devices only) and "
        "compare direct with pooled transfers on them",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help=f"how many devices (default: all GPUs, or {_CPU_DEVICES} CPU devices)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="updates to make (default: 600)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("turbobus-demo"),
        help="folder for pictures and trace (default: ./turbobus-demo)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def _make_cpu_devices(count: int) -> None:
    # Has to happen before JAX looks for devices; where GPUs are, it changes nothing.
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    jax.config.update("jax_num_cpu_devices", count)


def run(args: argparse.Namespace) -> int:
    """Trains and reports.

    Returns:
      0; 2 for an option or a text that cannot be used; 130 when interrupted.

    Raises:
      RuntimeError: a step failed.
      BrokenPipeError: nobody reads what is printed.
    """
    missing = [m for m in ("matplotlib", "optax") if not importlib.util.find_spec(m)]
    if missing:
        print(
            f"demo: needs {' and '.join(missing)}; run: "
            "pip install 'jax_turbobus[demo]' (in the source tree: '.[demo]')",
            file=sys.stderr,
        )
        return 2
    from jax_turbobus.demo import options, session

    try:
        wanted = args.devices or (_EMULATED_DEVICES if args.emulate else _CPU_DEVICES)
        # JAX would make any number of them before we could refuse it.
        _make_cpu_devices(min(wanted, _MOST_CPU_DEVICES))
        session.run(options.from_arguments(args))
    except BrokenPipeError:
        raise  # nobody reads any more: `main` ends quietly
    except (ValueError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _stop()
    except RuntimeError as error:
        # XLA's words for an interrupt while it asked us how to split a call.
        if "KeyboardInterrupt" not in str(error):
            raise
        _stop()
    return 0


def _stop() -> NoReturn:
    print("\ndemo: interrupted", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not through the interpreter's end: a compilation that is still running on
    # XLA's own thread would lose its client there, and crash (jax 0.10.2).
    os._exit(130)
