"""What breaks on GPUs ends in direct copies or in an error with a name."""

import contextlib
import os
import re
import subprocess
import sys
import time

import pytest
from gpu_programs import PLATFORM, environment, run_python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(PLATFORM != "cuda", reason="about GPUs only"),
]

PRELUDE = """
import jax, numpy as np
import jax_turbobus as tb
from jax_turbobus import gpu, _ffi
from gpu_programs import *
_ffi.register()
x = random(100 * MIB, np.uint8)
def check(device=None):
    device = device or gpus()[0]
    d = jax.jit(tb.to_device)(on_host(x, device))
    assert_same_bytes(d, x)
    back = jax.jit(tb.to_host, donate_argnums=1)(d, on_host(x * 0, device))
    assert_same_bytes(back, x)
    return gpu.engine().raw()
def dropped(raw):
    return [p["dropped"] for p in raw["paths"] if p["dropped"]]
"""


@pytest.mark.multigpu
def test_a_relay_that_fails_is_dropped_with_a_reason():
    out = run_python(
        PRELUDE
        + """
check()
gpu.engine().library.inject_fault(1)
before = gpu.engine().raw()["num_pooled"]
for _ in range(3): raw = check()
print("reasons", dropped(raw))
print("lane", [l.reason for l in tb.stats().lanes if l.is_removed])
# The transfer that met it was pooled, the other way once more; then all is direct.
relays = len(gpus()) - 1
print("pooled", relays > 1 or raw["num_pooled"] - before <= 4)
"""
    )
    said = [line for line in out.splitlines() if "injected fault" in line]
    assert len(said) == 2, out
    assert "pooled True" in out


def test_disabled_is_one_plain_copy():
    out = run_python(
        PRELUDE + "raw = check(); print(raw['num_plain'], raw['num_pooled'])",
        JAX_TURBOBUS_DISABLE="1",
    )
    assert out.split()[-2:] == ["2", "0"]


def test_without_peer_access_transfers_are_direct():
    out = run_python(
        PRELUDE + "raw = check(); print(raw['num_pooled'], raw['num_direct'], "
        "len(raw['paths']) == 2 * len(gpus()))",
        JAX_TURBOBUS_PEER_ACCESS="0",
    )
    assert out.split()[-3:] == ["0", "2", "True"]


def test_one_visible_gpu_is_direct():
    out = run_python(
        PRELUDE + "raw = check(); print(raw['num_pooled'], len(gpus()))",
        CUDA_VISIBLE_DEVICES="0",
    )
    assert out.split()[-2:] == ["0", "1"]


@pytest.mark.multigpu
def test_gpus_in_another_order():
    out = run_python(
        PRELUDE + "raw = check(); raw = check(gpus()[1]); print(raw['num_pooled'])",
        CUDA_VISIBLE_DEVICES="1,0",
    )
    assert out.split()[-1] == "4"


@pytest.mark.multigpu
@pytest.mark.parametrize("allocator", ["platform", "cuda_async", "bfc"])
def test_every_allocator(allocator):
    """Each has memory of its own kind.

    https://github.com/openxla/xla/issues/48979
    https://github.com/openucx/ucx/issues/7110
    """
    out = run_python(
        PRELUDE
        + "raw = check(); raw = check(); print(raw['num_pooled'], dropped(raw))",
        XLA_PYTHON_CLIENT_ALLOCATOR=allocator,
    )
    pooled, reasons = out.splitlines()[-1].split(maxsplit=1)
    if allocator == "cuda_async":
        # Direct, as peers do not reach that memory.
        assert (pooled, reasons) == ("0", "[]")
    else:
        assert pooled == "4", out


@contextlib.contextmanager
def other_process(code, **environ):
    """A process that has said "ready"; killed when this is left."""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(**environ),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline().strip() == "ready"
            yield
        finally:
            process.kill()


@pytest.mark.multigpu
def test_another_process_that_lends_is_respected(tmp_path):
    holder = (
        PRELUDE + "check(); print('ready', flush=True); import time; time.sleep(60)"
    )
    environ = {"JAX_TURBOBUS_LOCK_DIR": str(tmp_path)}
    with other_process(holder, **environ):
        out = run_python(
            PRELUDE + "raw = check(); print(raw['num_pooled'], dropped(raw))", **environ
        )
        assert "another process lends" in out
    # Killed in the middle of whatever it does: its lock and memory go.
    time.sleep(0.5)
    out = run_python(PRELUDE + "raw = check(); print(raw['num_pooled'])", **environ)
    assert out.split()[-1] == "2"


