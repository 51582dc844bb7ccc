"""Ctrl-C between any two lines of the engine, on a device that lags: nothing is wrong afterwards.

A trace function raises the interrupt, so each one comes at a known line. Signals come between
fewer instructions than lines are: never where a lock is taken or given back.
"""

from __future__ import annotations

import gc
import linecache
import sys
from typing import Any

import pytest
import torch

from tests.devices.lagging_machine import LaggingMachine
from tests.engine.looks import look_every

N = 6
NUMEL = 1024

NEVER = ("with ", "finally", "try:")
"""Lines at which CPython looks for no signals."""

STRIDE = 199
"""Every so manieth line is interrupted, unless the test is slow."""


class Interrupt:
    """Raises a KeyboardInterrupt at the n-th line of cswap that this thread runs."""

    def __init__(self, n):
        self._left = n

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _argument):
        path = frame.f_code.co_filename
        if "/cswap/" not in path or "/testing/" in path or frame.f_code.co_name == "__del__":
            return None  # Python swallows what a finaliser raises
        if event == "line" and self._counts(path, frame.f_lineno):
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace

    @staticmethod
    def _counts(path, line):
        return not linecache.getline(path, line).strip().startswith(NEVER)


class Training:
    """Steps of one engine that save the same tensors."""

    def __init__(self, patch, seed, codec):
        self.machine = LaggingMachine(patch, seed)
        self.machine.device.backlog_bytes = self.machine.device.ready_bytes = 3 * 4 * NUMEL
        self.engine = self.machine.engine(codec)

    def step(self):
        self.engine.begin_step()
        packed, values = self.machine.save(self.engine, N, NUMEL)
        self.machine.cuda.run_some(9)
        self.engine._unpacker._begin_with_kept()  # backward asks for one that stays
        while packed:
            back = self.engine.unpack(packed.pop())
            self.machine.use(back)
            assert torch.equal(back, values.pop())
            del back
        self.engine._end_backward()

    def interrupted(self, at):
        """Whether an interrupt at that line came before the step had ended."""
        try:
            with Interrupt(at):
                self.step()
        except KeyboardInterrupt:
            return True
        return False

    def held(self):
        """Bytes and entries that are left when nothing is saved."""
        engine, cuda = self.engine, self.machine.cuda
        engine.synchronize()
        engine.collect()
        stats, state = engine.stats, engine._state
        lane: Any = state.lanes._only
        link = lane.executor.link
        entries = len(link.alive), len(state.aliases.live()), len(state.results.waiting)
        leaving = link.sources.nbytes
        link.close()
        gc.collect()  # of a region that nobody came to know
        held = stats.device_bytes, stats.host_bytes, cuda.allocated_bytes, lane.host.in_use_bytes
        return (*held, leaving, *entries)


def test_an_interrupt_while_the_device_is_looked_at_is_noted(monkeypatch):
    """Sums may be off from then on."""
    engine = Training(monkeypatch, 0, "raw").engine
    with monkeypatch.context() as patch:
        patch.setattr(engine._state.lanes, "pump", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.collect()
    assert engine._state.interrupted
    engine.collect()
    assert not engine._state.interrupted


def interrupt():
    raise KeyboardInterrupt


def test_a_ctrl_c_where_backward_begins_with_a_tensor_that_stays(monkeypatch):
    look_every(monkeypatch, 1000)
    training = Training(monkeypatch, 0, "raw")
    engine, interrupted, line = training.engine, True, 0
    for _ in range(3):
        training.step()
    training.machine.cuda.synchronize()
    (link,) = engine._state.lanes.links
    while interrupted:
        line += 1
        engine.begin_step()
        packed, _ = training.machine.save(engine, N, NUMEL)
        engine.synchronize()
        link.let_go_down_to(0)
        interrupted = False
        try:
            with Interrupt(line):
                engine._unpacker._begin_with_kept()
        except KeyboardInterrupt:
            interrupted = True
        n_ahead = sum(region.ahead for region in link.alive)
        packed.clear()
        engine._end_backward()
        engine.synchronize()
        engine.collect()
        assert (engine.stats.device_bytes, link.ahead.nbytes) == (0, 0), line
    assert n_ahead > 1


@pytest.mark.parametrize(
    "stride", [STRIDE, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize(
    ("codec", "steps"),
    [("raw", 1), ("raw", 64), ("zvc", 1), ("zvc", 64)],
    ids=["raw", "slots raw", "zvc", "slots zvc"],
)
def test_a_ctrl_c_at_any_line_leaves_nothing_wrong_or_held(codec, steps, stride, monkeypatch):
    look_every(monkeypatch, steps)
    line = 1
    while True:
        with monkeypatch.context() as patch:
            training = Training(patch, line, codec)
            for _ in range(2):
                training.step()
            training.machine.cuda.synchronize()
            interrupted = training.interrupted(line)
            training.step()  # the training goes on
            held, faults = training.held(), training.machine.cuda.faults
            assert not any(held), (line, held)
            assert not faults, (line, faults)
        if not interrupted:
            break
        line += stride
    assert line > 900
