"""`moe.ragged_all_to_all` against JAX's own, and against a dense all-to-all.

What is timed: programs of several balanced exchanges in a row, each of what the one
before received, with rows of 8 KiB; and the whole layer of `bench experts` (sorting,
two exchanges, a scaling, the weighted sum) over our exchange and over JAX's, in code
that differs in one name: most of such a layer is the same on both sides. A figure is of
one exchange, or of one layer. A program of one exchange says how long the host takes to
start a program: that is there to inform.

XLA has no ragged all-to-all on CPU devices: there our figures stand alone.
"""

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus import moe
from jax_turbobus.bench import _options, peers, routing
from jax_turbobus.bench._devices import bench_devices
from jax_turbobus.bench._experts_race import OURS, Race
from jax_turbobus.bench._layer import Layer
from jax_turbobus.bench._report import Row, alternate
from jax_turbobus.moe._counts import ExchangeShape

__all__ = ["add_arguments", "exchanges", "run"]

Exchange = Callable[..., jax.Array]

_HIDDEN = 4096
_BYTES_OF_ROW = 2 * _HIDDEN  # bfloat16
_MIB = 1 << 20

# Exchanges in a program: so many that its start (0.3 ms on the host) matters little.
_CHAIN = 32
_LARGE_CHAIN = 8
_LARGE_MIB = 128
# JAX's own takes 7 ms for 32 MiB and 0.1 s for 512: fewer of them will do.
_RAGGED_CHAIN = 4
_LARGE_RAGGED_CHAIN = 2
_RAGGED_ROUNDS = 5

# Bounds on ours / theirs, on GPUs.
_OF_RAGGED = "<= 0.02"
_OF_DENSE = f"<= {1 / 1.3:.4g}"

_THEIRS = "lax.ragged_all_to_all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    parser.add_argument(
        "--mib", default="32,512", help="what a rank sends, itself included: MiB"
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="of a rank, in the layer; 0: no layer"
    )
    parser.add_argument("--hidden", type=int, default=4096, help="of a token")
    parser.add_argument("--experts", type=int, default=64, help="experts in all")
    parser.add_argument("--topk", type=int, default=2, help="experts of a token")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each")


def run(args: argparse.Namespace) -> list[Row]:
    """Times all cases.

    Returns:
      Rows of one exchange, and of a layer.

    Raises:
      OptionError: an option that cannot be; the message names it.
    """
    for size in args.mib.split(","):
        _options.check_number(
            "--mib", size, "positive numbers to 1048576", most=1 << 20
        )
    _options.check_whole("--rounds", args.rounds, 1)
    _options.check_whole("--tokens", args.tokens, 0)
    devices = bench_devices()
    mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))
    rows: list[Row] = []
    for size in args.mib.split(","):
        rows += exchanges(mesh, float(size), args.rounds)
    if args.tokens:
        rows += _layers(devices, args)
    return rows


def _is_on_gpus() -> bool:
    return jax.default_backend() != "cpu"


# One exchange.


def _fields(num_ranks: int, each: int) -> list[np.ndarray[Any, Any]]:
    """Returns offsets and sizes, ``int32[num_ranks * num_ranks]`` each."""
    begin = np.broadcast_to(np.arange(num_ranks) * each, (num_ranks, num_ranks))
    size = np.full((num_ranks, num_ranks), each)
    return [np.asarray(f, np.int32).ravel() for f in (begin, size, begin.T, size)]


def _ragged(exchange: Exchange, rows: jax.Array, *fields: jax.Array) -> jax.Array:
    return exchange(rows, jnp.zeros_like(rows), *fields, axis_name="x")


def _dense(rows: jax.Array, *_: jax.Array) -> jax.Array:
    num_ranks = lax.axis_size("x")
    parts = rows.reshape(num_ranks, -1, rows.shape[-1])
    return jnp.reshape(lax.all_to_all(parts, "x", 0, 0), rows.shape)


