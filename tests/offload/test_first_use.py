"""The libraries are loaded and started once, whichever threads need them first."""

import subprocess
import sys
import threading
import time

import pytest

from jax_turbobus import _ffi

THREADS = 8


def test_threads_that_come_first_together_run_it_once():
    calls = []
    together = threading.Barrier(THREADS)

    @_ffi._once
    def load():
        calls.append(threading.get_ident())
        time.sleep(0.05)
        return object()

    found = []

    def use():
        together.wait()
        found.append(load())

    threads = [threading.Thread(target=use) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len({id(one) for one in found}) == 1


def test_what_failed_is_tried_again():
    answers = [ImportError("not yet"), "there"]

    @_ffi._once
    def load():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ImportError, match="not yet"):
        load()
    assert load() == load() == "there"


# Programs compiled in threads, before anything else was.
CODE = """
import concurrent.futures, threading
import jax, jax.numpy as jnp
import jax_turbobus as jtb
together = threading.Barrier(8)
host = jax.device_put(jnp.arange(1000.0), jax.sharding.SingleDeviceSharding(
    jax.devices()[0], memory_kind="pinned_host"))
def use(i):
    together.wait()
    f = jax.jit(lambda x: jtb.to_device(x) * i)
    return float(f.lower(host).compile()(host).sum())
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(use, range(8)))
assert found == [499500.0 * i for i in range(8)], found
"""


def test_programs_compiled_in_threads_at_first_use():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


# A data loader's worker, say, started while another thread loads the libraries.
FORK = """
import os, signal, threading, warnings
warnings.simplefilter("ignore")
from jax_turbobus import _ffi
loads, go_on = threading.Event(), threading.Event()
@_ffi._once
def slow():
    loads.set()
    go_on.wait()
thread = threading.Thread(target=slow)
thread.start()
loads.wait()
child = os.fork()
if not child:
    signal.alarm(5)
    os._exit(_ffi._once(lambda: 7)())
go_on.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
thread.join()
"""


def test_a_child_forked_during_first_use_does_not_wait_for_its_parents_threads():
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
