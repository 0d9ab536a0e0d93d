"""scan_layers: a loop over layers in host memory, forward and backward."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb

WIDTH = 32


def values(*shape, seed=0, scale=1.0):
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32
    )


def layers(num_layers, seed=0):
    return {
        "w": values(num_layers, WIDTH, WIDTH, seed=seed, scale=1 / 6),
        "b": values(num_layers, WIDTH, seed=seed + 1, scale=0.1),
        # An integer leaf: it travels, and has no gradient.
        "shift": jnp.arange(num_layers * WIDTH, dtype=jnp.int32).reshape(-1, WIDTH) % 3,
    }


def layer(params, x):
    y = x @ params["w"] + params["b"] + params["shift"].astype(x.dtype) / 10
    return jnp.tanh(y) + x


def reference(f, stack, x):
    return jax.lax.scan(lambda x, params: (f(params, x), None), x, stack)[0]


def assert_close(ours, theirs):
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def loss(run, stack, x):
    return (run(layer, stack, x) ** 2).sum()


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_equals_a_scan_over_device_memory(num_layers, transform):
    stack, x = layers(num_layers), values(8, WIDTH, seed=9)
    ours = transform(functools.partial(tb.scan_layers, layer))(tb.to_host(stack), x)
    assert ours.sharding.memory_kind == "device"
    np.testing.assert_array_equal(
        ours, jax.jit(functools.partial(reference, layer))(stack, x)
    )


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, lambda f: jax.jit(jax.checkpoint(f))],
    ids=["eager", "jit", "checkpoint"],
)
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_gradients_come_back_as_rows_in_host_memory(num_layers, transform):
    stack, x = layers(num_layers), values(8, WIDTH, seed=9)

    def gradient(run, stack, x):
        shift = stack["shift"]

        def inner(params, x):
            return loss(run, {**params, "shift": shift}, x)

        params = {name: stack[name] for name in ("w", "b")}
        return transform(jax.grad(inner, argnums=(0, 1)))(params, x)

    dstack, dx = gradient(tb.scan_layers, tb.to_host(stack), x)
    assert {leaf.sharding.memory_kind for leaf in dstack.values()} == {"pinned_host"}
    assert_close((dstack, dx), gradient(reference, stack, x))


def gradients(scan, stack, x, **options):
    """Of a stack with leaves in several memories; integers have none."""

    def inner(params, x):
        full = {**params, "shift": stack["shift"]}
        return (scan(layer, full, x, **options) ** 2).sum()

    return jax.grad(inner, argnums=(0, 1))({n: stack[n] for n in ("w", "b")}, x)


@pytest.mark.parametrize(
    "transform", [jax.jit, lambda f: jax.jit(jax.checkpoint(f))], ids=["", "checkpoint"]
)
@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("on_host", [(), ("w",), ("w", "b", "shift")], ids=len)
def test_inputs_kept_on_the_host(on_host, num_layers, transform):
    stack, x = layers(num_layers), values(8, WIDTH, seed=9)
    mixed = stack | {name: tb.to_host(stack[name]) for name in on_host}
    program = transform(
        functools.partial(gradients, tb.scan_layers, offload_inputs=True)
    )
    dstack, dx = program(mixed, x)
    kinds = {name: leaf.sharding.memory_kind for name, leaf in dstack.items()}
    assert kinds == {n: "pinned_host" if n in on_host else "device" for n in ("w", "b")}
    assert_close((dstack, dx), gradients(reference, stack, x))
    on_device = jax.jit(functools.partial(gradients, tb.scan_layers))
    same = on_device(jax.tree.map(tb.to_host, stack), x)
    jax.tree.map(np.testing.assert_array_equal, (dstack, dx), same)


def test_a_few_leaves_stay_on_the_device():
    stack, x = layers(4), values(8, WIDTH, seed=9)
    mixed = stack | {"w": tb.to_host(stack["w"])}
    ours = jax.jit(functools.partial(gradients, tb.scan_layers))(mixed, x)
    assert ours[0]["w"].sharding.memory_kind == "pinned_host"
    assert ours[0]["b"].sharding.memory_kind == "device"
    assert_close(ours, gradients(reference, stack, x))


def test_no_input_stays_on_the_device():
    """What is left between the passes is the stack of inputs, in host memory."""
    stack, x = tb.to_host(values(6, WIDTH, WIDTH, scale=1 / 6)), values(64, WIDTH)

    def kept(**options):
        def run(stack, x):
            return tb.scan_layers(lambda w, x: jnp.tanh(x @ w), stack, x, **options)

        _, pull_back = jax.vjp(run, stack, x)
        leaves = [y for y in jax.tree.leaves(pull_back) if isinstance(y, jax.Array)]
        return sorted(
            (y.sharding.memory_kind, y.shape)
            for y in leaves
            if y.size >= x.size and y.shape != stack.shape
        )

    assert kept() == [("device", (5, 64, WIDTH)), ("device", (64, WIDTH))]
    assert kept(offload_inputs=True) == [
        ("device", (64, WIDTH)),
        ("pinned_host", (5, 64, WIDTH)),
    ]


def test_inputs_that_cannot_lie_on_the_host_stay():
    stack, x = values(4, WIDTH, WIDTH, scale=1 / 6), values(8, WIDTH, seed=9)
    carry = {
        "x": x,
        "depth": jnp.int32(0),
        "bits": jnp.ones(3, jnp.int4),
        "key": jax.random.key(1),
    }

    def f(w, carry):
        noise = jax.random.normal(carry["key"], (WIDTH,)) * carry["bits"][0].astype(
            float
        )
        return {
            "x": jnp.tanh(carry["x"] @ w + noise * carry["depth"]),
            "depth": carry["depth"] + 1,
            "bits": carry["bits"],
            "key": jax.random.fold_in(carry["key"], carry["depth"]),
        }

    def gradient(scan, stack, **options):
        def inner(w, x):
            return (scan(f, w, carry | {"x": x}, **options)["x"] ** 2).sum()

        return jax.jit(jax.grad(inner, argnums=(0, 1)))(stack, x)

    ours = gradient(tb.scan_layers, tb.to_host(stack), offload_inputs=True)
    assert_close(ours, gradient(reference, stack))


@pytest.mark.parametrize("num_rows", [1, 3], ids=["vmap of grad", "grad of vmap"])
def test_inputs_of_a_batch_kept_on_the_host(num_rows):
    stack, xs = layers(4), values(3, 8, WIDTH, seed=9)
    del stack["shift"]

    def f(params, x):
        return jnp.tanh(x @ params["w"] + params["b"]) + x

    def gradient(scan, stack, xs):
        def one(stack, x):
            return (scan(f, stack, x) ** 2).sum()

        if num_rows == 1:
            return jax.vmap(jax.grad(one, (0, 1)), (None, 0))(stack, xs)
        return jax.grad(lambda s, xs: jax.vmap(one, (None, 0))(s, xs).sum(), (0, 1))(
            stack, xs
        )

    scan = functools.partial(tb.scan_layers, offload_inputs=True)
    mixed = {"w": tb.to_host(stack["w"]), "b": stack["b"]}
    ours = jax.jit(functools.partial(gradient, scan))(mixed, xs)
    assert_close(ours, gradient(reference, stack, xs))


def test_what_the_layer_closes_over_has_a_gradient():
    stack, x = layers(4), values(8, WIDTH, seed=9)
    gain, steps = values(WIDTH, seed=5), jnp.arange(WIDTH)

    def run(scan, stack, x, gain):
        # A float with a gradient, an integer without, and one made by jit itself.
        shared = gain * 2

        def f(params, x):
            return layer(params, x) * shared + gain * (steps % 2)

        return (scan(f, stack, x) ** 2).sum()

    ours = jax.jit(jax.grad(functools.partial(run, tb.scan_layers), argnums=(1, 2)))
    theirs = jax.grad(functools.partial(run, reference), argnums=(1, 2))
    assert_close(ours(tb.to_host(stack), x, gain), theirs(stack, x, gain))
    # And where the derivative is taken outside of what was compiled.
    outside = jax.grad(jax.jit(functools.partial(run, tb.scan_layers)), argnums=(1, 2))
    assert_close(outside(tb.to_host(stack), x, gain), theirs(stack, x, gain))


def test_x_may_be_a_tree_with_integers_in_it():
    stack, x = layers(4), values(8, WIDTH, seed=9)

    def f(params, carry):
        return {"x": layer(params, carry["x"]), "depth": carry["depth"] + 1}

    def run(scan, stack, x):
        result = scan(f, stack, {"x": x, "depth": jnp.int32(0)})
        return (result["x"] ** 2).sum(), result["depth"]

    ours = jax.jit(jax.value_and_grad(functools.partial(run, tb.scan_layers), 1, True))
    theirs = jax.value_and_grad(functools.partial(run, reference), 1, True)
    assert_close(ours(tb.to_host(stack), x), theirs(stack, x))


def test_a_weakly_typed_x_takes_the_type_of_the_result():
    stack = tb.to_host({"w": values(3, 256)})
    ours = jax.jit(lambda s: tb.scan_layers(lambda p, x: x + p["w"].sum(), s, 1.0))(
        stack
    )
    np.testing.assert_allclose(ours, 1 + stack["w"].sum(), rtol=1e-5)


def test_bfloat16_gradients_keep_their_dtype():
    stack = values(3, WIDTH, WIDTH, scale=1 / 6).astype(jnp.bfloat16)
    x = values(8, WIDTH, seed=9).astype(jnp.bfloat16)

    def run(scan, stack, x):
        return scan(lambda w, x: jnp.tanh(x @ w), stack, x).astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(functools.partial(run, tb.scan_layers)))(
        tb.to_host(stack), x
    )
    assert grad.dtype == jnp.bfloat16
    expected = jax.grad(functools.partial(run, reference))(stack, x)
    np.testing.assert_allclose(
        grad.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("stacked", [False, True], ids=["shared", "stacked"])
def test_vmap(stacked):
    stack, xs = layers(4), values(3, 8, WIDTH, seed=9)
    if stacked:
        stack = jax.tree.map(lambda s: jnp.stack([s, 2 * s, 3 * s]), stack)

    def run(scan, params, shift, xs):
        def one(params, shift, x):
            return loss(scan, {**params, "shift": shift}, x)

        over = 0 if stacked else None
        return jax.vmap(one, in_axes=(over, over, 0))(params, shift, xs).sum()

    def gradient(scan, params, shift, xs):
        run_scan = functools.partial(run, scan)
        return jax.value_and_grad(run_scan, argnums=(0, 2))(params, shift, xs)

    shift = stack.pop("shift")
    theirs = gradient(reference, stack, shift, xs)
    ours = jax.jit(functools.partial(gradient, tb.scan_layers))(
        tb.to_host(stack), tb.to_host(shift), xs
    )
    assert_close(ours, theirs)
    for name, grad in ours[1][0].items():
        assert grad.shape == stack[name].shape
        assert grad.sharding.memory_kind == "pinned_host"


def test_a_gradient_does_not_depend_on_which_was_taken_before():
    stack, x = tb.to_host(values(3, 8, 8, scale=1 / 3)), values(2, 8, seed=9)

    def f(w, x):  # one function, whose traces JAX keeps
        return jnp.tanh(x @ w)

    def run(stack, x):
        return tb.scan_layers(f, stack, x).sum()

    expected = jax.grad(run)(stack, x)
    jax.grad(run, 1)(stack, x)
    assert_close(jax.jit(jax.grad(jax.jit(run)))(stack, x), expected)


def squared(scan, stack, x):
    return (scan(lambda w, x: jnp.tanh(x @ w), stack, x) ** 2).sum()


@pytest.mark.parametrize(("inner", "outer"), [(0, 0), (0, 1), (1, 0)])
def test_forward_over_reverse(inner, outer):
    stack, x = values(3, 8, 8, scale=1 / 3), values(2, 8, seed=9)

    def directional(scan, stack, x, tangent):
        def gradient(value):
            operands = (value, x) if outer == 0 else (stack, value)
            return jax.grad(functools.partial(squared, scan), inner)(*operands)

        return jax.jvp(gradient, ((stack, x)[outer],), (tangent,))[1]

    tangent = (values(3, 8, 8, seed=3), values(2, 8, seed=3))[outer]
    theirs = directional(reference, stack, x, tangent)
    moved = tb.to_host(tangent) if outer == 0 else tangent
    ours = jax.jit(functools.partial(directional, tb.scan_layers))
    assert_close(ours(tb.to_host(stack), x, moved), theirs)


@pytest.mark.parametrize("inner", [0, 1])
def test_reverse_over_reverse_by_the_stack_is_refused_in_words(inner):
    def norm(stack, x):
        grad = jax.grad(functools.partial(squared, tb.scan_layers), inner)(stack, x)
        return (tb.device_put(grad, jax.memory.Space.Device) ** 2).sum()

    stack, x = tb.to_host(values(3, 8, 8, scale=1 / 3)), values(2, 8, seed=9)
    with pytest.raises(NotImplementedError, match=r"argument stack: .* forward over"):
        jax.grad(norm)(stack, x)
    by_x = jax.grad(norm, 1)(stack, x)  # and by x it is not

    def plain(stack, x):
        grad = jax.grad(functools.partial(squared, reference), inner)(stack, x)
        return (grad**2).sum()

    assert_close(by_x, jax.grad(plain, 1)(tb.to_device(stack), x))


def example(scan, stack, x):
    return jnp.sin(scan(lambda w, x: jnp.tanh(x @ w), stack, x)).sum()


def of_batch(f, stack, xs):
    return jax.vmap(f, (None, 0))(stack, xs).sum()


PER_EXAMPLE = {
    "vmap_grad": lambda f: jax.vmap(jax.grad(f), (None, 0)),
    "vmap_vmap_grad": lambda f: jax.vmap(
        jax.vmap(jax.grad(f), (None, 0)), (None, 1), out_axes=1
    ),
    "grad_vmap_vmap": lambda f: jax.grad(
        lambda s, xs: of_batch(functools.partial(of_batch, f), s, xs)
    ),
    "vmap_grad_vmap": lambda f: jax.vmap(
        jax.grad(functools.partial(of_batch, f)), (None, 0)
    ),
    "jacrev": lambda f: jax.jacrev(jax.vmap(jax.vmap(f, (None, 0)), (None, 0))),
    "grad_of_vmap_value_and_grad": lambda f: jax.grad(
        lambda s, xs: (
            jax.vmap(jax.vmap(jax.grad(f, 1), (None, 0)), (None, 0))(0.5 * s, xs) ** 2
        ).sum(),
        1,
    ),
}


@pytest.mark.parametrize(
    ("order", "sharded"),
    [("vmap_grad", True), *((order, False) for order in PER_EXAMPLE)],
)
def test_a_batch_is_summed_only_where_it_was_differentiated_as_one(order, sharded):
    stack, xs = values(3, 8, 8, scale=1 / 3), values(2, 4, 3, 8, seed=9)
    transform = PER_EXAMPLE[order]
    host = stack
    if sharded:
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
        host = jax.device_put(stack, NamedSharding(mesh, P(None, "x")))
    host = tb.to_host(host)
    ours = jax.jit(transform(jax.jit(functools.partial(example, tb.scan_layers))))
    theirs = transform(functools.partial(example, reference))(stack, xs)
    assert_close(ours(host, xs), theirs)


def test_the_derivative_can_be_differentiated():
    stack, x = values(3, WIDTH, WIDTH, scale=1 / 6), values(2, WIDTH, seed=9)

    def run(scan, stack, x):
        def f(w, x):
            return jnp.tanh(x @ w)

        gradient = jax.grad(lambda x: (scan(f, stack, x) ** 2).sum())
        return (gradient(x) ** 2).sum()

    ours = jax.jit(jax.grad(functools.partial(run, tb.scan_layers), argnums=1))
    theirs = jax.grad(functools.partial(run, reference), argnums=1)
    assert_close(ours(tb.to_host(stack), x), theirs(stack, x))


OFFLOAD_INPUTS = pytest.mark.parametrize(
    "offload_inputs", [False, True], ids=["", "inputs on the host"]
)


@OFFLOAD_INPUTS
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_layers(axis_type, offload_inputs):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    stack, x = values(5, WIDTH, WIDTH, scale=1 / 6), values(8, WIDTH, seed=9)
    sharding = NamedSharding(mesh, P(None, None, "y"))

    def f(w, x):
        y = jnp.dot(x, w, out_sharding=P("x", "y") if explicit else None)
        y = jnp.tanh(y)
        return jax.sharding.reshard(y, P("x", None)) if explicit else y

    explicit = axis_type == AxisType.Explicit

    def run(scan, f, stack, x):
        return (scan(f, stack, x) ** 2).sum()

    with jax.set_mesh(mesh):
        host = tb.to_host(jax.device_put(stack, sharding))
        xs = jax.device_put(x, NamedSharding(mesh, P("x", None)))
        scan = functools.partial(tb.scan_layers, offload_inputs=offload_inputs)
        grad = jax.jit(jax.grad(functools.partial(run, scan, f), argnums=(0, 1)))
        compiled = grad.lower(host, xs).compile()
        dstack, dx = compiled(host, xs)
    # Nowhere is there a whole stack, or one that is split otherwise.
    shapes = set(re.findall(r"f32\[5,\d+,\d+\]", compiled.as_text()))
    assert shapes == {f"f32[5,{WIDTH},{WIDTH // 4}]"}
    assert dstack.sharding.is_equivalent_to(host.sharding, 3)
    plain = functools.partial(run, reference, lambda w, x: jnp.tanh(x @ w))
    assert_close((dstack, dx), jax.grad(plain, argnums=(0, 1))(stack, x))


@OFFLOAD_INPUTS
@pytest.mark.parametrize("kind", ["pinned_host", "device"])
def test_inside_shard_map(kind, offload_inputs):
    if kind == "device" and not offload_inputs:
        pytest.skip("nothing to move")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    stack, x = values(5, WIDTH, WIDTH, scale=1 / 6), values(16, WIDTH, seed=9)
    placed = jax.device_put(stack, NamedSharding(mesh, P(), memory_kind=kind))

    def f(w, x):
        y = jnp.tanh(x @ w)
        return y + jax.lax.pmean(y, "x")

    mapped = jax.shard_map(
        functools.partial(tb.scan_layers, f, offload_inputs=offload_inputs),
        mesh=mesh,
        in_specs=(P(), P("x")),
        out_specs=P("x"),
        check_vma=True,
    )

    def theirs(w, x):
        y = jnp.tanh(x @ w)
        return y + jnp.tile(y.reshape(8, 2, WIDTH).mean(0), (8, 1))

    ours = jax.jit(jax.grad(lambda s, x: (mapped(s, x) ** 2).sum(), argnums=(0, 1)))
    plain = jax.grad(lambda s, x: (reference(theirs, s, x) ** 2).sum(), argnums=(0, 1))
    dstack, dx = ours(placed, jax.device_put(x, NamedSharding(mesh, P("x"))))
    assert dstack.sharding.memory_kind == kind
    assert_close((dstack, dx), plain(stack, x))


def test_a_layer_may_itself_be_rematerialized():
    stack, x = layers(4), values(8, WIDTH, seed=9)
    ours = jax.grad(
        lambda x: (tb.scan_layers(jax.checkpoint(layer), tb.to_host(stack), x)).sum()
    )(x)
    assert_close(ours, jax.grad(lambda x: reference(layer, stack, x).sum())(x))


def test_without_compilation():
    stack, xs = values(3, 8, 8, scale=1 / 3), values(2, 3, 8, seed=9)
    host = tb.to_host(stack)
    with jax.disable_jit():
        result = tb.scan_layers(lambda w, x: jnp.tanh(x @ w), host, xs[0])
        grads = jax.vmap(jax.grad(functools.partial(squared, tb.scan_layers), (0, 1)))
        grads = grads(tb.to_host(jnp.stack([stack, stack])), xs)
        both = tb.overlap(
            jnp.sin,
            xs,
            fetch=host,
            offload=(xs, xs),
            out=(tb.to_host(jnp.zeros_like(xs)), tb.to_host(jnp.zeros_like(xs))),
        )
    assert_close(result, reference(lambda w, x: jnp.tanh(x @ w), stack, xs[0]))
    plain = jax.vmap(jax.grad(functools.partial(squared, reference), (0, 1)), (None, 0))
    assert_close(grads, plain(stack, xs))
    assert_close(both, (jnp.sin(xs), stack, (xs, xs)))
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(both)]
    assert kinds == ["device", "device", "pinned_host", "pinned_host"]


def test_second_call_with_other_shapes():
    def f(w, x):
        return jnp.tanh(x @ w)

    for width in (16, 24):
        stack, x = values(3, width, width, scale=0.2), values(8, width, seed=9)
        assert_close(tb.scan_layers(f, tb.to_host(stack), x), reference(f, stack, x))


def sends(w, x):
    """A layer that is at work where no core is: on the links' other direction."""
    return jnp.tanh(tb.to_device(tb.to_host(x)) @ w)


