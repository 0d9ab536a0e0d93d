"""How flows share links: max-min fairness by progressive filling."""

from collections.abc import Sequence

__all__ = ["max_min_rates"]


def max_min_rates(
    uses: Sequence[Sequence[int]], capacities: Sequence[float]
) -> list[float]:
    """Returns what each flow carries if all rise together until something is full.

    Flows through a full resource stop there; the others go on rising.

    Args:
      uses: for each flow, the resources that it draws on (indices into
        `capacities`); one that is named twice is used twice.
      capacities: bytes per second of each resource.

    Raises:
      ValueError: a flow uses nothing, so nothing would stop it.
    """
    rates = [0.0] * len(uses)
    weights: dict[int, int] = {}
    for flow, resources in enumerate(uses):
        if not resources:
            raise ValueError(f"uses[{flow}]: expected at least one resource, got none")
        for resource in resources:
            weights[resource] = weights.get(resource, 0) + 1
    left = {resource: capacities[resource] for resource in weights}
    rising = set(range(len(uses)))
    while rising:
        step = min(left[r] / w for r, w in weights.items() if w)
        full = {r for r, w in weights.items() if w and left[r] / w <= step * (1 + 1e-9)}
        for resource, weight in weights.items():
            left[resource] -= step * weight
        for flow in list(rising):
            rates[flow] += step
            if full.intersection(uses[flow]):
                rising.remove(flow)
                for resource in uses[flow]:
                    weights[resource] -= 1
    return rates
