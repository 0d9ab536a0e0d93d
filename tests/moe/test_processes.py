"""Ranks in two processes: XLA's own collectives, the same results, and a reason."""

import pytest
from two_processes import run_in_two

RAGGED = """
rows, hidden = 8, 200

def per_rank(x):
    x = x[0]
    me = jax.lax.axis_index("x")
    sizes = jnp.arange(4) % 3            # what rank r sends to each: 0, 1, 2, 0
    begin = jnp.cumsum(sizes) - sizes
    received = jnp.full(4, me % 3)
    there = jnp.repeat(me * 2, 4)

    def f(x):
        out = jnp.full((rows, hidden), -1.0)
        return moe.ragged_all_to_all(
            x, out, begin, sizes, there, received, axis_name="x")

    y, pull = jax.vjp(f, x)
    return y[None], pull(y)[0][None]

spec = P("x")
values = np.arange(4 * rows * hidden, dtype=np.float32).reshape(4, rows, hidden)
layer = jax.shard_map(per_rank, mesh=mesh, in_specs=spec, out_specs=spec)
y, dx = jax.jit(layer)(spread(values))

want, want_dx = np.full_like(values, -1.0), np.zeros_like(values)
begin = [0, 0, 1, 3]
for source in range(4):
    for to in range(4):
        for i in range(to % 3):
            want[to, 2 * source + i] = values[source, begin[to] + i]
            want_dx[source, begin[to] + i] = values[source, begin[to] + i]
check(y, want)
check(dx, want_dx)
"""

# An MoE layer with its gradients, over all four devices and over the two of each
# process, where our own exchange can run.
EXCHANGE = """
T, K, E, H = 10, 2, 8, 200
rng = np.random.default_rng(0)
tokens = rng.integers(-3, 4, (4 * T, H)).astype(np.float32)
ids = rng.integers(-1, E + 1, (4 * T, K)).astype(np.int32)
weights = rng.integers(-2, 3, (4 * T, K)).astype(np.float32)
scale = rng.integers(-2, 3, (E, H)).astype(np.float32)

def layer(axis):
    def run(tokens, ids, weights, scale):
        def experts(rows, group_sizes):
            ends = jnp.cumsum(group_sizes)
            expert = (jnp.arange(len(rows))[:, None] >= ends).sum(-1)
            return rows * scale.at[expert].get(mode="fill", fill_value=0)
        return moe.expert_parallel(
            experts, tokens, ids, weights, num_experts=E, axis_name=axis, num_chunks=2)
    return run

def everywhere(tokens, weights, scale):
    total = 0
    for e in range(E):
        w = jnp.where(ids == e, weights, 0).sum(-1, keepdims=True)
        total += w * tokens * scale[e]
    return total

def loss(f):
    def run(*args):
        y = f(*args)
        return (y * y).sum(), y
    return run

want = jax.value_and_grad(loss(everywhere), (0, 1, 2), has_aux=True)(
    tokens, weights, scale)
want = jax.tree.map(np.asarray, want)

def compare(mesh, axis, data, expert):
    mapped = jax.shard_map(
        layer(axis), mesh=mesh, in_specs=(data, data, data, expert), out_specs=data)
    placed = [spread(x, mesh, data) for x in (tokens, ids, weights)]
    placed.append(spread(scale, mesh, expert))
    x, i, w, s = placed
    (value, y), grads = jax.jit(jax.value_and_grad(
        loss(lambda x, w, s, i: mapped(x, i, w, s)), (0, 1, 2), has_aux=True))(
            x, w, s, i)
    assert float(value) == float(want[0][0])
    check(y, want[0][1])
    for got, expected in zip(grads, want[1]):
        check(got, expected)

compare(mesh, "x", P("x"), P("x"))
print("over both", file=sys.stderr)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "expert"))
compare(mesh, "expert", P(("data", "expert")), P("expert"))
"""


@pytest.mark.slow
def test_ragged_all_to_all():
    for err in run_in_two(RAGGED):
        assert "ragged_all_to_all: plain JAX collectives: 2 processes" in err


@pytest.mark.slow
def test_exchanges():
    for err in run_in_two(EXCHANGE):
        over_both, inside_each = err.split("over both")
        for name in ("dispatch", "combine", "dispatch_grad", "combine_grad"):
            reason = f"{name} over 'x': plain JAX collectives: its ranks are in 2"
            assert reason in over_both
        assert "plain JAX collectives" not in inside_each
