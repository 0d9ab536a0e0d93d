"""Bad input is refused while tracing, with a message that helps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from moe_mesh import make_mesh, on_mesh

from jax_turbobus import moe

T, K, E, H = 4, 2, 8, 160


def call(mesh=None, axis="x", **changes):
    """Traces a dispatch on 4 ranks with some arguments changed."""
    arrays = {
        "tokens": jnp.ones((4 * T, H)),
        "expert_ids": jnp.zeros((4 * T, K), jnp.int32),
        "weights": jnp.ones((4 * T, K)),
    }
    options = {"num_experts": E, "axis_name": "x"}
    for name, value in changes.items():
        (arrays if name in arrays or name == "valid" else options)[name] = value
    names = list(arrays)

    def run(*values):
        kw = dict(zip(names, values, strict=True))
        rows, _, state = moe.dispatch(**kw, **options)
        return moe.combine(rows, state)

    mapped = on_mesh(run, mesh or make_mesh(), axis)
    return jax.eval_shape(mapped, *arrays.values())


def test_the_unchanged_call_is_good():
    assert call().shape == (4 * T, H)


BAD = [
    ("tokens", jnp.ones((4 * T, 2, H)), ValueError, "tokens: expected shape"),
    ("tokens", jnp.ones(4 * T), ValueError, "[num_tokens, hidden], got [4]"),
    ("tokens", jnp.ones((4 * T, H), jnp.int4), TypeError, "less than a byte"),
    (
        "tokens",
        jnp.ones((4 * T, H), jnp.float4_e2m1fn),
        TypeError,
        "less than a byte",
    ),
    ("expert_ids", jnp.zeros((8 * T, K), jnp.int32), ValueError, "expert_ids"),
    ("expert_ids", jnp.zeros(4 * T, jnp.int32), ValueError, "[4, top_k]"),
    ("expert_ids", jnp.zeros((4 * T, K)), TypeError, "int32, got float32"),
    ("expert_ids", jnp.zeros((4 * T, K), jnp.int16), TypeError, "astype"),
    ("expert_ids", jnp.zeros((4 * T, E + 1), jnp.int32), ValueError, "weights"),
    ("weights", jnp.ones((4 * T, K + 1)), ValueError, "weights: expected shape [4, 2]"),
    ("weights", jnp.ones((4 * T, K), jnp.int32), TypeError, "floating"),
    ("explain", "no", TypeError, "dispatch: explain: expected True or False, got 'no'"),
    ("explain", np.ones(2), TypeError, "explain: expected True or False, got array"),
    ("valid", jnp.ones((4 * T, 1), bool), ValueError, "valid: expected shape [4]"),
    ("valid", jnp.ones(4 * T), TypeError, "bool, got float32"),
    ("num_experts", 10, ValueError, "pad to 12 experts"),
    (
        "num_experts",
        0,
        ValueError,
        "num_experts: expected an integer from 1 to 2147483647, got 0",
    ),
    ("num_experts", 8.0, TypeError, "num_experts: expected a Python integer"),
    ("axis_name", "y", ValueError, "'y' is not an axis of the enclosing"),
    ("axis_name", ("x", "x"), ValueError, "different ones"),
    ("axis_name", (), ValueError, "axis_name"),
    ("axis_name", ["x"], TypeError, "a tuple of different ones, major first"),
    ("axis_name", {"x"}, TypeError, "a tuple of different ones, major first"),
    ("axis_name", (["x"],), TypeError, "a tuple of different ones, major first"),
    ("recv_capacity", -1, ValueError, "recv_capacity: expected an integer from 0"),
    ("recv_capacity", 2.5, TypeError, "recv_capacity"),
    ("recv_capacity", 2**31, ValueError, "recv_capacity: expected an integer from 0"),
    ("num_experts", 2**33, ValueError, "num_experts: expected an integer from 1"),
    ("num_experts", True, TypeError, "num_experts: expected a Python integer"),
    ("expert_capacity", 2**30, ValueError, "smaller recv_capacity"),
    ("expert_capacity", 0, ValueError, "expert_capacity: expected an integer from 1"),
    ("schedule", "fast", ValueError, "'packed', 'broadcast', 'direct', 'relay'"),
]


@pytest.mark.parametrize(("name", "value", "error", "part"), BAD)
def test_a_bad_argument_is_named(name, value, error, part):
    with pytest.raises(error) as caught:
        call(**{name: value})
    assert part in str(caught.value)
    assert str(caught.value).startswith("dispatch: ")


def test_more_choices_than_experts():
    ids = jnp.zeros((4 * T, E + 1), jnp.int32)
    with pytest.raises(ValueError, match="top_k=9 choices a token, but num_experts=8"):
        call(expert_ids=ids, weights=jnp.ones((4 * T, E + 1)))


def test_two_capacities_at_once():
    with pytest.raises(ValueError, match="at most one of them"):
        call(recv_capacity=8, expert_capacity=2)


def test_outside_shard_map():
    args = (jnp.ones((T, H)), jnp.zeros((T, K), jnp.int32), jnp.ones((T, K)))
    with pytest.raises(ValueError, match=r"called outside jax\.shard_map"):
        jax.jit(lambda *a: moe.dispatch(*a, num_experts=E, axis_name="x")[0])(*args)


def test_under_vmap_with_an_axis_name_only():
    args = (jnp.ones((2, T, H)), jnp.zeros((2, T, K), jnp.int32), jnp.ones((2, T, K)))
    with pytest.raises(ValueError, match=r"called outside jax\.shard_map"):
        jax.vmap(
            lambda *a: moe.dispatch(*a, num_experts=E, axis_name="x")[0], axis_name="x"
        )(*args)


def test_mesh_axes_left_to_the_compiler():
    """XLA would gather whole arrays over them, silently."""
    mesh = make_mesh((2, 4), ("data", "x"))

    def run(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine(rows, state)

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    args = (jnp.ones((16, H)), jnp.zeros((16, K), jnp.int32), jnp.ones((16, K)))
    with pytest.raises(ValueError, match=r"mesh axes \['data'\] are not manual"):
        jax.eval_shape(mapped, *args)
    # An axis of one device is no reason.
    mesh = jax.make_mesh((1, 4), ("data", "x"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    assert jax.jit(mapped)(*args).shape == (16, H)


def run_combine(make_rows, make_state=lambda state: state):
    def run(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x", recv_capacity=24
        )
        return moe.combine(make_rows(rows), make_state(state))

    args = (
        jnp.ones((4 * T, H)),
        jnp.zeros((4 * T, K), jnp.int32),
        jnp.ones((4 * T, K)),
    )
    return jax.eval_shape(on_mesh(run, make_mesh()), *args)


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        (lambda rows: rows[:-1], ValueError, "expected shape [24, hidden]"),
        (lambda rows: rows[None], ValueError, "got [1, 24, 160]"),
        (lambda rows: rows.sum(-1), ValueError, "got [24]"),
        (lambda rows: rows > 0, TypeError, "complex or integer dtype, got bool"),
    ],
)
def test_rows_of_another_dispatch(change, error, part):
    with pytest.raises(error) as caught:
        run_combine(change)
    assert part in str(caught.value)


def test_a_state_that_is_none():
    with pytest.raises(TypeError, match="expected the DispatchState"):
        run_combine(lambda rows: rows, lambda state: (state.slots,))


def test_slots_that_were_tampered_with_do_not_crash():
    """Slots are data; what points nowhere counts as no row."""

    def run(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        wild = dataclasses.replace(state, slots=state.slots + 2**30)
        wild = dataclasses.replace(wild, group_sizes=state.group_sizes - 2**30)
        return moe.combine(rows, wild)

    args = (
        jnp.ones((4 * T, H)),
        jnp.zeros((4 * T, K), jnp.int32),
        jnp.ones((4 * T, K)),
    )
    mapped = on_mesh(run, make_mesh())
    value, grad = jax.jit(
        jax.value_and_grad(lambda x, i, w: mapped(x, i, w).sum(), (0,))
    )(*args)
    assert value == 0
    assert not grad[0].any()


def test_choices_masked_after_dispatch_leave_zero_gradients():
    """Their rows count as kept, but no slot names them any more."""

    def layer(tokens, ids, weights, changed):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x"
        )
        return moe.combine(rows, dataclasses.replace(state, expert_ids=changed))

    ids = np.arange(4 * T * K, dtype=np.int32).reshape(4 * T, K) % E
    changed = np.where(ids % 2, -1, ids)
    mapped = on_mesh(layer, make_mesh())
    step = jax.jit(jax.grad(lambda x, *a: mapped(x, *a).sum()))
    args = (jnp.ones((4 * T, 3)), ids, jnp.ones((4 * T, K)), changed)
    for _ in range(3):  # Memory that has been used.
        junk = [np.full(n, 1e30, np.float32) for n in (48, 96, 400, 4000)]
        del junk
        np.testing.assert_array_equal(step(*args), jnp.ones((4 * T, 3)))


@pytest.mark.parametrize(
    "seconds", [0, -1, 1e-300, 9e-4, 1.1e9, float("nan"), float("inf"), "a", None, True]
)
def test_a_timeout_must_be_positive(seconds):
    with pytest.raises(ValueError, match=r"seconds: expected .*0\.001 to 1e\+09"):
        moe.set_exchange_timeout(seconds)


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        ({"num_chunks": 0}, ValueError, "num_chunks: expected an integer from 1"),
        ({"num_chunks": 1.5}, TypeError, "num_chunks: expected a Python integer"),
        ({"num_chunks": True}, TypeError, "num_chunks: expected a Python integer"),
        ({"expert_fn": None}, TypeError, "expert_fn: expected a function"),
        ({"expert_fn": lambda r, _: (r, r)}, TypeError, "return an array, one row"),
        ({"expert_fn": lambda r, _: r > 0}, TypeError, "expert_fn: expected it to"),
        ({"expert_fn": lambda r, _: r[:3]}, ValueError, "hidden] for rows of shape"),
        ({"axis_name": "y"}, ValueError, "'y' is not an axis"),
        ({"num_experts": E + 1}, ValueError, "num_experts: expected a multiple of"),
        ({"recv_capacity": -1}, ValueError, "recv_capacity: expected an integer"),
        ({"expert_capacity": 0}, ValueError, "expert_capacity: expected an integer"),
        ({"schedule": "best"}, ValueError, "schedule: expected 'auto' or one of"),
        ({"explain": 1}, TypeError, "explain: expected True or False"),
    ],
)
def test_expert_parallel_checks_its_arguments(change, error, part):
    def run(tokens, ids, weights):
        options = {"num_experts": E, "axis_name": "x", **change}
        expert_fn = options.pop("expert_fn", lambda r, _: r)
        return moe.expert_parallel(expert_fn, tokens, ids, weights, **options)

    args = (
        jnp.ones((4 * T, H)),
        jnp.zeros((4 * T, K), jnp.int32),
        jnp.ones((4 * T, K)),
    )
    with pytest.raises(error) as caught:
        jax.eval_shape(
            jax.shard_map(run, mesh=make_mesh(), in_specs=P("x"), out_specs=P("x")),
            *args,
        )
    assert str(caught.value).startswith("expert_parallel: ")
    assert part in str(caught.value)


@pytest.mark.parametrize("name", ["tokens", "expert_ids", "weights", "valid"])
def test_lists_are_no_arrays(name):
    arrays = {
        "tokens": jnp.ones((T, H)),
        "expert_ids": jnp.zeros((T, K), jnp.int32),
        "weights": jnp.ones((T, K)),
        "valid": jnp.ones(T, bool),
    }
    arrays[name] = arrays[name].tolist()
    with pytest.raises(TypeError, match=f"dispatch: {name}: expected an array, got"):
        moe.dispatch(**arrays, num_experts=E, axis_name="x")


@pytest.mark.parametrize("tree", [tuple, lambda pair: dict(enumerate(pair))])
def test_several_arrays_of_a_token_are_for_dispatch(tree):
    tokens = tree((jnp.ones((T, H)), jnp.ones((T, 1))))
    ids, weights = jnp.zeros((T, K), jnp.int32), jnp.ones((T, K))
    with pytest.raises(TypeError, match=r"tokens: expected one array.*moe\.dispatch"):
        moe.expert_parallel(
            lambda rows, _: rows, tokens, ids, weights, num_experts=E, axis_name="x"
        )


@pytest.mark.parametrize(
    ("tokens", "part"),
    [
        (jax.random.split(jax.random.key(0), (T, H)), "key_data(keys)"),
        (np.full((T, H), "a"), "an array of numbers, got dtype <U1"),
        (np.full((T, H), None), "an array of numbers, got dtype object"),
        (np.ones((T, H), ">f4"), "machine's byte order, got dtype >f4"),
    ],
)
def test_tokens_that_jax_cannot_move(tokens, part):
    ids, weights = np.zeros((T, K), np.int32), np.ones((T, K), np.float32)
    with pytest.raises(TypeError, match="dispatch: tokens: ") as caught:
        moe.dispatch(tokens, ids, weights, num_experts=E, axis_name="x")
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "part"),
    [
        (make_mesh((2,)), "dispatch over 4 ranks, but axis 'x' has 2 here"),
        (make_mesh((4,), ("y",)), "'x' is not an axis of the enclosing"),
        (None, "called outside jax.shard_map"),
    ],
)
def test_combine_among_other_ranks(mesh, part):
    def run(tokens, ids, weights):
        rows, _, state = moe.dispatch(
            tokens, ids, weights, num_experts=E, axis_name="x", recv_capacity=8
        )
        return rows, state

    args = (jnp.ones((4 * T, H)), jnp.zeros((4 * T, K), jnp.int32))
    mapped = jax.jit(on_mesh(run, make_mesh()))
    rows, state = jax.device_get(mapped(*args, jnp.ones((4 * T, K))))
    rows = rows[: 8 * (mesh.size if mesh is not None else 1)]
    combine = moe.combine
    if mesh is not None:
        combine = on_mesh(combine, mesh, mesh.axis_names[0])
    with pytest.raises(ValueError, match="combine: ") as caught:
        combine(rows, state)
    assert part in str(caught.value)


def test_numpy_arrays_are_arrays():
    def run(_):
        rows, _, state = moe.dispatch(
            np.ones((T, H), np.float32),
            np.zeros((T, K), np.int32),
            np.ones((T, K), np.float32),
            num_experts=E,
            axis_name="x",
        )
        return moe.combine(rows, state)

    assert (on_mesh(run, make_mesh())(jnp.zeros(4)) == 2).all()
