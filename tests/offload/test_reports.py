"""Public bug reports about host memory, as far as CPU devices can show them.

The name of each test ends in the report that it is about. docs/reports.md has those
that no test shows.
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turbobus as tb
from jax_turbobus import sim
from jax_turbobus.topology import Topology

HOST = jax.memory.Space.Host
SOURCES = pathlib.Path(__file__).parent.parent.parent / "cc"


def values(shape=(64, 64), seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def busy(x):
    """Returns `x`. A program without a loop JAX runs on the caller's thread."""
    return x + 0 * jax.lax.fori_loop(0, 10, lambda _, y: jnp.cos(y), x)


def slow_links(size_bytes, seconds=0.2):
    """Emulated links on which so many bytes take so long."""
    scale = size_bytes / seconds / 55e9
    return tb.configured(
        topology="2xh200", pooled=False, emulate=True, rate_scale=scale
    )


def assert_same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_unpinned_numpy_is_refused_and_not_staged_in_silence_jax_20209():
    """https://github.com/jax-ml/jax/issues/20209"""
    with pytest.raises(TypeError, match=r"expected a jax\.Array, got numpy\.ndarray"):
        tb.to_device(np.arange(1024, dtype=np.float32))


def test_a_host_array_reads_as_numpy_without_a_second_copy_xla_12452():
    """https://github.com/openxla/xla/issues/12452"""
    host = tb.to_host(values((512, 512)))
    first, second = np.asarray(host), np.asarray(host)
    address = host.unsafe_buffer_pointer()
    assert first.__array_interface__["data"][0] == address
    assert second.__array_interface__["data"][0] == address


def test_a_result_outlives_its_source_deleted_in_flight_jax_24521():
    """https://github.com/jax-ml/jax/issues/24521"""
    x = values((512, 512))
    expected = np.array(x)
    move = jax.jit(lambda h, y: (tb.to_device(h), busy(y)))

    def attempt(k):
        host = tb.to_host(x)
        jax.block_until_ready(host)
        moved, _ = move(host, jnp.ones((8, 256)))
        host.delete()
        in_flight = not moved.is_ready()
        # The same memory, given out again while the transfer runs.
        others = [tb.to_host(jnp.full_like(x, 7.0)) for _ in range(2)]
        assert_same(moved, expected)
        assert_same(others[0], np.full_like(expected, 7))
        return in_flight

    with slow_links(x.nbytes):
        assert sum(map(attempt, range(3))) or any(map(attempt, range(3, 12)))


def test_rows_of_a_host_array_are_updated_by_a_traced_index_xla_34565():
    """There, x.at[i].set(y) on a host array aborts the process.

    https://github.com/openxla/xla/issues/34565
    """
    stack, rows = values((10, 256)), values((5, 256), seed=1)

    def update(stack, rows, indices):
        def body(stack, i):
            return tb.store(stack, indices[i], rows[i]), None

        return jax.lax.scan(body, stack, jnp.arange(5))[0]

    indices = jnp.array([7, 0, 3, 9, 4])
    stored = jax.jit(update, donate_argnums=0)(tb.to_host(stack), rows, indices)
    assert stored.sharding.memory_kind == "pinned_host"
    assert_same(stored, stack.at[indices].set(rows))


