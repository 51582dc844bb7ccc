"""Workers that die, codecs that lie, interrupts inside jobs: never stuck, never wrong."""

from __future__ import annotations

import ctypes
import threading
import time
from itertools import count

import pytest
import torch

import cswap
from cswap.codecs.base import Codec
from cswap.codecs.registry import get_codec
from cswap.config import SwapConfig
from cswap.devices import cpu as cpu_module
from cswap.devices.cpu import CpuDevice
from cswap.engine.engine import SwapEngine
from cswap.errors import InternalError, UnsupportedError, to_raise, without_frames
from cswap.hooks import Swapping
from tests.engine.engines import assert_empty

N = 1 << 14


class Raw(Codec):
    """The bytes themselves; subclasses are wrong in one thing."""

    name, lossless, max_ratio = "wrong", True, 1

    def __init__(self):
        self._raw = get_codec("raw")

    def supports(self, dtype, device="cpu"):
        return True

    def bound(self, dtype, numel):
        return self._raw.bound(dtype, numel)

    def encode_flat(self, x, out, *, key, stream):
        return self._raw.encode_flat(x, out, key=key, stream=stream)

    def decode_flat(self, payload, out, *, stream):
        self._raw.decode_flat(payload, out, stream=stream)


def registered(codec):
    """A name under which the engine finds this codec."""
    codec.name = f"wrong-{next(_numbers)}"
    cswap.register_codec(codec.name, lambda: codec)
    return codec.name


_numbers = count()


def engine_on(device, codec="zvc"):
    name = codec if isinstance(codec, str) else registered(codec)
    return SwapEngine(SwapConfig(min_bytes=0, codec=name, remat=False), device=device)


def gradient(engine, x):
    with Swapping(engine):
        y = ((x * 2).sin() * (x * 3).cos()).sum()
    return torch.autograd.grad(y, x)[0]


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, generator=generator).requires_grad_()


@pytest.fixture
def expected(x):
    return torch.autograd.grad(((x * 2).sin() * (x * 3).cos()).sum(), x)[0]


# ------------------------------------------------------------- codecs that lie

WRONG_SIZES = [-1, "bound + 1", None, 0.5, "text", 1 << 70]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", WRONG_SIZES, ids=str)
def test_a_wrong_size_is_a_failure_of_the_codec(x, expected, workers, size):
    class Wrong(Raw):
        def encode_flat(self, x, out, *, key, stream):
            super().encode_flat(x, out, key=key, stream=stream)
            return self.bound(x.dtype, x.numel()) + 1 if size == "bound + 1" else size

    run_with(Wrong(), x, expected, workers)
    with pytest.raises(InternalError, match="encode_flat gave"):
        Wrong().encode(x.detach())


@pytest.mark.parametrize("bound", [-1, None, 1.5, "much"], ids=str)
def test_a_wrong_bound_is_a_failure_of_the_codec(x, expected, bound):
    class Wrong(Raw):
        def bound(self, dtype, numel):
            return bound

    run_with(Wrong(), x, expected, 0)
    with pytest.raises(InternalError, match="bound gave"):
        Wrong().encode(x.detach())


def run_with(codec, x, expected, workers):
    engine = engine_on(CpuDevice(workers), codec)
    assert torch.equal(gradient(engine, x), expected)
    engine.synchronize()
    stats = engine.stats
    assert set(stats.fallbacks_by_reason) <= {f"{codec.name}:encode"}
    assert stats.fallbacks + stats.kept_by_reason.get("wanted_early", 0) >= 4
    assert set(stats.by_codec) <= {"raw"}
    assert_empty(engine)


def test_a_numpy_integer_is_a_size(x):
    import numpy as np

    class Right(Raw):
        def encode_flat(self, x, out, *, key, stream):
            return np.int64(super().encode_flat(x, out, key=key, stream=stream))

    codec = Right()
    assert torch.equal(codec.decode(codec.encode(x.detach())), x.detach())


def test_supports_that_raises_is_a_refusal(x, expected):
    class Picky(Raw):
        def supports(self, dtype, device="cpu"):
            raise RuntimeError("who knows")

    codec = Picky()
    engine = engine_on(CpuDevice(0), codec)
    assert torch.equal(gradient(engine, x), expected)
    assert engine.stats.fallbacks == 0
    assert codec.name not in engine.stats.by_codec
    with pytest.raises(UnsupportedError):
        Picky().encode(x.detach())