def test_a_process_killed_in_the_middle_of_a_transfer_leaves_nothing(tmp_path):
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def used():
        return pynvml.nvmlDeviceGetMemoryInfo(handle).used

    victim = (
        PRELUDE
        + """
h = on_host(np.zeros(1 << 30, np.uint8), gpus()[0])
load = jax.jit(tb.to_device)
kept = [load(h).block_until_ready() for _ in range(8)]
print("ready", flush=True)
while True: kept[1:] = [load(h) for _ in range(7)]
"""
    )
    environ = {"JAX_TURBOBUS_LOCK_DIR": str(tmp_path)}
    with other_process(victim, **environ):
        time.sleep(0.2)
        before = used()
    # Other tests may be using the GPU, but not to this extent.
    for _ in range(100):
        if before - used() > 5 << 30:
            break
        time.sleep(0.1)
    assert before - used() > 5 << 30
    out = run_python(
        PRELUDE + "raw = check(); print(raw['num_pooled'], dropped(raw))", **environ
    )
    assert "another process" not in out


def test_a_profile_that_was_cut_short_is_ignored_and_said(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"format": "jax_turbobus/profile", "version": 1, "driv')
    out = run_python(
        PRELUDE + "check(); print(gpu.engine().remarks)",
        JAX_TURBOBUS_PROFILE=str(path),
    )
    assert "is no profile of version" in out


def test_a_topology_that_names_another_gpu_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "topology.json"
    path.write_text(
        """{"format": "jax_turbobus/topology", "version": 1, "name": "other",
        "numa_nodes": [{"id": "numa0"}],
        "gpus": [{"id": "gpu0", "numa_node": "numa0", "uuid": "GPU-not-here"}],
        "links": [{"id": "pcie0", "type": "pcie", "a": "numa0", "b": "gpu0",
        "a_to_b_bytes_per_s": 5e9, "b_to_a_bytes_per_s": 5e9, "latency_ns": 2000}]}"""
    )
    out = run_python(
        PRELUDE.replace("_ffi.register()", "")
        + """
try:
    check()
except ValueError as error:
    print("refused:", error)
""",
        JAX_TURBOBUS_TOPOLOGY=str(path),
    )
    assert "refused: JAX_TURBOBUS_TOPOLOGY" in out
    assert "GPU-not-here" in out


def test_more_bytes_than_host_memory_is_an_error_and_nothing_else():
    """https://github.com/openxla/xla/pull/20633."""
    out = run_python(
        PRELUDE
        + """
big = jax.device_put(jax.numpy.zeros(3 << 30, np.uint8), gpus()[0])
try:
    jax.block_until_ready(jax.jit(lambda v: tb.to_host(v))(big))
except Exception as error:
    print("refused:", type(error).__name__, str(error)[:300])
del big
check()
print("goes on")
""",
        # Of pinned host memory, for XLA.
        XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="2",
    )
    # XLA's words: what was asked for, in which memory.
    (refused,) = [line for line in out.splitlines() if line.startswith("refused: ")]
    assert re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory|[Ff]ailed to allocate", out)
    assert re.search(r"3221225472|3\.0+ ?GiB", refused), refused
    assert out.split()[-2:] == ["goes", "on"]


def test_a_forked_child_gets_an_error_not_a_hang():
    out = run_python(
        PRELUDE
        + """
import os, warnings
warnings.simplefilter("ignore")
check()
pid = os.fork()
if pid == 0:
    try:
        gpu.engine().raw()
    except Exception as error:
        print("child:", error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    )
    assert "CUDA does not survive a fork" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "visible", ["0", pytest.param("0,1", marks=pytest.mark.multigpu)]
)
def test_nothing_leaks(visible):
    count = int(os.environ.get("TURBOBUS_TEST_CALLS", "10000"))
    out = run_python(
        PRELUDE
        + f"""
import os, pynvml
pynvml.nvmlInit()
def memory():
    return [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(i)).used
            for i in range(len(gpus()))]
def rss():  # with page-locked memory
    return int(open("/proc/self/statm").read().split()[1]) * 4096
d0 = gpus()[0]
h = on_host(x[:8 * MIB], d0)
def step(h, out):
    d = tb.to_device(h)
    _, came, went = tb.overlap(lambda a: a + 1, d, fetch=h, offload=d, out=out)
    return went
step = jax.jit(step, donate_argnums=1)
out = on_host(x[:8 * MIB] * 0, d0)
def run(n):
    global out
    for _ in range(n): out = step(h, out)
    jax.block_until_ready(out)
run(200)
a = memory(), rss(), len(os.listdir("/proc/self/fd")), gpu.engine().raw()["num_events"]
run({count})
b = memory(), rss(), len(os.listdir("/proc/self/fd")), gpu.engine().raw()["num_events"]
print("device", [q - p for p, q in zip(a[0], b[0])], "rss", b[1] - a[1],
      "fds", b[2] - a[2], "events", b[3] - a[3],
      "in flight", gpu.engine().raw()["num_in_flight"])
assert max(q - p for p, q in zip(a[0], b[0])) <= 4 * MIB
assert b[1] - a[1] < 16 * MIB
assert b[2] <= a[2] and b[3] <= a[3] + 64
assert_same_bytes(out, x[:8 * MIB])
""",
        timeout_s=300,
        CUDA_VISIBLE_DEVICES=visible,
    )
    assert "in flight 0" in out


def test_programs_compiled_in_threads_at_first_use():
    """The engine starts once, whichever thread needs it first."""
    said = run_python(
        PRELUDE.replace("_ffi.register()", "")
        + """
import concurrent.futures, threading
import jax.numpy as jnp
together = threading.Barrier(8)
host = jax.device_put(jnp.arange(1000.0), jax.sharding.SingleDeviceSharding(
    gpus()[0], memory_kind="pinned_host"))
def use(i):
    together.wait()
    f = jax.jit(lambda x: tb.to_device(x) * i)
    return float(f.lower(host).compile()(host).sum())
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(use, range(8)))
assert found == [499500.0 * i for i in range(8)], found
print("done")
"""
    )
    assert said.rstrip().endswith("done")


@pytest.mark.multigpu
def test_two_threads_that_run_exchanges_in_crossed_order_end():
    """With results or with an error that says who waited, and never with a hang."""
    said = run_python(
        PRELUDE
        + """