@pytest.mark.parametrize("kept", ["results", "residuals"])
def test_a_requested_offload_happens_or_is_an_error_jax_23869(kept):
    """There, one in a scanned body is dropped without a word.

    https://github.com/jax-ml/jax/issues/23869
    """
    x, ws = values((64, 64)), values((4, 64, 64), 1) / 8

    def run(there, back):
        def body(x, w):
            y = there(jnp.sin(x))
            return jnp.tanh(back(y) @ w), y if kept == "results" else None

        def loss(x):
            last, ys = jax.lax.scan(body, x, ws)
            return (last**2).sum(), ys

        return jax.jit(jax.grad(loss, has_aux=True))

    with tb.configured(topology="2xh200", pooled=False, emulate=True):
        before = tb.stats().num_completed_bytes
        grad, ys = jax.block_until_ready(run(tb.to_host, tb.to_device)(x))
        moved = tb.stats().num_completed_bytes - before
    expected, expected_ys = run(lambda y: y, lambda y: y)(x)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)
    # There and back forward, and so does the cotangent, for each of four layers.
    assert moved == 4 * 4 * x.nbytes
    if kept == "results":
        assert ys.sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(ys, expected_ys, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_shard_map", [False, True])
def test_a_host_operand_is_never_a_device_copy_xla_23152(in_shard_map):
    """https://github.com/openxla/xla/issues/23152"""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    x = jax.device_put(values((1 << 10, 256)), sharding)
    f = tb.to_device
    if in_shard_map:
        f = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    host = tb.to_host(x)
    assert_same(jax.jit(f)(host), x)
    with pytest.raises(ValueError, match="expected memory kind 'pinned_host'"):
        jax.jit(f).lower(x)  # refused while tracing


def test_a_transfer_beside_a_computation_in_a_loop_xla_18139():
    """There, host copies are not overlapped until the scheduler knows them.

    https://github.com/openxla/xla/pull/18139
    """
    x = values((256, 256))
    host = tb.to_host(values((256, 256), seed=1))

    def body(x, _):
        # Work that needs no core: the links' other direction.
        y, fetched, _ = tb.overlap(
            lambda x: tb.to_device(tb.to_host(jnp.sin(x))), x, fetch=host
        )
        return y + fetched, None

    program = jax.jit(lambda x: jax.lax.scan(body, x, None, length=3)[0])
    with slow_links(x.nbytes, seconds=0.02):
        result = jax.block_until_ready(program(x))
        moved = tb.stats().recent_transfers
    expected = x
    for _ in range(3):
        expected = jnp.sin(expected) + tb.to_device(host)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    sent = [t for t in moved if t.direction == "d2h"][-3:]
    fetched = [t for t in moved if t.direction == "h2d"]
    for s in sent:
        assert any(
            t.submitted_ns < s.ended_ns and s.submitted_ns < t.ended_ns for t in fetched
        )


def test_a_million_elements_that_differ_every_time_warp_1446():
    """There, calls lowered for the CPU gave wrong results by luck of timing.

    https://github.com/NVIDIA/warp/pull/1446
    """
    x = jnp.arange(1 << 20, dtype=jnp.int32)
    move = jax.jit(lambda x, k, out: tb.to_host(x + k, out), donate_argnums=2)
    out = tb.to_host(jnp.zeros_like(x))
    expected = np.array(x)
    for k in range(1000):
        out = move(x, k, out)
        if k % 5 == 0:
            np.testing.assert_array_equal(np.asarray(out), expected + k)
    assert_same(out, expected + 999)


def test_a_source_donated_while_it_is_being_read_prime_rl_3109():
    """There, a source was reused before the bytes had left it.

    https://github.com/PrimeIntellect-ai/prime-rl/pull/3109
    """
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    offload = jax.jit(lambda x, y: (tb.to_host(x), busy(y)))

    def attempt(k):
        x = jax.block_until_ready(values((512, 512), seed=k))
        expected, address = np.array(x), x.unsafe_buffer_pointer()
        host, _ = offload(x, jnp.ones((8, 256)))
        in_flight = not host.is_ready()
        overwritten = overwrite(x)
        assert_same(host, expected)
        assert_same(overwritten, np.full_like(expected, -1))
        return in_flight and overwritten.unsafe_buffer_pointer() == address

    with slow_links(512 * 512 * 4):
        assert sum(map(attempt, range(3))) or any(map(attempt, range(3, 12)))


def test_only_the_row_changes_and_its_neighbours_do_not_ucx_11724():
    """There, an offset inside an allocation was lost on the way.

    https://github.com/openucx/ucx/issues/11724
    """
    for dtype, width in ((jnp.float32, 33), (jnp.int8, 129), (jnp.int4, 258)):
        stack = jnp.ones((9, 3, width), dtype) * 5
        store = jax.jit(tb.store, donate_argnums=0)
        for i in range(9):
            row = jnp.full((3, width), 2, dtype)
            stored = store(tb.to_host(stack), i, row)
            assert_same(stored, stack.at[i].set(row))


def test_restoring_state_makes_no_second_copy_of_it_marin_8480():
    """There, restoring pinned state took twice its size and was killed for it.

    https://github.com/marin-community/marin/pull/8480
    """
    chunk = values((4, 1 << 14))
    host = tb.to_host(jnp.zeros((64, 4, 1 << 14), jnp.float32))
    address = host.unsafe_buffer_pointer()
    for i in range(64):
        host = tb.store(host, i, chunk + i)
        assert host.unsafe_buffer_pointer() == address
    expected = np.asarray(chunk) + np.arange(64, dtype=np.float32)[:, None, None]
    assert_same(host, expected)


def test_all_devices_at_once_stay_exact_megatron_6491():
    """https://github.com/NVIDIA/Megatron-LM/issues/6491"""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(values((256, 64)), NamedSharding(mesh, P("x")))
    step = jax.jit(lambda x, k: tb.to_device(tb.to_host(x + k)))
    with tb.configured(topology="dgx-v100", emulate=True, rate_scale=1e-3):
        for k, result in enumerate([step(x, k) for k in range(10)]):
            assert_same(result, x + k)


@pytest.mark.parametrize("machine", ["2xh200", "dgx-v100", "8xh800"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_links_of_busy_devices_are_not_lent_megatron_6491(machine, direction):
    """There, a plan counted on the links of GPUs that were busy themselves.

    https://github.com/NVIDIA/Megatron-LM/issues/6491
    """
    topology = Topology.load(machine)

    def simulated(gpus):
        transfers = [sim.Transfer(g, 1 << 30, direction=direction) for g in gpus]
        pooled = sim.simulate(topology, transfers)
        direct = sim.simulate(topology, transfers, "direct")
        return pooled, pooled.makespan_ns / direct.makespan_ns

    busy, slowdown = simulated(range(len(topology.gpus)))
    assert slowdown <= 1.02
    for block in busy.blocks:
        lender = re.search(r" via gpu(\d+)", busy.lane_names[block.lane])
        # A GPU that is through with its own bytes may help the others.
        assert lender is None or block.issue_ns >= busy.finish_ns[int(lender[1])]
    idle, slowdown = simulated([0])  # and those of idle ones are
    lanes = idle.bytes_by_lane()
    relayed = sum(size for lane, size in lanes.items() if " via " in lane)
    assert relayed > 0.3 * sum(lanes.values())
    assert slowdown < 0.8


def with_narrow_links(machine):
    """Returns a shipped machine whose PCIe links carry 1.4 ways' bytes both ways."""
    found = json.loads(Topology.load(machine).to_json())
    for link in found["links"]:
        if link["type"] == "pcie":
            both = link["a_to_b_bytes_per_s"] + link["b_to_a_bytes_per_s"]
            link["duplex_bytes_per_s"] = 0.7 * both
    return Topology.from_json(json.dumps(found))


@pytest.mark.parametrize(
    "machine", ["2xh200", "dgx-v100", "8xh800", "4xrtx4090", "rtx3090-pairs"]
)
def test_neither_direction_starves_the_other_nvbandwidth_53(machine):
    """There, one direction falls below half of its rate, and the other keeps all.

    https://github.com/NVIDIA/nvbandwidth/issues/53
    """
    topology = with_narrow_links(machine)
    both = [sim.Transfer(0, 1 << 30, direction=way) for way in ("h2d", "d2h")]
    pooled = sim.simulate(topology, both)
    for one, duration in zip(both, pooled.durations_ns, strict=True):
        assert duration < 1.5 * sim.simulate(topology, [one], "direct").makespan_ns
    direct = sim.simulate(topology, both, "direct")
    assert pooled.makespan_ns <= 1.01 * direct.makespan_ns
    # Nor than the best way to share them out beforehand.
    equal = sim.simulate(topology, both, "equal")
    assert pooled.makespan_ns <= 1.06 * equal.makespan_ns


def test_no_host_memory_is_registered_vllm_51080_vllm_55428():
    """There, registering 512 GiB at once fails, and on some machines any.

    Whoever needs it here: in parts, and with another way where it is refused.
    https://github.com/vllm-project/vllm/issues/51080
    https://github.com/vllm-project/vllm/issues/55428
    """
    sources = [path for path in SOURCES.rglob("*") if path.suffix in (".cc", ".cu")]
    assert len(sources) > 100
    calls = ("cudaHostRegister(", "cuMemHostRegister(")
    users = [p.name for p in sources if any(call in p.read_text() for call in calls)]
    assert not users


def test_a_device_that_the_topology_lacks_is_an_error_that_names_it():
    x = jax.device_put(values(), jax.devices()[7])
    refused = pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=r"jax_turbobus: .*gpu 7"
    )
    with tb.configured(topology="2xh200", emulate=True), refused:
        jax.block_until_ready(tb.to_host(x))
    assert_same(tb.to_host(x), x)
