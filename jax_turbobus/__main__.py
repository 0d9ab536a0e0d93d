"""`python -m jax_turbobus <command>`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import jax_turbobus
from jax_turbobus.commands import COMMANDS, _help

_SIGPIPE_STATUS = 141  # 128 + SIGPIPE, as a shell says


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      The exit status: 0 if the command did what it was asked to.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jax_turbobus",
        description="`python -m jax_turbobus COMMAND --help` tells about a command.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"jax_turbobus {jax_turbobus.__version__}",
    )
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        argv = ["--help"]
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module_name, text) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=text, description=text, formatter_class=_help.Formatter
        )
        if argv[:1] == [name]:
            module = importlib.import_module(f"jax_turbobus.commands.{module_name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads us (`head`, a pager) has seen enough. Python would flush once
        # more when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE_STATUS
    return status


if __name__ == "__main__":
    sys.exit(main())
