"""`python -m jax_turbobus volume`: bytes of an expert exchange, before it runs."""

import argparse
import json

from jax_turbobus.moe import _choice, _volume
from jax_turbobus.topology import Topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the exchange's sizes."""
    parser.add_argument(
        "--tokens", type=int, default=4096, help="in all, or on a rank with --per-rank"
    )
    parser.add_argument("--per-rank", action="store_true", help="--tokens is a rank's")
    parser.add_argument("--hidden", type=int, default=1024, help="elements of a row")
    parser.add_argument("--experts", type=int, default=32, help="experts in all")
    parser.add_argument("--topk", type=int, default=2, help="experts of a token")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share experts")
    parser.add_argument("--dtype", default="bfloat16", help="of a row")
    parser.add_argument(
        "--capacity-factor",
        type=float,
        default=1.25,
        help="of the peers that drop rows over a capacity",
    )
    parser.add_argument(
        "--topology",
        metavar="NAME_OR_FILE",
        help="count on the links of this machine (`topo` lists those that are shipped)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the volumes.

    Returns:
      0, or 2 if the sizes do not fit each other.
    """
    if args.ranks > 0 and args.tokens % args.ranks and not args.per_rank:
        print(
            f"volume: --tokens: expected a multiple of --ranks {args.ranks}, got"
            f" {args.tokens}; or give a rank's tokens with --per-rank"
        )
        return 2
    sizes = {
        "tokens_per_rank": args.tokens // (1 if args.per_rank else max(1, args.ranks)),
        "hidden": args.hidden,
        "num_experts": args.experts,
        "top_k": args.topk,
        "num_ranks": args.ranks,
        "dtype": args.dtype,
    }
    try:
        topology = Topology.load(args.topology) if args.topology else None
        result = _volume.volume(
            **sizes, topology=topology, capacity_factor=args.capacity_factor
        )
        choice = _choice.choose_schedule(**sizes, topology=topology)
    except (ValueError, TypeError) as error:
        print(f"volume: {error}")
        return 2
    if args.json:
        print(json.dumps(result.to_json() | {"choice": choice.to_json()}, indent=1))
    else:
        print(result.table(), choice.explain(), sep="\n\n")
    return 0