import concurrent.futures
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from jax_turbobus import moe
n = 2
mesh = Mesh(np.array(gpus()[:n]), ("x",), axis_types=(AxisType.Auto,))
tokens = jnp.arange(n * 64 * 256, dtype=jnp.float32).reshape(n * 64, 256) % 7
ids = jnp.arange(n * 64 * 2, dtype=jnp.int32).reshape(n * 64, 2) * 3 % 8
def program(factor):
    def layer(x, ids):
        for _ in range(4):
            rows, _, state = moe.dispatch(
                x, ids, jnp.ones(ids.shape), num_experts=8, axis_name="x")
            x = moe.combine(rows * factor, state) / (2 * factor)
        return x
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return jax.jit(mapped).lower(tokens, ids).compile()
placed = jax.device_put((tokens, ids), jax.sharding.NamedSharding(mesh, P("x")))
programs = [program(2.0), program(4.0)]
for f in programs: np.testing.assert_array_equal(f(*placed), tokens)
def run(f):
    ends = []
    for _ in range(20):
        try:
            np.testing.assert_array_equal(f(*placed), tokens)
            ends.append("")
        except Exception as error:
            ends.append(str(error))
    return ends
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    ends = sum(pool.map(run, programs), [])
failed = [end for end in ends if end]
assert all("EXCHANGE_TIMEOUT_S" in end or "failed" in end for end in failed), failed
for f in programs: np.testing.assert_array_equal(f(*placed), tokens)
print("ended", len(ends), "failed", len(failed))
""",
        JAX_TURBOBUS_EXCHANGE_TIMEOUT_S="1",
        timeout_s=200,
    )
    assert "ended 40" in said
