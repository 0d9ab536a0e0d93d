"""Synthetic routing: which experts tokens choose, from balanced to hopeless."""

import numpy as np
import numpy.typing as npt

from jax_turbobus.bench import _options
from jax_turbobus.moe._counts import ExchangeShape

__all__ = ["check_option", "expert_ids", "popularity"]

_NAMES = ("uniform", "zipf:EXPONENT", "one-hot", "empty-rank")
_MOST_EXPONENT = 100.0


def check_option(route: str) -> None:
    """Refuses what is no routing, as the option ``--route``.

    Raises:
      OptionError: it is none.
    """
    kind, colon, exponent = route.partition(":")
    if kind == "zipf":
        _options.check_number(
            "--route",
            exponent,
            f"zipf:EXPONENT with one from -{_MOST_EXPONENT:g} to {_MOST_EXPONENT:g}",
            least=-_MOST_EXPONENT,
            most=_MOST_EXPONENT,
        )
    elif colon or route not in _NAMES:
        raise _options.OptionError(
            f"--route: expected {', '.join(_NAMES[:-1])} or {_NAMES[-1]}, got {route!r}"
        )


def popularity(
    route: str, shape: ExchangeShape, seed: int = 0
) -> npt.NDArray[np.float64]:
    """Returns how likely each expert is, ``float64[num_experts]``, adding up to 1.

    Args:
      route: ``"uniform"``; ``"zipf:S"``, the i-th most popular expert i**-S as likely
        as the first, experts in random order; ``"one-hot"``, the experts of rank 0
        only; ``"empty-rank"``, all but those of the last rank.
      shape: the exchange's sizes.
      seed: of the random order.

    Raises:
      ValueError: there is no such routing.
    """
    rank = np.arange(shape.num_experts) // shape.num_local_experts
    kind, _, exponent = route.partition(":")
    if kind == "zipf":
        try:
            weight = np.arange(1.0, shape.num_experts + 1) ** -float(exponent)
        except ValueError:
            raise ValueError(
                f"route: expected zipf:EXPONENT such as zipf:1.0, got {route!r}"
            ) from None
        np.random.default_rng(seed).shuffle(weight)
    elif route == "uniform":
        weight = np.ones(shape.num_experts)
    elif route == "one-hot":
        weight = (rank == 0).astype(float)
    elif route == "empty-rank":
        weight = (rank < shape.num_ranks - 1).astype(float)
    else:
        raise ValueError(
            "route: expected uniform, zipf:EXPONENT, one-hot or empty-rank, got"
            f" {route!r}"
        )
    return np.asarray(weight / weight.sum(), np.float64)


def expert_ids(
    route: str, shape: ExchangeShape, seed: int = 0, draw: int = 1
) -> npt.NDArray[np.int32]:
    """Returns ``int32[num_ranks * tokens_per_rank, top_k]``, distinct in a token.

    Every token draws without replacement by `popularity`. Where fewer experts than
    `top_k` have any, the choices left are masked (-1).

    Args:
      route: as for `popularity`.
      shape: the exchange's sizes.
      seed: of the popularity.
      draw: tokens of another draw have the same popularity.
    """
    chance = popularity(route, shape, seed)
    rng = np.random.default_rng([seed, draw])
    num_tokens = shape.num_ranks * shape.tokens_per_rank
    # The largest k of log-chance plus Gumbel noise are k draws without replacement.
    with np.errstate(divide="ignore"):
        score = np.log(chance) + rng.gumbel(size=(num_tokens, shape.num_experts))
    chosen = np.argsort(-score, axis=1)[:, : shape.top_k]
    is_possible = np.isfinite(np.take_along_axis(score, chosen, axis=1))
    return np.where(is_possible, chosen, -1).astype(np.int32)
