"""`python -m jax_turbobus bench`: measures a part against its peers."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from jax_turbobus.bench import _options, _report
from jax_turbobus.commands import _help

# name -> one line of help. A suite's module is imported only when asked for.
SUITES: dict[str, str] = {
    "experts": "expert exchange against what JAX users write today",
    "offload": "host transfers against JAX's own",
    "placement": "experts where links are free, against experts in order (modelled)",
    "ragged": "ragged_all_to_all against JAX's, and against a dense all-to-all",
    "sched": "decisions a second of the scheduler, and what its policy gains",
}


class _SuiteParser(argparse.ArgumentParser):
    """Imports its suite, and takes on the suite's options, once it parses."""

    suite = ""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        module = importlib.import_module(f"jax_turbobus.bench.{self.suite}")
        module.add_arguments(self)
        self.set_defaults(run_suite=module.run)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand a suite."""
    suites = parser.add_subparsers(
        dest="suite", required=True, metavar="suite", parser_class=_SuiteParser
    )
    for name, text in SUITES.items():
        suite = suites.add_parser(
            name, help=text, description=text, formatter_class=_help.Formatter
        )
        suite.suite = name
        suite.add_argument("--json", metavar="FILE", help="write header and rows here")
        suite.add_argument(
            "--no-check",
            action="store_true",
            help="exit with 0 even if a required figure was not reached",
        )


def run(args: argparse.Namespace) -> int:
    """Runs a suite and prints its table.

    Returns:
      1 if a required figure was not reached (and `--no-check` not given), 2 for an
      option that cannot be used, else 0.
    """
    try:
        if args.json:
            _options.check_file("--json", args.json)
        head = _report.header()
        rows: list[_report.Row] = args.run_suite(args)
    except _options.OptionError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(_report.table(rows))
    if args.json:
        try:
            _report.write_json(args.json, rows, head)
        except OSError as error:
            print(f"bench: --json: cannot be written: {error}", file=sys.stderr)
            return 2
        print(f"written to {args.json}")
    failed = [row for row in rows if row.failed]
    if failed:
        print(f"{len(failed)} of {len(rows)} rows below what is required")
    return 1 if failed and not args.no_check else 0
