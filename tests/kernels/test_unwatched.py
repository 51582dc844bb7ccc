"""The first step under a profiler: nothing that it saw run is gone when it reads its notes."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from numba.core.compiler_lock import global_compiler_lock

from cswap_kernels import jit
from cswap_kernels.unwatched import unwatched

FIRST_STEP = """
import torch, cswap
from torch.profiler import ProfilerActivity, profile
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
handle = cswap.install(model, codec="zvc", min_bytes=1)  # none is wanted too early
x = torch.randn(256, 64, requires_grad=True)
with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
    model(x).sum().backward()
assert handle.stats.swapped and not handle.stats.fallbacks
print(any(event.name.endswith("): unpack") for event in profiler.events()))
"""


def watch(function):
    """The thread that a function runs in while a profiler watches this one."""
    seen = {}

    def note(frame, event, _):
        if event == "call":
            seen[id(frame.f_code)] = frame.f_code.co_name, weakref.ref(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return result, seen


def test_without_a_profiler_a_call_is_a_call():
    assert unwatched(threading.current_thread) is threading.current_thread()


def test_under_a_profiler_another_thread_runs_it():
    thread, _ = watch(lambda: unwatched(threading.current_thread))
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_errors_come_back():
    with pytest.raises(ValueError, match="invalid literal"):
        watch(lambda: unwatched(int, "x"))


def test_no_code_is_gone_that_ran_while_a_kernel_was_compiled():
    @jit.njit()
    def inner(x):
        return x.sum()

    @jit.njit()
    def outer(x):
        return inner(x) + inner(x[::2])

    result, seen = watch(lambda: outer(np.arange(10)))
    assert result == 65
    assert [name for name, code in seen.values() if code() is None] == []


def test_a_kernel_is_compiled_while_another_one_is():
    # Its caller holds Numba's lock: another thread would wait for it forever.
    @jit.njit()
    def inner(x):
        return x + 1

    def compile_under_a_profiler():
        with global_compiler_lock:
            return watch(lambda: inner(1))[0]

    assert compile_under_a_profiler() == 2


@pytest.mark.slow  # the tests above are of its parts
def test_the_profilers_events_of_a_first_step_can_be_read():
    command = [sys.executable, "-c", FIRST_STEP]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
