"""`python -m jax_turbobus <command>`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from jax_turbobus.commands import COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      The exit status: 0 if the command did what it was asked to.
    """
    parser = argparse.ArgumentParser(prog="python -m jax_turbobus")
    argv = list(sys.argv[1:] if argv is None else argv)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module_name, text) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text)
        if argv[:1] == [name]:
            module = importlib.import_module(f"jax_turbobus.commands.{module_name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
