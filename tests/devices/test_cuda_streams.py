"""The current stream by torch's own C functions, against a fake of these."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import pytest
import torch

from cswap import cuda_streams
from cswap.devices.cuda import CudaStreams

KIND = 1


class FakeStream:
    made = 0

    def __init__(self, stream_id, device_index, device_type):
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type
        FakeStream.made += 1


class FakeTorch:
    """Two devices, each with a current stream; setting a stream makes its device current."""

    def __init__(self):
        self.device = 0
        self.streams = {0: (0, 0, KIND), 1: (0, 1, KIND)}
        self.capturing = False
        self.cuda = types.SimpleNamespace(Stream=FakeStream)
        self._C = types.SimpleNamespace(
            _cuda_getCurrentStream=lambda index: self.streams[index],
            _cuda_getDevice=lambda: self.device,
            _cuda_setDevice=lambda index: setattr(self, "device", index),
            _cuda_setStream=self.set_stream,
            _cuda_isCurrentStreamCapturing=lambda: self.capturing,
        )

    def set_stream(self, stream_id, device_index, device_type):
        self.device = device_index
        self.streams[device_index] = stream_id, device_index, device_type


@pytest.fixture
def fake(monkeypatch):
    made = FakeTorch()
    monkeypatch.setattr(cuda_streams, "torch", made)
    monkeypatch.setattr(cuda_streams, "_known", {})
    return made


def test_the_current_stream_is_made_once(fake):
    before = FakeStream.made
    first = cuda_streams.current(0)
    assert cuda_streams.current(0) is first
    assert cuda_streams.current(1) is not first
    assert FakeStream.made == before + 2


@pytest.mark.parametrize("here", [0, 1])
@pytest.mark.parametrize("index", [0, 1])
def test_what_was_entered_is_left(fake, here, index):
    fake.device = here
    fake.streams[index] = (5, index, KIND)
    before = dict(fake.streams)
    stream: Any = FakeStream(9, index, KIND)
    entered = cuda_streams.before(index)
    cuda_streams.enter(stream)
    assert fake.device == index
    assert fake.streams[index] == (9, index, KIND)
    assert cuda_streams.current(index).stream_id == 9
    cuda_streams.leave(entered)
    assert fake.device == here
    assert fake.streams == before


def test_an_interrupt_that_ends_enter_leaves_the_users_stream(fake, monkeypatch):
    def set_stream(**stream):
        fake.set_stream(**stream)
        if stream["stream_id"] == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(fake._C, "_cuda_setStream", set_stream)
    before = dict(fake.streams)
    made: Any = object.__new__(CudaStreams)
    made.before, made.enter = partial(cuda_streams.before, 0), cuda_streams.enter
    made.leave, made.codec = cuda_streams.leave, FakeStream(9, 0, KIND)
    with pytest.raises(KeyboardInterrupt):
        made.allocate(8)
    assert fake.streams == before


def test_capturing(fake):
    assert not cuda_streams.is_capturing()
    fake.capturing = True
    assert cuda_streams.is_capturing()


@pytest.mark.parametrize(
    "name", ["getCurrentStream", "getDevice", "setDevice", "setStream", "isCurrentStreamCapturing"]
)
def test_torch_has_them(name):
    if torch.version.cuda is None:
        pytest.skip("torch is built without CUDA")
    assert hasattr(torch._C, f"_cuda_{name}")
