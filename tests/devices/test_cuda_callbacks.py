"""The thread that runs callbacks of a CUDA device, with the driver and torch.cuda stood in for."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest

from cswap.devices import cuda_callbacks
from cswap.devices.cuda_callbacks import Callbacks


class FakeEvent:
    """Of one stream; fires when it is told to."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.pending, self.fired = stream, 0, False
        self.recorded = types.SimpleNamespace(synchronize=lambda: None)
        self.error = None

    def query(self) -> bool:
        return self.fired


@pytest.fixture
def callbacks(monkeypatch):
    stand_in = types.SimpleNamespace(cuda=types.SimpleNamespace(set_device=lambda _index: None))
    monkeypatch.setattr(cuda_callbacks, "torch", stand_in)
    made = Callbacks(0)
    yield made
    made.end()


def test_a_question_that_fails_does_not_end_the_thread(callbacks, caplog):
    """Another library may capture a CUDA graph meanwhile, in which events cannot be asked for."""
    event, ran, failures = FakeEvent(types.SimpleNamespace(cuda_stream=1)), threading.Event(), [1]

    def query():
        if failures and threading.current_thread() is not threading.main_thread():
            failures.pop()
            raise RuntimeError("operation not permitted when stream is capturing")
        return True

    event.query = query  # type: ignore[method-assign]
    callbacks.add(event, ran.set)
    assert ran.wait(10)
    assert "not permitted when stream is capturing" in caplog.text


def test_the_thread_may_ask_while_another_one_captures(callbacks, monkeypatch):
    modes = []
    driver = types.SimpleNamespace(
        CUstreamCaptureMode=types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="local"),
        cuThreadExchangeStreamCaptureMode=lambda mode: modes.append(
            (mode, threading.current_thread().name)
        ),
    )
    bindings: Any = types.ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    event, ran = FakeEvent(types.SimpleNamespace(cuda_stream=1)), threading.Event()
    event.fired = True
    callbacks.add(event, ran.set)
    assert ran.wait(10)
    assert modes == [("local", "cswap-cuda0")]
