"""`python -m jax_turbobus profile`: measures the links of this machine's GPUs."""

import argparse
import dataclasses
import json
import sys

from jax_turbobus import profile
from jax_turbobus.bench import _options

__all__ = ["add_arguments", "run"]

_MOST_MIB = 1 << 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.add_argument(
        "--output", metavar="FILE", help="where to keep it (default: where it is found)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="measure and print, keep nothing"
    )
    parser.add_argument(
        "--size-mib", type=int, default=256, help="size of each transfer in MiB"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 where nothing can be measured, kept or made of an option."""
    try:
        # Before minutes of measuring, not after.
        _options.check_whole("--size-mib", args.size_mib, 1, _MOST_MIB)
        if args.output is not None and not args.dry_run:
            _options.check_file("--output", args.output)
    except _options.OptionError as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    try:
        found = profile.measure(
            size_bytes=args.size_mib << 20,
            progress=lambda step: None if args.json else print(f"measuring {step} …"),
        )
    except ValueError as error:
        print(error)
        return 2
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        _show(found)
    if not args.dry_run:
        try:
            path = profile.keep(found, args.output)
        except OSError as error:
            print(
                f"profile: cannot be kept: {error}; give --output a file that can be "
                "written, and name it in JAX_TURBOBUS_PROFILE to have it used",
                file=sys.stderr,
            )
            return 2
        if not args.json:
            print(f"kept in {path}; the next process uses it")
    return 0


def _show(found: profile.Profile) -> None:
    number = {uuid: i for i, uuid in enumerate(found.gpus)}
    for path in found.paths:
        via = "" if path.relay is None else f" via gpu{number[path.relay]}"
        print(
            f"  gpu{number[path.gpu]} {path.direction}{via:10} "
            f"{path.bytes_per_s / 1e9:7.1f} GB/s"
        )
    for group in found.groups:
        print(f"  one link upstream: {', '.join(f'gpu{number[u]}' for u in group)}")
    for row in found.sweep:
        if "block_bytes" in row:
            print(
                f"  {row['path']:11} blocks of {row['block_bytes'] >> 20:3} MiB, "
                f"yield {row['yield']:6} "
                f"{row['bytes_per_s'] / 1e9:7.1f} GB/s"
            )
        else:
            rate = row["h2d_and_d2h_bytes_per_s"] / 1e9
            print(f"  gpu{row['gpu']} both directions at once {rate:7.1f} GB/s")
    print(f"  blocks of {found.block_bytes >> 20} MiB, yield by {found.yield_kind}")
    if found.exchange is None:
        print(f"  exchanges were not measured: {found.why_no_exchange}")
    else:
        _show_exchange(found.exchange, number)


def _show_exchange(exchange: profile.Exchange, number: dict[str, int]) -> None:
    for row in exchange.sweep:
        print(
            f"  exchange by {row['num_slots']} slots of {row['slot_bytes'] / 2**20:g}"
            f" MiB {row['bytes_per_s'] / 1e9:7.1f} GB/s each way"
        )
    names = {"peer": "into its memory", "host": "through host memory"}
    for pair in exchange.pairs:
        print(
            f"  gpu{number[pair.source]} to gpu{number[pair.reader]}, all at once, "
            f"{names[pair.path]} {pair.bytes_per_s / 1e9:7.1f} GB/s"
        )
    for name, seconds in exchange.starts.items():
        print(f"  an exchange ({name}) takes {seconds * 1e6:.0f} us beside its bytes")
    for remark in exchange.remarks:
        print(f"  {remark}")
    mib = exchange.slot_bytes / 2**20
    print(f"  rings of {exchange.num_slots} slots of {mib:g} MiB")
