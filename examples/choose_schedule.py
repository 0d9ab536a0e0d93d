"""Reads a machine's topology and asks which way the experts' tokens should take.

A schedule is chosen before anything runs, from the sizes of the exchange and the links
under it. The same layer takes another way on another machine, or with another top-k.
Run: python examples/choose_schedule.py [NAME or FILE of a topology]
"""

import sys

from jax_turbobus import moe
from jax_turbobus.topology import Topology, names


def main(name="4xrtx4090", hidden=2048, num_experts=64):
    topology = Topology.load(name)
    num_ranks = len(topology.gpus)
    print(f"{topology.name}: {topology.description}")
    if num_ranks < 2:
        print(
            f"  {num_ranks} GPUs: nothing to exchange; try one of {', '.join(names())}"
        )
        return {}
    for a in topology.gpus[:1]:
        for b in topology.gpus[1:]:
            way = topology.peer_paths(a.index, b.index)[0]
            rate = way.bandwidth_bytes_per_s / 1e9
            print(f"  {a.id} to {b.id}: {way.kind}, {rate:.4g} GB/s")

    choices = {}
    for tokens, top_k in ((4096, 2), (4096, 8), (32, 2)):
        choice = moe.choose_schedule(
            tokens_per_rank=tokens,
            hidden=hidden,
            num_experts=num_experts,
            top_k=top_k,
            num_ranks=num_ranks,
            topology=topology,
        )
        choices[tokens, top_k] = choice
        print(f"\n{tokens} tokens a rank, top-{top_k} of {num_experts} experts")
        print(choice.explain())
        # What to pass on: moe.dispatch(..., schedule=choice.schedule)
    return choices


if __name__ == "__main__":
    main(*sys.argv[1:])