def _program(
    mesh: Mesh, one: Exchange, chain: int, args: list[jax.Array]
) -> Callable[[], jax.Array]:
    def per_rank(rows: jax.Array, *fields: jax.Array) -> jax.Array:
        for _ in range(chain):
            rows = one(rows, *fields)
        return rows

    run = jax.jit(jax.shard_map(per_rank, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    return lambda: jax.block_until_ready(run(*args))


def exchanges(
    mesh: Mesh, mib: float, rounds: int, *, prefix: str = "", has_peers: bool = True
) -> list[Row]:
    """Returns the times of balanced exchanges.

    Args:
      mesh: the ranks, along ``"x"``.
      mib: what a rank sends, itself included: MiB.
      rounds: measurements of each.
      prefix: of the rows' case.
      has_peers: GPUs reach each other's memory. XLA's ragged exchange always does: it
        is no peer where they do not.

    Raises:
      RuntimeError: ours gives another result than the dense all-to-all.
    """
    num_ranks = mesh.size
    each = max(1, math.ceil(mib * _MIB / _BYTES_OF_ROW / num_ranks))
    num_rows = each * num_ranks
    sharding = NamedSharding(mesh, P("x"))
    rows = jnp.arange(num_ranks * num_rows, dtype=jnp.float32)[:, None]
    rows = (rows % 251 + jnp.arange(_HIDDEN) % 13).astype(jnp.bfloat16)
    args = [jax.device_put(x, sharding) for x in (rows, *_fields(num_ranks, each))]
    program = functools.partial(_program, mesh, args=args)
    ours = functools.partial(_ragged, moe.ragged_all_to_all)
    theirs = functools.partial(_ragged, lax.ragged_all_to_all)
    want = program(_dense, 1)()
    if _share_of_wrong(program(ours, 1)(), want):
        raise RuntimeError("bench ragged: ours differs from the dense all-to-all")

    case = f"{prefix}{num_ranks} x {mib:g} MiB, rows of 8 KiB"
    sent = each * (num_ranks - 1) * _BYTES_OF_ROW
    chain = _CHAIN if mib < _LARGE_MIB else _LARGE_CHAIN
    found = alternate(
        {"ours": program(ours, chain), "dense": program(_dense, chain)},
        rounds=rounds,
    )
    mine, dense = (found[name].median / chain for name in ("ours", "dense"))
    alone = alternate(
        {"ours": program(ours, 1), "dense": program(_dense, 1)}, rounds=rounds
    )
    is_bound = _is_on_gpus() and mib in (32, 512)
    result = [
        Row.make(
            case,
            "one exchange of several, us",
            mine * 1e6,
            peer=dense * 1e6,
            peer_name="lax.all_to_all",
            required=_OF_DENSE if is_bound else None,
        ),
        Row.make(case, "sent by a rank to others, GB/s", sent / mine / 1e9),
        Row.make(
            case,
            "a program of one exchange, us",
            alone["ours"].median * 1e6,
            peer=alone["dense"].median * 1e6,
            peer_name="lax.all_to_all",
        ),
    ]
    if _is_on_gpus() and has_peers:
        share = _share_of_wrong(program(theirs, 1)(), want)
        few = _RAGGED_CHAIN if mib < _LARGE_MIB else _LARGE_RAGGED_CHAIN
        found = alternate(
            {"ours": program(ours, chain), "theirs": program(theirs, few)},
            rounds=min(rounds, _RAGGED_ROUNDS),
        )
        result += [
            Row.make(case, f"{_THEIRS}: share of values that are wrong", share),
            Row.make(
                case,
                "one exchange of several, us",
                found["ours"].median / chain * 1e6,
                peer=found["theirs"].median / few * 1e6,
                peer_name=_THEIRS,
                required=_OF_RAGGED if is_bound else None,
                note=f"{share:.2%} of the peer's values are wrong" if share else None,
            ),
        ]
    return result


def _share_of_wrong(got: jax.Array, want: jax.Array) -> float:
    return float((got != want).mean())


# A layer.


def _layers(devices: list[jax.Device], args: argparse.Namespace) -> list[Row]:
    """Returns the times of `bench experts`' layer over both exchanges.

    Raises:
      OptionError: sizes that do not fit.
    """
    num_ranks = len(devices)
    if args.experts < 1 or args.experts % num_ranks:
        raise _options.OptionError(
            f"--experts: expected a multiple of the {num_ranks} devices, got"
            f" {args.experts}"
        )
    _options.check_whole("--topk", args.topk, 1, args.experts)
    _options.check_whole("--hidden", args.hidden, 1)
    shape = ExchangeShape(
        tokens_per_rank=args.tokens,
        hidden=args.hidden,
        num_experts=args.experts,
        top_k=args.topk,
        num_ranks=num_ranks,
        dtype="bfloat16",
    )
    case = peers.Case.with_slack(shape, 1.25)
    mesh = Mesh(np.array(devices), (case.axis_name,), axis_types=(AxisType.Auto,))
    layer = Layer.make(case, mesh, routing.expert_ids("uniform", shape, seed=0), 0)
    name = (
        f"{num_ranks} x {args.tokens} tokens, hidden {args.hidden} bfloat16,"
        f" {args.experts} experts, top-{args.topk}"
    )
    schemes = {
        OURS: peers.ragged(moe.ragged_all_to_all),
        _THEIRS: peers.ragged_all_to_all,
    }
    # Without theirs where XLA lacks it.
    race = Race(layer, name, schemes, has_backward=True)
    rows = [*race.check()]
    for metric, program in (
        ("forward", Layer.forward),
        ("forward + backward", Layer.forward_backward),
    ):
        programs = {key: program(layer, race.schemes[key]) for key in race.schemes}
        found = alternate(programs, rounds=min(args.rounds, _RAGGED_ROUNDS))
        peer = found[_THEIRS].median * 1e3 if _THEIRS in found else None
        rows.append(
            Row.make(
                name,
                f"layer, {metric}, ms",
                found[OURS].median * 1e3,
                peer=peer,
                peer_name=None if peer is None else _THEIRS,
                note=race.reservation(_THEIRS, metric),
            )
        )
    return rows