# ------------------------------------------------------------- workers that die


def kill(thread):
    """Raise SystemExit in a thread, wherever it is."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )


POINTS = ["claim", "_run", "_run_job", "fire", "_call"]


@pytest.mark.parametrize("role", ["codec", "h2d"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_worker_that_dies_anywhere_hangs_nobody(monkeypatch, point, after, role):
    """Its job is run by who waits for it, and counted."""
    device = CpuDevice(1)
    owner = CpuDevice if point.startswith("_run") else cpu_module.CpuEvent
    real = getattr(owner, point)
    died: list[str] = []

    def dies(self, *args, **more):
        on_worker = threading.current_thread().name.startswith("cswap-worker")
        if on_worker and not died and not after:
            died.append(point)
            raise Dead
        result = real(self, *args, **more)
        if on_worker and not died:
            died.append(point)
            raise Dead
        return result

    monkeypatch.setattr(owner, point, dies)
    monkeypatch.setattr(cpu_module._Worker, "_one", lambda self, event: self._work(event))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    ran, called = [], []
    event = device.submit(lambda _: ran.append(1), role=role)
    device.when(event, lambda: called.append(1))
    deadline = time.monotonic() + 10
    while not died and time.monotonic() < deadline:
        time.sleep(0.001)
    assert died
    device.wait(event)
    assert ran
    assert called
    assert event.query()
    assert device.lost_jobs <= 1


class Dead(BaseException):
    """Ends a worker."""


def test_a_backward_whose_workers_died_is_right_and_says_so(x, expected, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = engine_on(CpuDevice(2))
    lost = []
    real = CpuDevice._run_job

    def dies(self, event, stream):
        if threading.current_thread().name.startswith("cswap-worker"):
            lost.append(1)
            raise Dead
        real(self, event, stream)

    monkeypatch.setattr(CpuDevice, "_run_job", dies)
    monkeypatch.setattr(cpu_module._Worker, "_one", lambda self, event: self._work(event))
    for step in range(2000):  # on a busy machine the main thread is first at many jobs
        assert torch.equal(gradient(engine, x), expected)
        if step >= 2 and lost:
            break
    engine.synchronize()
    assert lost
    assert_empty(engine)


def test_a_lost_job_is_counted(x, monkeypatch):
    device = CpuDevice(1)
    engine = engine_on(device)
    gradient(engine, x)
    monkeypatch.setattr(device, "_lost_jobs", 3)
    assert engine.stats.fallbacks_by_reason["worker"] == 3


# ------------------------------------------------------------- interrupts inside of jobs


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["encode_flat", "decode_flat"])
def test_an_interrupt_in_a_job_goes_up_and_the_next_step_is_right(x, expected, error, where):
    class Interrupted(Raw):
        due = 4  # after the first use, which is by itself

    def interrupt(self, *args, **more):
        self.due -= 1
        if self.due == 0:
            raise error
        return getattr(Raw, where)(self, *args, **more)

    setattr(Interrupted, where, interrupt)
    engine = engine_on(CpuDevice(0), Interrupted())
    with pytest.raises(error):
        gradient(engine, x)
    assert torch.equal(gradient(engine, x), expected)
    assert engine.stats.fallbacks == 0
    assert_empty(engine)


def test_a_graph_survives_an_interrupt_in_its_backward(x):
    """With retain_graph the same backward can be run again."""

    class Interrupted(Raw):
        due = 2  # after the first use, which is by itself

        def decode_flat(self, payload, out, *, stream):
            self.due -= 1
            if self.due == 0:
                raise KeyboardInterrupt
            super().decode_flat(payload, out, stream=stream)

    engine = engine_on(CpuDevice(1), Interrupted())
    with Swapping(engine):
        y = (x * 2).sin().sum()
    engine.synchronize()
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(y, x, retain_graph=True)
    (found,) = torch.autograd.grad(y, x)
    assert torch.equal(found, (x * 2).cos() * 2)
    del y
    assert_empty(engine)


def test_errors_that_are_kept_have_no_frames_and_those_that_are_raised_are_copies():
    try:
        try:
            int("inner")
        except ValueError as inner:
            raise cswap.CorruptEncodingError("outer") from inner
    except cswap.CorruptEncodingError as error:
        kept = without_frames(error)
    assert kept.__traceback__ is None
    assert kept.__cause__ is not None
    assert kept.__cause__.__traceback__ is None
    for _ in range(2):
        with pytest.raises(cswap.CorruptEncodingError, match="outer"):
            raise to_raise(kept)
    assert kept.__traceback__ is None

    class OddError(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    assert "odd" in str(to_raise(OddError("odd", 2)))


# ------------------------------------------------------------- faults between claim and run


class _Fault:
    """A trace function that raises at one line of a thread's way from a job's claim to its run.

    Attributes:
        raised: whether the way had that many lines.
    """

    def __init__(self, at: int, error: type[BaseException], ran: list[int]) -> None:
        self._left, self._error, self._ran = at, error, ran
        self._begun: dict[int, set[int]] = {}
        self.raised = False

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != CPU_SOURCE or frame.f_code.co_name in SETTING_UP:
            return None
        if event == "line" and not self.raised and not self._ran:
            # A second time at a `with` is its end, before the lock is given back: Python raises
            # nothing there.
            seen = self._begun.setdefault(id(frame), set())
            if frame.f_lineno not in seen:
                seen.add(frame.f_lineno)
                self._left -= 1
                if self._left < 0:
                    self.raised = True
                    raise self._error
        return self


CPU_SOURCE = CpuDevice._run.__code__.co_filename
SETTING_UP = ("_loop", "_start", "submit", "start", "sleep")


@pytest.fixture
def fault_of():
    """Makes threads begin with a `_Fault`, until the test ends."""

    def set_fault(fault):
        threading.settrace(fault)
        return fault

    before = threading.gettrace()
    yield set_fault
    threading.settrace(before)


def appends(to, value):
    return lambda *_: to.append(value)


def waits_for(event):
    return lambda _: event.wait(60)


def waited_for(device, event):
    """Wait in a thread of its own; whether that came to an end."""
    waiter = threading.Thread(target=device.wait, args=(event,), daemon=True)
    waiter.start()
    waiter.join(20)
    return not waiter.is_alive()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_fault_of_a_worker_at_each_line_before_its_job_hangs_nobody(fault_of, error, monkeypatch):
    """The job is run, or its error is told; its callbacks and the next job are run."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    points = lost = 0
    for at in count():
        device = CpuDevice(1)
        ran: list[int] = []
        called: list[int] = []
        fault = fault_of(_Fault(at, error, ran))
        event = device.submit(appends(ran, 1), role="codec")
        threading.settrace(None)
        device.when(event, appends(called, 1))
        deadline = time.monotonic() + 20
        while not (ran or fault.raised) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert waited_for(device, event), f"line {at} before the job"
        assert ran == [1] or isinstance(event.error, (MemoryError, RuntimeError))
        assert called == [1]
        ran[:] = [1]
        following = device.submit(appends(ran, 2), role="codec")
        assert waited_for(device, following)
        assert ran == [1, 2]
        device.end()
        if not fault.raised:
            break
        lost += device.lost_jobs
        points += 1
    assert points > 10
    assert points > lost > 0  # the others were not claimed yet


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_fault_of_a_waiter_at_each_line_before_its_job_hangs_nobody_else(fault_of, error):
    """It reaches its own caller, whose thread lives on; another thread gets the job's result."""
    points = 0
    for at in count():
        device, go_on = CpuDevice(1), threading.Event()
        ran: list[int] = []
        device.submit(waits_for(go_on), role="codec")  # the worker is busy
        event = device.submit(appends(ran, 1), role="codec")
        leave = threading.Event()
        found: list[type[BaseException]] = []

        def waits(device=device, event=event, found=found, leave=leave):
            try:
                device.wait(event)
            except BaseException as raised:
                found.append(type(raised))
            leave.wait(60)

        fault = fault_of(_Fault(at, error, ran))
        first = threading.Thread(target=waits, daemon=True)
        first.start()
        threading.settrace(None)
        deadline = time.monotonic() + 20
        while not (ran or found or event.query()) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert waited_for(device, event), f"line {at} before the job"
        told = isinstance(event.error, MemoryError)  # of a job that began: its error
        assert ran == ([] if told else [1])
        leave.set()
        go_on.set()
        device.end()
        assert found == ([error] if fault.raised and not told else [])
        if not fault.raised:
            break
        points += 1
    assert points > 10
