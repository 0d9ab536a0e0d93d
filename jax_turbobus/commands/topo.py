"""`python -m jax_turbobus topo [--json] [FILE]`: links, paths, what pools."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from jax_turbobus.topology import Link, Path, Topology, discover, names

__all__ = ["add_arguments", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help=f"a topology file, or one of {', '.join(names())}; "
        f"default: look at this machine",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the topology as a file instead"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status, after printing the topology."""
    remarks: Sequence[str] = ()
    if args.file is None:
        found = discover()
        topology, remarks = found.topology, found.remarks
    else:
        try:
            topology = Topology.load(args.file)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if args.json:
        print(topology.to_json(), end="")
        for remark in remarks:
            print(f"note: {remark}", file=sys.stderr)
    else:
        print(render(topology, remarks))
    return 0


def render(topology: Topology, remarks: Sequence[str] = ()) -> str:
    """Returns what a person wants to see of a topology, as text."""
    parts = [
        topology.name + (f": {topology.description}" if topology.description else "")
    ]
    parts.append(_nodes(topology))
    if topology.links:
        parts.append(_links(topology))
    if len(topology.gpus) > 1:
        parts.append(_pairs(topology))
        parts.append(_groups(topology))
    if topology.gpus:
        parts.append(_pooling(topology))
    if remarks:
        parts.append("\n".join(f"note: {remark}" for remark in remarks))
    return "\n\n".join(parts)


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table: words to the left, figures to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    is_figure = [
        all(line[i][:1].isdigit() or line[i] in ("", "-") for line in lines[1:])
        for i in range(len(head))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if figure else cell.ljust(width)
            for cell, width, figure in zip(line, widths, is_figure, strict=True)
        ).rstrip()
        for line in lines
    )


def _nodes(topology: Topology) -> str:
    rows = [
        [
            gpu.id,
            gpu.name or "-",
            gpu.pci_address or "-",
            topology.numa_nodes[gpu.numa_node].id,
            gpu.uuid or "-",
        ]
        for gpu in topology.gpus
    ]
    memories = ", ".join(
        node.id
        + (f" ({_gb(node.memory_bytes_per_s)} GB/s)" if node.memory_bytes_per_s else "")
        for node in topology.numa_nodes
    )
    gpus = _table(["GPU", "name", "PCI address", "NUMA", "UUID"], rows)
    return f"Host memory: {memories}\n" + (gpus if rows else "GPUs: none")


def _kind(link: Link) -> str:
    """Returns what runs on the link, such as ``PCIe 4.0 x4 of x16``."""

    def of(now: int, most: int, form: str) -> str:
        if not now:
            return ""
        text = form.format(now)
        return text if most <= now else f"{text} of {form.format(most)}"

    words = {"pcie": "PCIe", "nvlink": "NVLink", "upi": "UPI", "c2c": "C2C"}
    generation = "{}.0" if link.type == "pcie" else "{}"
    parts = [
        words[link.type],
        of(link.generation, link.max_generation, generation),
        of(link.width, link.max_width, "x{}"),
    ]
    return " ".join(part for part in parts if part)


def _links(topology: Topology) -> str:
    rows = [
        [
            link.id,
            f"{link.a} - {link.b}",
            _kind(link),
            _gb(link.a_to_b_bytes_per_s),
            _gb(link.b_to_a_bytes_per_s),
            _gb(link.duplex_bytes_per_s) if link.duplex_bytes_per_s else "-",
            link.rate_source,
            "DEGRADED" if link.is_degraded else "",
        ]
        for link in topology.links
    ]
    head = ["link", "between", "kind", "->", "<-", "both", "rates are", ""]
    return "Links (GB/s)\n" + _table(head, rows)


def _pairs(topology: Topology) -> str:
    def cell(src: int, dst: int) -> str:
        if src == dst:
            return "."
        best = topology.peer_paths(src, dst)[0]
        if best.kind == "relay" and best.via is not None:
            way = f"by {topology.gpus[best.via].id}"
        elif best.kind == "host" and best.via is not None:
            way = f"by {topology.numa_nodes[best.via].id}"
        else:
            kinds = {topology.links[link].type for link in best.links}
            way = "nvlink" if kinds == {"nvlink"} else "+".join(sorted(kinds))
        return f"{way} {_gb(best.bandwidth_bytes_per_s)}"

    rows = [
        [src.id, *(cell(src.index, dst.index) for dst in topology.gpus)]
        for src in topology.gpus
    ]
    head = ["from \\ to", *(gpu.id for gpu in topology.gpus)]
    return "Best way from GPU to GPU (GB/s)\n" + _table(head, rows)


def _groups(topology: Topology) -> str:
    rows = [
        [
            group.id,
            ", ".join(topology.gpus[gpu].id for gpu in group.gpus),
            _gb(group.h2d_bytes_per_s),
            _gb(group.d2h_bytes_per_s),
        ]
        for group in topology.link_groups
    ]
    title = "Link groups (GPUs of one group share a slow link; GB/s together)\n"
    return title + _table(["group", "GPUs", "to device", "to host"], rows)


def _pooling(topology: Topology) -> str:
    rows = []
    for gpu in topology.gpus:
        h2d = topology.paths(gpu.index, "h2d")
        d2h = topology.paths(gpu.index, "d2h")
        direct_h2d, pooled_h2d = _alone_and_pooled(topology, gpu.index, h2d)
        direct_d2h, pooled_d2h = _alone_and_pooled(topology, gpu.index, d2h)
        relays = sorted({path.relay for path in (*h2d, *d2h) if path.relay is not None})
        rows.append(
            [
                gpu.id,
                _gb(direct_h2d),
                _gb(pooled_h2d),
                f"{pooled_h2d / direct_h2d:.2f}x",
                _gb(direct_d2h),
                _gb(pooled_d2h),
                f"{pooled_d2h / direct_d2h:.2f}x",
                ", ".join(topology.gpus[relay].id for relay in relays) or "none",
            ]
        )
    head = ["GPU", "to device", "pooled", "", "to host", "pooled", "", "relays"]
    title = "What a GPU reaches while the others are idle (GB/s)\n"
    return title + _table(head, rows)


def _alone_and_pooled(
    topology: Topology, gpu: int, paths: Sequence[Path]
) -> tuple[float, float]:
    direction = paths[0].direction
    direct = topology.native_paths(gpu, direction)[:1]
    alone = float(topology.native.rates(direct)[0])
    return alone, topology.pooled_bandwidth(gpu, direction)
