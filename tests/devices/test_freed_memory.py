"""The C library keeps freed memory while a CPU's tensors are swapped: no step takes fresh pages."""

import gc

import pytest
import torch

from cswap.config import SwapConfig
from cswap.devices import freed_memory
from cswap.devices.freed_memory import (
    END_KEPT,
    FIRST_GIVEN_BACK,
    LARGEST_IN_HEAP,
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    NEVER,
    WISHES,
    FreedMemory,
)
from cswap.engine.engine import SwapEngine

IN_HEAP = (M_MMAP_THRESHOLD, LARGEST_IN_HEAP)

TRAINING = """
import resource
import torch
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine

MIB = 1 << 20

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
engine = SwapEngine(SwapConfig(codec="raw", min_bytes=0, remat=False))

def step():
    engine.begin_step()
    packed = [engine.pack(torch.zeros(MIB)) for _ in range(12)]  # 4 MiB each
    while packed:
        engine.unpack(packed.pop())
    engine.collect()

for _ in range(8):  # places become known, and the heap takes its form
    step()
found = []
for _ in range(5):  # the thread that frees memory may be late in one of them
    before = faults()
    step()
    found.append(faults() - before)
print(sorted(found)[2])
held = resident()
engine.close()
print((held - resident()) // MIB)
"""


@pytest.mark.skipif(freed_memory._libc() is None, reason="glibc alone is told")
def test_steps_take_no_fresh_pages_and_the_memory_goes_back_at_the_end(forked):
    ran = forked.run(TRAINING)
    assert ran.returncode == 0, ran.stderr
    faults_per_step, given_back_mib = map(int, ran.stdout.split())
    assert faults_per_step < 1000  # 48 MiB are 12288 pages
    assert given_back_mib > 24


class Libc:
    """Notes what it is told."""

    def __init__(self, *, knows=True):
        self.told, self.trims, self._knows = [], 0, knows

    def mallopt(self, name, value):
        self.told.append((name, value))
        return int(self._knows)

    def malloc_trim(self, _pad):
        self.trims += 1


@pytest.fixture
def libc(monkeypatch):
    made = Libc()
    monkeypatch.setattr(freed_memory, "_glibc", lambda: made)
    monkeypatch.setattr(freed_memory, "_holders", set())
    for name in (*WISHES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_the_last_one_ends_it(libc):
    first, second = FreedMemory(), FreedMemory()
    kept = [IN_HEAP, (M_TRIM_THRESHOLD, NEVER)]
    assert libc.told == kept
    first.release()
    first.release()
    assert (libc.told, libc.trims) == (kept, 0)
    second.release()
    assert libc.told == [*kept, IN_HEAP, (M_TRIM_THRESHOLD, END_KEPT)]
    assert libc.trims == 1


def test_one_that_is_gone_ends_it_and_a_successor_finds_the_memory(libc):
    FreedMemory()
    gc.collect()
    assert libc.told[-1] == (M_TRIM_THRESHOLD, END_KEPT)
    assert libc.trims == 0


def test_memory_of_the_first_steps_goes_back(libc):
    freed, at = FreedMemory(), []
    for backward in range(1, 65 * FIRST_GIVEN_BACK):
        before = libc.trims
        freed.backward_ended()
        if libc.trims > before:
            at.append(backward)
    assert at == [FIRST_GIVEN_BACK * n for n in (1, 4, 16, 64)]
    freed.release()
    trims = libc.trims
    for _ in range(200 * FIRST_GIVEN_BACK):
        freed.backward_ended()
    assert libc.trims == trims


@pytest.mark.parametrize(
    ("name", "value"),
    [*[(wish, "131072") for wish in WISHES], ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")],
)
def test_a_users_wish_is_left_alone(name, value, libc, monkeypatch):
    monkeypatch.setenv(name, value)
    FreedMemory().release()
    assert (libc.told, libc.trims) == ([], 0)


def test_tunables_of_something_else_are_no_wish(libc, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    FreedMemory().release()
    assert libc.told


def test_a_parameter_that_is_not_known_does_no_harm(libc, monkeypatch):
    monkeypatch.setattr(libc, "_knows", False)
    FreedMemory().release()
    assert set(libc.told) == {IN_HEAP}


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(freed_memory, "_glibc", lambda: None)
    monkeypatch.setattr(freed_memory, "_holders", set())
    FreedMemory().release()


def test_an_engine_holds_it_from_the_first_tensor_until_it_is_closed(libc):
    engine = SwapEngine(SwapConfig(codec="raw", min_bytes=0))
    assert libc.told == []
    packed = engine.pack(torch.zeros(1 << 10).relu())
    assert libc.told[-1] == (M_TRIM_THRESHOLD, NEVER)
    leaf = torch.ones(1 << 10, requires_grad=True)
    for _ in range(FIRST_GIVEN_BACK):
        with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
            y = (leaf * 2.0).exp()
        y.sum().backward()
    assert libc.trims == 1
    engine.close()
    assert libc.told[-1] == (M_TRIM_THRESHOLD, END_KEPT)
    assert torch.equal(engine.unpack(packed), torch.zeros(1 << 10))
