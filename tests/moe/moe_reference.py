"""The dense single-device meaning of an MoE layer, slow and obvious."""

import jax.numpy as jnp
import numpy as np


def moe_layer(tokens, expert_ids, weights, expert_fn, num_experts):
    """Returns ``sum_j weights[t, j] * expert_fn(e, tokens)[t]`` with ``e = ids[t, j]``.

    `expert_fn(e, x)` is expert e's work on rows x. Ids that are no expert's count 0.
    """
    total = 0.0
    for e in range(num_experts):
        chosen = jnp.where(expert_ids == e, weights, 0).sum(-1)
        out = expert_fn(e, tokens)
        named = (expert_ids == e).any(-1)
        total = total + jnp.where(named[:, None], chosen[:, None] * out, 0)
    return total


def dense(tokens, expert_ids, weights, scale):
    """Returns the layer whose expert e scales by ``scale[e]``."""
    return moe_layer(
        tokens, expert_ids, weights, lambda e, x: x * scale[e], scale.shape[0]
    )


def rows_wanted(expert_ids, num_experts):
    """Returns for each expert its (rank, token) pairs in order.

    `expert_ids`: ``int[num_ranks, num_tokens, top_k]``.
    """
    ids = np.asarray(expert_ids)
    return [
        [
            (r, t)
            for r in range(ids.shape[0])
            for t in range(ids.shape[1])
            if (ids[r, t] == e).any()
        ]
        for e in range(num_experts)
    ]


def rows_kept(expert_ids, num_experts, recv_capacity=None, expert_capacity=None):
    """Returns `rows_wanted` without what is dropped: each expert keeps a prefix.

    Under `recv_capacity` rows are taken away one by one, always the last row of the
    rank's fullest expert; of equally full ones, from the one of the highest index.
    """
    kept = rows_wanted(expert_ids, num_experts)
    num_ranks = np.asarray(expert_ids).shape[0]
    num_local = num_experts // num_ranks
    if expert_capacity is not None:
        return [rows[:expert_capacity] for rows in kept]
    if recv_capacity is not None:
        for rank in range(num_ranks):
            local = kept[rank * num_local : (rank + 1) * num_local]
            while sum(map(len, local)) > recv_capacity:
                fullest = max(range(num_local), key=lambda e: (len(local[e]), e))
                local[fullest].pop()
    return kept


def dispatched_rows(tokens, kept, num_ranks, num_rows, expert_capacity=None):
    """Returns ``[num_ranks, num_rows, hidden]`` rows and group sizes of `kept`.

    `tokens`: ``[num_ranks, num_tokens, hidden]``.
    """
    tokens = np.asarray(tokens)
    num_local = len(kept) // num_ranks
    rows = np.zeros((num_ranks, num_rows, tokens.shape[-1]), tokens.dtype)
    sizes = np.zeros((num_ranks, num_local), np.int32)
    for rank in range(num_ranks):
        at = 0
        for e in range(num_local):
            if expert_capacity is not None:
                at = e * expert_capacity
            pairs = kept[rank * num_local + e]
            sizes[rank, e] = len(pairs)
            for source, token in pairs:
                rows[rank, at] = tokens[source, token]
                at += 1
    return rows, sizes