def test_each_row_is_fetched_once_forward_and_beside_a_layer():
    """On emulated links: the bytes that moved, and which of them at the same time."""
    num_layers, width = 6, 256
    stack = values(num_layers, width, width, scale=1 / 16)  # 256 KiB a layer
    host, x = tb.to_host(stack), values(width, width, seed=9)
    run = jax.jit(functools.partial(tb.scan_layers, sends))
    # 256 KiB take 20 ms.
    scale = (256 << 10) / 0.02 / 55e9
    with tb.configured(topology="2xh200", pooled=False, emulate=True, rate_scale=scale):
        result = run(host, x)
        assert_close(result, reference(lambda w, x: jnp.tanh(x @ w), stack, x))
        stats = tb.stats()
    assert stats.num_completed_bytes == 3 * stack.nbytes
    fetches, sent = [], []
    for one in stats.recent_transfers:
        (sent if one.direction == "d2h" else fetches).append(one)
    # Each layer sends x first of all, while the next layer comes in.
    num_beside = sum(
        any(
            f.submitted_ns < s.ended_ns and s.submitted_ns < f.ended_ns for f in fetches
        )
        for s in sent
    )
    assert len(sent) == num_layers
    assert num_beside == num_layers - 1


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "backward"])
def test_the_loop_starts_computes_and_ends_in_this_order(differentiated):
    """As XLA:CPU orders it and gives out memory: what its concurrency rests on."""
    host, x = tb.to_host(values(4, WIDTH, WIDTH)), values(8, WIDTH, seed=9)

    def run(stack, x):
        return tb.scan_layers(sends, stack, x).sum()

    run = jax.grad(run, argnums=(0, 1)) if differentiated else run
    hlo = jax.jit(run).lower(host, x).compile().as_text()
    assert "is_scheduled=true" in hlo
    bodies = [
        body
        for body in hlo[: hlo.index("\nENTRY")].split("\n}")
        if '_start"' in body and '_done"' in body
    ]
    assert len(bodies) == 1 + differentiated
    for body in bodies:
        start, compute, done = (
            [match.start() for match in re.finditer(target, body)]
            for target in ('_start"', 'turbobus_d2h_new"', '_done"')
        )
        assert max(start) < min(compute)
        assert max(compute) < min(done)
