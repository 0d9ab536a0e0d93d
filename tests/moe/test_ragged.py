"""`ragged_all_to_all` against a slow NumPy reference, under every transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ragged_reference import plan, slow, slow_gradients, values

from jax_turbobus.moe import ragged_all_to_all

RANKS = 4


def mesh(shape=(RANKS,), names=("x",)):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names)


def mapped(function, mesh_=None, **kwargs):
    """Runs `function` per rank; arguments and result have the rank in front."""
    mesh_ = mesh() if mesh_ is None else mesh_
    spec = P(mesh_.axis_names)

    def per_rank(*args):
        return jax.tree.map(lambda y: y[None], function(*(x[0] for x in args)))

    wrapped = jax.jit(
        jax.shard_map(per_rank, mesh=mesh_, in_specs=spec, out_specs=spec, **kwargs)
    )
    return lambda *args: wrapped(
        *(jax.device_put(x, NamedSharding(mesh_, spec)) for x in args)
    )


def call(*args):
    return ragged_all_to_all(*args, axis_name="x")


def test_the_documented_example():
    fields = [
        np.array(f, np.int32)
        for f in (
            [[0, 1], [0, 1]],
            [[1, 2], [1, 1]],
            [[0, 0], [1, 2]],
            [[1, 1], [2, 1]],
        )
    ]
    operand = np.array([[1, 2, 2], [3, 4, 0]], np.float32)
    result = mapped(call, mesh((2,)))(operand, np.zeros((2, 4), np.float32), *fields)
    np.testing.assert_array_equal(result, [[1, 3, 0, 0], [2, 2, 4, 0]])


def test_c01_runs_on_cpu_devices_and_equals_the_reference_bit_for_bit():
    # https://github.com/jax-ml/jax/issues/34755: 8 rows a rank, uniform sizes of 2.
    sizes = np.full((4, 4), 2, np.int32)
    input_offsets = np.broadcast_to(np.arange(4, dtype=np.int32) * 2, (4, 4))
    output_offsets = np.broadcast_to(np.arange(4, dtype=np.int32)[:, None] * 2, (4, 4))
    fields = (input_offsets, sizes, output_offsets, sizes)
    operand = values(0, 4, 8, 4)
    output = np.zeros_like(operand)
    result = mapped(call)(operand, output, *fields)
    np.testing.assert_array_equal(result, slow(operand, output, fields))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("check_vma", [True, False])
def test_random_slices_equal_the_slow_reference(each, overlap, check_vma):
    run = mapped(call, check_vma=check_vma)
    for seed in range(6):
        fields = plan(seed, each=each, overlap=overlap)
        operand = values(seed, RANKS, 96, 40)
        output = values(seed + 100, RANKS, 160, 40)
        result = run(operand, output, *fields)
        np.testing.assert_array_equal(result, slow(operand, output, fields))


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "float16", "bfloat16", "int32", "int8", "uint16", "bool"),
        *("complex64", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"),
        "float4_e2m1fn",
    ],
)
def test_every_dtype_moves_bit_for_bit(dtype):
    fields = plan(1)
    dtype = jnp.dtype(dtype)
    kinds = np.random.default_rng(0).integers(0, 2, (2, RANKS, 160, 33))
    operand, output = kinds[0, :, :96].astype(dtype), kinds[1].astype(dtype)
    result = np.asarray(mapped(call)(operand, output, *fields))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, slow(operand, output, fields))


@pytest.mark.parametrize("row", [(), (1,), (3, 5, 2), (0,), (257,)])
def test_any_row_shape(row):
    fields = plan(2)
    operand, output = values(0, RANKS, 96, *row), values(1, RANKS, 160, *row)
    result = mapped(call)(operand, output, *fields)
    np.testing.assert_array_equal(result, slow(operand, output, fields))


def test_no_rows_at_all():
    nothing = np.zeros((RANKS, RANKS), np.int32)
    for operand_rows, output_rows in ((0, 4), (4, 0), (0, 0)):
        operand = values(0, RANKS, operand_rows, 64)
        output = values(1, RANKS, output_rows, 64)
        result = mapped(call)(operand, output, *[nothing] * 4)
        np.testing.assert_array_equal(result, output)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "int16", "uint8"])
def test_offsets_of_any_integer_type(dtype):
    fields = [f.astype(dtype) for f in plan(3)]
    operand, output = values(0, RANKS, 96, 8), values(1, RANKS, 160, 8)
    with jax.enable_x64(True):
        result = mapped(call)(operand, output, *fields)
    np.testing.assert_array_equal(result, slow(operand, output, fields))


def test_one_operand_for_both_arguments():
    fields = plan(4, operand_rows=96, output_rows=96)
    for f in (0, 2):
        fields[f] = np.minimum(fields[f], 72)
    x = values(0, RANKS, 96, 64)
    result = mapped(lambda x, *f: call(x, x, *f))(x, *fields)
    np.testing.assert_array_equal(result, slow(x, x, fields))


def test_the_output_argument_is_not_overwritten():
    fields = plan(5)
    operand, output = values(0, RANKS, 96, 64), values(1, RANKS, 160, 64)
    result, before = mapped(lambda a, b, *f: (call(a, b, *f), b))(
        operand, output, *fields
    )
    np.testing.assert_array_equal(before, output)
    np.testing.assert_array_equal(result, slow(operand, output, fields))


# Gradients.


def gradients(fields, cotangent, function=call):
    def per_rank(operand, output, cotangent, *fields):
        _, pullback = jax.vjp(lambda a, b: function(a, b, *fields), operand, output)
        return pullback(cotangent)

    operand = values(0, RANKS, 96, *cotangent.shape[2:], dtype=cotangent.dtype)
    output = np.zeros_like(cotangent)
    return mapped(per_rank)(operand, output, cotangent, *fields)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("each", [1, 2])
def test_gradients_equal_the_slow_reference(each, overlap):
    # A third of the slices are empty: there JAX's own transpose goes wrong.
    for seed in range(6):
        fields = plan(seed, each=each, overlap=overlap)
        assert (fields[1] == 0).any()
        cotangent = values(seed + 7, RANKS, 160, 24)
        got = gradients(fields, cotangent)
        for bar, expected in zip(
            got, slow_gradients(cotangent, 96, fields), strict=True
        ):
            np.testing.assert_array_equal(bar, expected)


def test_gradient_where_a_peer_sends_nothing():
    # Rank 1 sends no row to rank 0, whose slice begins where rank 2's does.
    fields = [np.zeros((RANKS, RANKS), np.int32) for _ in range(4)]
    fields[1][:, 0] = fields[3][0] = [2, 0, 3, 1]
    fields[2][:, 0] = [0, 2, 2, 5]
    cotangent = values(0, RANKS, 160, 24)
    operand_bar, output_bar = gradients(fields, cotangent)
    expected = slow_gradients(cotangent, 96, fields)
    np.testing.assert_array_equal(operand_bar, expected[0])
    np.testing.assert_array_equal(output_bar, expected[1])
    assert not np.any(output_bar[0, :6])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "float8_e5m2"])
def test_gradients_of_other_dtypes(dtype):
    fields = plan(8, overlap=True)
    cotangent = values(9, RANKS, 160, 24).astype(jnp.dtype(dtype))
    got = gradients(fields, cotangent)
    wide = np.complex128 if dtype == "complex64" else np.float64
    expected = slow_gradients(cotangent.astype(wide), 96, fields)
    for bar, want in zip(got, expected, strict=True):
        assert bar.dtype == cotangent.dtype
        np.testing.assert_array_equal(np.asarray(bar), want.astype(cotangent.dtype))


def test_c02_gradient_of_a_routed_layer_equals_dense():
    # https://github.com/jax-ml/jax/issues/26915: R=4, T=16, k=2, E=8, H=8.
    tokens, k, experts, hidden = 16, 2, 8, 8
    local = experts // RANKS
    rng = np.random.default_rng(0)
    x = rng.standard_normal((RANKS, tokens, hidden)).astype(np.float32)
    w = rng.random((RANKS, tokens, k)).astype(np.float32)
    params = rng.standard_normal((RANKS, local, hidden, hidden)).astype(np.float32)
    ids = rng.random((RANKS, tokens, experts)).argsort(-1)[..., :k].astype(np.int32)
    ids[1] = 0  # all of rank 1's tokens to one expert: other ranks get no row of it
    ids[1, :, 1] = 1
    capacity = RANKS * tokens * k

    def layer(x, w, params, ids):
        flat = ids.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=experts)
        every = lax.all_gather(counts, "x")
        me = lax.axis_index("x")
        # One slice an expert: what arrives is in the order of experts, then ranks.
        mine = lax.dynamic_slice_in_dim(every, me * local, local, 1)
        by_expert = (jnp.cumsum(every, 0) - every)[me]
        by_rank = every.sum(0).reshape(RANKS, local)
        base = (jnp.cumsum(by_rank, 1) - by_rank).reshape(-1)
        there = (jnp.cumsum(counts) - counts, counts, base + by_expert)
        sent = x[order // k]
        empty = jnp.zeros((capacity, hidden), x.dtype)
        rows = ragged_all_to_all(sent, empty, *there, mine.reshape(-1), axis_name="x")
        eid = jnp.repeat(jnp.arange(local), by_rank[me], total_repeat_length=capacity)
        y = jnp.tanh(jnp.einsum("rh,rhg->rg", rows, params[eid]))
        start = lax.all_to_all(there[2], "x", 0, 0, tiled=True)
        home = lax.all_to_all(there[0], "x", 0, 0, tiled=True)
        back = ragged_all_to_all(
            y,
            jnp.zeros((tokens * k, hidden)),
            start,
            mine.reshape(-1),
            home,
            counts,
            axis_name="x",
        )
        inverse = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * k))
        return jnp.einsum("tk,tkh->th", w, back[inverse].reshape(tokens, k, hidden))

    def ours(x, w, params, ids):
        def loss(*args):
            return (layer(*args, ids) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(x, w, params)

    def dense(x, w, params):
        y = jnp.tanh(
            jnp.einsum("rth,rtkhg->rtkg", x, params.reshape(-1, hidden, hidden)[ids])
        )
        return (jnp.einsum("rtk,rtkh->rth", w, y) ** 2).sum()

    got = mapped(ours)(x, w, params, ids)
    expected = jax.grad(dense, (0, 1, 2))(x, w, params)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_jvp_linearize_twice_and_second_order():
    fields = plan(11, overlap=True)
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)
    dots = values(2, RANKS, 96, 24), values(3, RANKS, 160, 24)

    def per_rank(operand, output, operand_dot, output_dot, *fields):
        def f(a, b):
            return call(a, b, *fields)

        def energy(a):
            return (jnp.sin(f(a, output)) ** 2).sum()

        _, one = jax.jvp(f, (operand, output), (operand_dot, output_dot))
        _, linear = jax.linearize(f, operand, output)
        # The same linear map twice in one program: two calls, not one.
        two = linear(operand_dot, output_dot) + linear(operand_dot + 1, output_dot)
        hessian = jax.jvp(jax.grad(energy), (operand,), (operand_dot,))[1]
        return one, two, hessian

    one, two, hessian = mapped(per_rank)(operand, output, *dots, *fields)
    expected = slow(*dots, fields)
    np.testing.assert_array_equal(one, expected)
    np.testing.assert_array_equal(two, expected + slow(dots[0] + 1, dots[1], fields))
    result = slow(operand, output, fields)
    moved = slow(dots[0], np.zeros_like(dots[1]), fields)
    curvature = 2 * np.cos(2 * result) * moved
    want, _ = slow_gradients(curvature, 96, fields)
    np.testing.assert_allclose(hessian, want, rtol=1e-4, atol=1e-4)


# Transforms.


@pytest.mark.parametrize("batched", ["rows", "operand", "output", "fields", "all"])
def test_vmap_takes_any_mixture(batched):
    # C05: shared offsets die in an assertion in jax.lax's own.
    batch = 3
    operands = values(0, RANKS, batch, 96, 40)
    outputs = values(1, RANKS, batch, 160, 40)
    plans = [plan(s) for s in range(batch)]
    fields = [np.stack(f, axis=1) for f in zip(*plans, strict=True)]
    has = {
        "rows": (0, 0, None),
        "operand": (0, None, None),
        "output": (None, 0, None),
        "fields": (None, None, 0),
        "all": (0, 0, 0),
    }[batched]
    axes = (has[0], has[1], *[has[2]] * 4)
    args = [
        x if axis == 0 else x[:, 0]
        for x, axis in zip((operands, outputs, *fields), axes, strict=True)
    ]
    result = mapped(jax.vmap(call, in_axes=axes))(*args)
    for i in range(batch):
        a, b, *f = (
            x[:, i if axis == 0 else 0]
            for x, axis in zip((operands, outputs, *fields), axes, strict=True)
        )
        np.testing.assert_array_equal(result[:, i], slow(a, b, f))


def test_vmap_inside_vmap_and_its_gradient():
    operands, outputs = values(0, RANKS, 2, 3, 96, 16), values(1, RANKS, 3, 160, 16)
    fields = plan(12)
    inner = jax.vmap(call, in_axes=(0, 0, *[None] * 4))
    outer = jax.vmap(inner, in_axes=(0, None, *[None] * 4))

    def per_rank(operands, outputs, *fields):
        def loss(a, b):
            return (outer(a, b, *fields) ** 2).sum() / 2

        return outer(operands, outputs, *fields), *jax.grad(loss, (0, 1))(
            operands, outputs
        )

    result, operand_bar, output_bar = mapped(per_rank)(operands, outputs, *fields)
    total = np.zeros(outputs.shape)
    for i in range(2):
        for j in range(3):
            want = slow(operands[:, i, j], outputs[:, j], fields)
            np.testing.assert_array_equal(result[:, i, j], want)
            bars = slow_gradients(want, 96, fields)
            np.testing.assert_array_equal(operand_bar[:, i, j], bars[0])
            total[:, j] += bars[1]
    np.testing.assert_array_equal(output_bar, total)


def test_vmap_at_another_axis_equals_a_loop():
    operands, output = values(0, RANKS, 96, 3, 16), values(1, RANKS, 160, 16)
    fields = plan(13)
    f = jax.vmap(call, in_axes=(1, *[None] * 5), out_axes=1)
    result = mapped(f)(operands, output, *fields)
    for i in range(3):
        want = slow(operands[:, :, i], output, fields)
        np.testing.assert_array_equal(result[:, :, i], want)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_remat_mixed_with_collectives(remat):
    fields = plan(14, output_rows=96, operand_rows=96)
    fields[2] = np.minimum(fields[2], 72)
    x = values(0, RANKS, 96, 32)

    def per_rank(x, *fields):
        def step(x, _):
            y = jnp.sin(x) + lax.pmean(x, "x")
            y = call(jnp.cos(y), y, *fields)
            around = [(i, (i + 1) % RANKS) for i in range(RANKS)]
            return y * 0.5 + lax.ppermute(y, "x", around), None

        def scanned(x):
            body = jax.checkpoint(step) if remat else step
            return (lax.scan(body, x, None, length=3)[0] ** 2).sum()

        def unrolled(x):
            for _ in range(3):
                x, _ = step(x, None)
            return (x**2).sum()

        return jax.value_and_grad(scanned)(x), jax.value_and_grad(unrolled)(x)

    (a, da), (b, db) = mapped(per_rank)(x, *fields)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(da, db, rtol=1e-5, atol=1e-5)


def test_many_calls_of_one_jitted_helper_never_pair_wrongly():
    fields = plan(15)
    helper = jax.jit(call)

    def per_rank(operand, output, *fields):
        total = jnp.zeros(())
        out = []
        for i in range(8):
            got = helper(operand + i, output, *fields)
            out.append(got)
            total = total + lax.psum(got.sum(), "x")
        return jnp.stack(out), total

    operand, output = values(0, RANKS, 96, 64), values(1, RANKS, 160, 64)
    run = mapped(per_rank)
    expected = np.stack([slow(operand + i, output, fields) for i in range(8)], axis=1)
    for _ in range(20):
        got, total = run(operand, output, *fields)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)


# Axes and groups.


@pytest.mark.parametrize(
    "groups", [[[0, 1], [2, 3]], [[3, 0], [2, 1]], [[0], [1], [2], [3]]]
)
def test_axis_index_groups(groups):
    size = len(groups[0])
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)
    fields = [np.zeros((RANKS, size), np.int32) for _ in range(4)]
    want, bars = np.zeros_like(output), np.zeros_like(operand)
    for g, group in enumerate(groups):
        part = plan(20 + g, ranks=size)
        for f, p in zip(fields, part, strict=True):
            f[group] = p
        want[group] = slow(operand[group], output[group], part)
        bars[group] = slow_gradients(want[group], 96, part)[0]
    f = functools.partial(ragged_all_to_all, axis_name="x", axis_index_groups=groups)
    np.testing.assert_array_equal(mapped(f)(operand, output, *fields), want)

    def loss(*args):
        return (f(*args) ** 2).sum() / 2

    got = mapped(jax.grad(loss))(operand, output, *fields)
    np.testing.assert_array_equal(got, bars)


def test_two_axes_taken_together_and_a_sub_axis():
    both = mesh((2, 4), ("a", "b"))
    operand, output = values(0, 8, 96, 24), values(1, 8, 160, 24)
    fields = plan(30, ranks=8)
    f = functools.partial(ragged_all_to_all, axis_name=("a", "b"))
    np.testing.assert_array_equal(
        mapped(f, both)(operand, output, *fields), slow(operand, output, fields)
    )
    swapped = functools.partial(ragged_all_to_all, axis_name=("b", "a"))
    order = np.arange(8).reshape(2, 4).T.reshape(-1)  # device of each rank
    got = np.asarray(
        mapped(swapped, both)(
            *(x[np.argsort(order)] for x in (operand, output, *fields))
        )
    )
    np.testing.assert_array_equal(got[order], slow(operand, output, fields))

    halves = [plan(31), plan(32)]
    fields = [np.concatenate(f) for f in zip(*halves, strict=True)]
    sub = functools.partial(ragged_all_to_all, axis_name="b")
    got = mapped(sub, both)(operand, output, *fields)
    for i, part in enumerate(halves):
        rows = slice(i * 4, i * 4 + 4)
        np.testing.assert_array_equal(
            got[rows], slow(operand[rows], output[rows], part)
        )


def test_devices_in_another_order_than_their_ids():
    reversed_ = jax.sharding.Mesh(np.array(jax.devices()[:RANKS])[::-1], ("x",))
    fields = plan(33)
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)
    got = mapped(call, reversed_)(operand, output, *fields)
    np.testing.assert_array_equal(got, slow(operand, output, fields))


def test_an_axis_of_vmap_takes_plain_collectives():
    fields = plan(34)
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)
    result = jax.vmap(call, axis_name="x")(operand, output, *fields)
    np.testing.assert_array_equal(result, slow(operand, output, fields))


def test_a_mesh_axis_left_to_the_compiler_takes_plain_collectives():
    both = mesh((4, 2), ("x", "auto"))
    fields = plan(35)
    operand, output = values(0, RANKS, 96, 24), values(1, RANKS, 160, 24)

    def per_rank(*args):
        return call(*(a[0] for a in args))[None]

    f = jax.shard_map(
        per_rank, mesh=both, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    got = jax.jit(f)(operand, output, *fields)
    np.testing.assert_array_equal(got, slow(operand, output, fields))


def test_replicated_arguments_and_constant_offsets():
    # Nothing but the operand varies over the mesh: check_vma must not object.
    operand = values(0, RANKS, 8, 64)
    sizes = jnp.full(RANKS, 2)

    def per_rank(operand):
        me = lax.axis_index("x")
        offsets = jnp.arange(RANKS) * 2
        out = jnp.zeros((8, 64))
        return call(operand, out, offsets, sizes, jnp.repeat(me * 2, RANKS), sizes)

    got = mapped(per_rank)(operand)
    want = operand.reshape(4, 4, 2, 64).transpose(1, 0, 2, 3).reshape(4, 8, 64)
    np.testing.assert_array_equal(got, want)


def test_the_compiled_program_holds_no_hidden_gather_of_rows():
    fields = plan(36)
    shapes = [(RANKS, 96, 640), (RANKS, 160, 640)]
    args = [np.zeros(s, np.float32) for s in shapes] + fields
    spec = NamedSharding(mesh(), P("x"))
    f = jax.shard_map(
        lambda *a: call(*(x[0] for x in a))[None],
        mesh=mesh(),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    text = (
        jax.jit(f).lower(*(jax.device_put(a, spec) for a in args)).compile().as_text()
    )
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(gathers) == 1
    assert "s32" in gathers[0]
    assert text.count('custom_call_target="turbobus_ragged_all_to_all"') == 1
