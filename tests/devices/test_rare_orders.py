"""Orders of events over a link that are rare: on the stand-in, whose device runs when it is let."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from cswap.engine.saved.packed import PackedView
from cswap.engine.transfer import link_out
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.link_back import LinkBack
from tests.devices.lagging_machine import LaggingMachine

MIB = 1 << 20
NUMEL = 1 << 16


@pytest.fixture
def machine(monkeypatch):
    made = LaggingMachine(monkeypatch)
    yield made
    assert made.cuda.faults == []


def fails(*_):
    raise ValueError("on purpose")


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_a_region_with_gaps_that_comes_back_ahead(machine, codec):
    """It is gathered on a side stream, from memory that nobody else may be given before."""
    engine = machine.engine(codec)
    engine.begin_step()
    packed, values = [], []
    for i in range(6):
        whole = machine.tensor(NUMEL, i)
        x = whole.view(64, 1024)[:8, ::2]  # an eighth of its storage, with gaps
        packed.append(engine.pack(x))
        values.append(x.clone())
        assert packed[-1].token.handle.gathered
        del whole, x
    machine.cuda.synchronize()
    machine.device.pump()
    while packed:
        back = engine.unpack(packed.pop())
        machine.use(back)
        assert torch.equal(back, values.pop())
        del back
    assert engine.stats.prefetch_hits == 5


def test_a_tensor_is_copied_whose_encode_fails_when_its_size_is_asked_for(machine, monkeypatch):
    """It is read longer than its encode has been."""
    engine = machine.engine("zvc")
    monkeypatch.setattr(link_out, "checked_size", fails)
    packed, values = machine.save(engine, 1, NUMEL)
    handle = packed[0].token.handle
    while not handle.sections[0].out.query():  # the encode, and nothing else
        machine.cuda.run_some()
    machine.device.pump()
    assert handle.state is State.STORED
    assert not handle.sections[0].out.query()
    machine.tensor(NUMEL, 77)  # would be given the memory, had it been let go
    back = engine.unpack(packed[0])
    machine.use(back)
    assert torch.equal(back, values[0])
    assert engine.stats.fallbacks_by_reason == {"zvc:encode": 1}


@pytest.mark.parametrize("codec", ["zvc", "int8"])
def test_a_budget_holds_for_encodings_whose_size_is_not_known(machine, codec):
    """No callback keeps the memory of a tensor that was let go."""
    machine.device.backlog_bytes = machine.device.ready_bytes = 16 * MIB
    engine = machine.engine(codec, budget=2 * MIB)
    packed, _ = machine.save(engine, 24, MIB // 4)
    callbacks = machine.device._callbacks._due.values()
    held = [
        argument.untyped_storage().nbytes()
        for due in callbacks
        for _, callback in due
        for argument in getattr(callback, "args", ())
        if isinstance(argument, torch.Tensor)
    ]
    assert held == []
    packed.clear()
    machine.cuda.synchronize()
    engine.collect()


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _anchor, given):
        return given.pop()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_another_thread_brings_a_tensor_ahead_while_one_asks_for_it(machine, monkeypatch):
    engine = machine.engine("zvc")
    anchor = torch.zeros(1, requires_grad=True)
    x = _Result.apply(anchor, [machine.tensor(NUMEL, 1)])
    want = x.detach().clone()
    packed = [engine.pack(x), engine.pack(x.view(2, -1))]
    assert packed[0].token is packed[1].token
    del x
    machine.cuda.synchronize()
    machine.device.pump()
    machine.cuda.synchronize()
    token = packed[0].token
    token.lane.ahead = 0
    bring, others = LinkBack.bring, [token.lane.executor.prefetch]

    def meanwhile(self: Any, handle: Any, *rest: Any) -> Any:
        decoded = bring(self, handle, *rest)
        if others:
            assert others.pop()(handle)
        return decoded

    monkeypatch.setattr(LinkBack, "bring", meanwhile)
    for one in packed:
        assert isinstance(one, PackedView)
        back = engine.unpack(one)
        machine.use(back)
        assert torch.equal(back.view(-1), want)


@pytest.mark.parametrize("dies", [True, False])
def test_an_encoding_for_which_the_host_has_no_memory_is_counted_while_it_is_held(
    machine, monkeypatch, dies
):
    """It may have been let go while the host was asked."""
    engine = machine.engine("zvc")
    packed, values = machine.save(engine, 1, NUMEL)
    lane = engine._state.lanes._only
    lane.executor.let_go_down_to(0)
    monkeypatch.setattr(lane.host, "take", lambda _nbytes: None)
    if dies:
        machine.drop_in_take(engine, packed)
    machine.cuda.synchronize()
    machine.device.pump()
    engine.synchronize()
    assert (engine.stats.device_bytes > 0) is not dies
    if not dies:
        assert torch.equal(engine.unpack(packed.pop()), values[0])
    engine.collect()
    assert engine.stats.device_bytes == 0
    machine.cuda.synchronize()
    assert machine.device.scratch_in_use_bytes() == 0


class _InterruptedLock:
    # A lock whose first `acquire` is followed by a Ctrl-C.
    def __init__(self, lock):
        self._lock, self._armed = lock, True

    def acquire(self, blocking=True):
        got = self._lock.acquire(blocking=blocking)
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt
        return got

    def release(self):
        self._lock.release()

    def _is_owned(self):
        return self._lock._is_owned()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_a_ctrl_c_while_callbacks_begin_to_run_locks_nobody_out(machine):
    engine = machine.engine("zvc")
    packed, values = machine.save(engine, 2, NUMEL)
    engine._state.lanes._only.executor.let_go_down_to(0)
    callbacks = machine.device._callbacks
    lock = callbacks._running
    callbacks._running = _InterruptedLock(lock)
    machine.cuda.synchronize()
    with pytest.raises(KeyboardInterrupt):
        machine.device.pump()
    callbacks._running = lock
    found = []
    backward = threading.Thread(target=lambda: found.append(engine.unpack(packed[-1])), daemon=True)
    backward.start()
    backward.join(10)
    assert torch.equal(found[0], values[-1])
