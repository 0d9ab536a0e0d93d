"""`ragged_all_to_all` with bad input, and without our handlers."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moe_mesh import make_mesh
from ragged_mesh import RANKS, mapped
from ragged_reference import plan, slow, slow_gradients, values

from jax_turbobus.moe import (
    _ragged,
    _ragged_lowering,
    _ragged_primitive,
    ragged_all_to_all,
)

MESH = make_mesh()


def run(operand, output, fields, **kwargs):
    """Arrays have the rank in front."""
    f = functools.partial(ragged_all_to_all, **({"axis_name": "x"} | kwargs))
    return mapped(f, MESH)(operand, output, *fields)


def good():
    """Two rows to each rank, in the order of ranks."""
    offsets = np.broadcast_to(np.arange(RANKS, dtype=np.int32) * 2, (RANKS, RANKS))
    sizes = np.full((RANKS, RANKS), 2, np.int32)
    operand = np.arange(RANKS * 8 * 256, dtype=np.float32).reshape(RANKS, 8, 256)
    fields = [offsets.copy(), sizes, offsets.T.copy(), sizes.copy()]
    return operand, np.zeros_like(operand), fields


def test_the_good_call_is_good():
    operand, output, fields = good()
    want = operand.reshape(4, 4, 2, 256).transpose(1, 0, 2, 3).reshape(operand.shape)
    np.testing.assert_array_equal(run(operand, output, fields), want)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda a, o, f: (a.astype(np.int32), o, f),
            TypeError,
            "operand and output: expected one dtype, got int32 and float32",
        ),
        (
            lambda a, o, f: (a[..., :7], o, f),
            ValueError,
            r"expected rows of one shape, got \(8, 7\) and \(8, 256\)",
        ),
        (
            lambda a, o, f: (a[:, 0, 0], o[:, 0, 0], f),
            ValueError,
            "operand: expected rows, got a scalar",
        ),
        (
            lambda a, o, f: (a, o, [f[0].astype(np.float32), *f[1:]]),
            TypeError,
            "input_offsets: expected integers, got float32",
        ),
        (
            lambda a, o, f: (a, o, [f[0], f[1][:, :2], *f[2:]]),
            ValueError,
            r"send_sizes: expected as many entries as input_offsets \(4\), got 2",
        ),
        (
            lambda a, o, f: (a, o, [x[:, :3] for x in f]),
            ValueError,
            "expected a multiple of the 4 ranks that exchange, got 3 entries",
        ),
        (
            lambda a, o, f: (a, o, [x[:, None] for x in f]),
            ValueError,
            r"input_offsets: expected shape \(num_slices,\)",
        ),
        (
            lambda a, o, f: (a, o, [x[:, :0] for x in f]),
            ValueError,
            "with at least one slice",
        ),
    ],
)
def test_bad_arguments_are_refused_when_tracing(change, error, message):
    with pytest.raises(error, match=message):
        run(*change(*good()))


@pytest.mark.parametrize("groups", ["ab", [0, 1], [[0, 1.5], [2, 3]], 7])
def test_groups_that_are_no_integers_are_refused_when_tracing(groups):
    with pytest.raises(TypeError, match="axis_index_groups: expected groups of axis"):
        run(*good(), axis_index_groups=groups)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1], [2]], "exactly once"),
        ([[0, 1, 2], [3]], "expected groups of one size"),
        ([[0, 1], [1, 2]], "exactly once"),
        ([[0, 1], [2, 4]], "each axis index in 0..3"),
    ],
)
def test_bad_groups_are_refused_when_tracing(groups, message):
    with pytest.raises(ValueError, match=message):
        run(*good(), axis_index_groups=groups)


def test_random_keys_are_refused_with_a_way_out():
    operand, _, fields = good()

    def per_rank(_, *fields):
        keys = jax.random.split(jax.random.key(0), 8)
        return ragged_all_to_all(keys, keys, *(f[0] for f in fields), axis_name="x")

    f = jax.shard_map(per_rank, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(TypeError, match=r"random\.key_data"):
        jax.eval_shape(f, operand, *fields)


def test_an_unbound_axis_is_named():
    operand, output, fields = (jax.tree.map(lambda x: x[0], part) for part in good())
    with pytest.raises(NameError, match=r"axis_name='x' is not bound.*shard_map"):
        ragged_all_to_all(operand, output, *fields, axis_name="x")
    with pytest.raises(NameError, match="axis_name='y' is not bound"):
        run(*good(), axis_name="y")
    for axis_name in ((), 0, ("x", "x"), {"x"}):
        with pytest.raises(ValueError, match="axis_name: expected the name of a mesh"):
            run(*good(), axis_name=axis_name)


@pytest.mark.parametrize(
    ("field", "where", "value", "message"),
    [
        (1, (2, 1), 7, r"slice 1 of rank 2, for rank 1: .*the operand's 8 rows, got 7"),
        (0, (3, 0), 100, r"slice 0 of rank 3, .*got 2 rows from row 100"),
        (0, (3, 0), -1, r"slice 0 of rank 3, .*from row -1"),
        (
            2,
            (0, 3),
            7,
            r"slice 3 of rank 0, .*the result's 8 rows, got 2 rows to row 7",
        ),
        (2, (0, 3), 2**31 - 1, r"slice 3 of rank 0, .*to row 2147483647"),
        (
            1,
            (1, 1),
            -4,
            r"slice 1 of rank 1, .*send_sizes must not be negative, got -4",
        ),
        (3, (1, 2), 1, r"slice 1 of rank 2.*sends 2 rows.*recv_sizes\[2\] = 1"),
    ],
)
def test_rows_out_of_range_are_an_error_that_names_them(field, where, value, message):
    operand, output, fields = good()
    fields[field][where] = value
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(run(operand, output, fields))
    test_the_good_call_is_good()


def test_offsets_beyond_int32_do_not_wrap_around():
    operand, output, fields = good()
    with jax.enable_x64(True):
        fields = [f.astype(np.int64) for f in fields]
        fields[0][3, 0] = 2**32 + 2
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError), match="slice 0 of rank 3"
        ):
            jax.block_until_ready(run(operand, output, fields))


def test_an_error_in_the_gradient_is_named_too():
    operand, output, fields = good()
    fields[0][3, 0] = 9

    def per_rank(a, o, *f):
        out = jax.vjp(
            lambda a: ragged_all_to_all(a, o[0], *(x[0] for x in f), axis_name="x"),
            a[0],
        )
        return out[1](o[0])[0][None]

    f = jax.jit(jax.shard_map(per_rank, mesh=MESH, in_specs=P("x"), out_specs=P("x")))
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match="slice 0 of rank 3"
    ):
        jax.block_until_ready(f(operand, output, *fields))


def test_plain_collectives_give_the_same(monkeypatch, caplog):
    operand, output, fields = good()
    fields[1][2] = fields[3][:, 2] = 0
    output = output + 5

    def value_and_grads(operand, output, *fields):
        f = functools.partial(ragged_all_to_all, axis_name="x")

        def loss(a, o):
            return (f(a, o, *(x[0] for x in fields)) ** 2).sum()

        return jax.grad(loss, (0, 1))(operand[0], output[0])

    f = jax.shard_map(value_and_grads, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    ours = run(operand, output, fields), *jax.jit(f)(operand, output, *fields)
    monkeypatch.setattr(_ragged, "_why_not_ours", lambda axes: "a test says so")
    with caplog.at_level(logging.INFO, "jax_turbobus"):
        plain = run(operand, output, fields), *jax.jit(f)(operand, output, *fields)
    assert "plain JAX collectives: a test says so" in caplog.text
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_platforms_lower_to_plain_collectives():
    operand, output, fields = good()

    def loss(*args):
        out = ragged_all_to_all(*(a[0] for a in args), axis_name="x")
        return jnp.sum(out**2)[None]

    f = jax.shard_map(
        lambda *args: jax.grad(lambda a: loss(a, *args[1:]).sum())(args[0]),
        mesh=MESH,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, P("x")))
        for x in (operand, output, *fields)
    ]
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert "turbobus" not in text
    assert "all_gather" in text


@pytest.fixture
def collectives_on_cpu():
    """Lowers to what other platforms get, so that it runs here."""
    primitives = _ragged_primitive._exchange_p, _ragged_primitive._collect_p
    exchange_p, collect_p = primitives
    _ragged_lowering._lower(exchange_p, _ragged_lowering._exchange_anywhere, "cpu")
    _ragged_lowering._lower(collect_p, _ragged_lowering._collect_anywhere, "cpu")
    jax.clear_caches()
    yield
    _ragged_lowering.register(*primitives)
    jax.clear_caches()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("collectives_on_cpu")
def test_gradients_of_what_other_platforms_get(dtype):
    fields = plan(4, each=3, overlap=True)
    operand = values(0, 4, 96, 33).astype(dtype)
    output = values(1, 4, 160, 33).astype(dtype)

    def per_rank(*args):
        operand, output, *fields = (x[0] for x in args)

        def loss(*rows):
            result = ragged_all_to_all(*rows, *fields, axis_name="x")
            return (result.astype(jnp.float32) ** 2).sum() / 2

        return tuple(x[None] for x in jax.grad(loss, (0, 1))(operand, output))

    f = jax.shard_map(per_rank, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    lowered = jax.jit(f).lower(operand, output, *fields)
    assert "turbobus" not in lowered.as_text()
    want = slow_gradients(slow(operand, output, fields), 96, fields)
    for bar, wanted in zip(
        lowered.compile()(operand, output, *fields), want, strict=True
    ):
        np.testing.assert_array_equal(np.asarray(bar, np.float64), wanted)


_HOST = "GPU 0 cannot reach the memory of GPU 1"


@pytest.mark.parametrize(
    ("sizes", "host", "part"),
    [
        ({}, None, None),
        ({}, _HOST, None),
        ({"num_ranks": 17}, None, "17 ranks, at most 16 on GPUs"),
        ({"num_slices": 16400}, None, "16400 slices, at most 16384 on GPUs"),
        ({"num_slices": 16384, "num_rows": 2**30}, None, None),
        ({"num_slices": 4100}, _HOST, "can be 16400 pieces, at most 16384"),
        ({"num_batches": 33}, _HOST, "in 33 batches can be 16896 pieces"),
        ({"num_rows": 2**30}, _HOST, "1073741824 rows on 2 ranks are too many"),
    ],
)
def test_what_gpus_leave_to_collectives(monkeypatch, sizes, host, part):
    devices = _ragged_lowering._devices
    monkeypatch.setattr(devices, "why_apart_on_gpus", lambda _: None)
    monkeypatch.setattr(devices, "why_through_host", lambda _: host)
    given = {"num_slices": 128, "num_batches": 1, "num_rows": 4096, "num_ranks": 2}
    why = _ragged_lowering._why_not_on_gpus(None, **given | sizes)
    if part is None:
        assert why is None
    else:
        assert part in why
        assert host is None or why.startswith(host)
