"""CudaDevice and the launcher without a GPU, against a fake of torch.cuda and of the driver.

Streams run at once, events fire late.
"""

from __future__ import annotations

import ctypes
import logging
import random
import sys
import threading
import types
from typing import Any

import pytest
import torch

from bench.twin.lagging_device import streams_of
from cswap.codecs import launcher as launcher_module
from cswap.codecs.launcher import SHAPES, LaunchShape
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.errors import ConfigError, CorruptEncodingError, UnsupportedError


class FakeStream:
    threads = 1  # the CPU's codecs stand for the GPU's here

    def __init__(self, device=None, priority=0):
        self.device = device
        self.waits = []
        self.cuda_stream = id(self)

    def wait_event(self, event):
        self.waits.append(event)


class FakeEvent:
    """Fires a little after it was recorded, on a thread of its own."""

    delay_s = 0.0005
    random = random.Random(0)

    def __init__(self, **_options):
        self.fired = threading.Event()
        self.recorded_on = None

    def record(self, stream):
        self.recorded_on = stream
        delay = self.random.random() * self.delay_s
        threading.Timer(delay, self.fired.set).start()

    def query(self):
        return self.fired.is_set()

    def synchronize(self):
        assert self.fired.wait(20)

    def elapsed_time(self, _end):
        return 2.0


class Current(threading.local):
    def __init__(self):
        self.stack = []


class FakeCuda:
    """Stands for torch.cuda. Its memory is the host's: tensors of device "cpu"."""

    OutOfMemoryError = torch.cuda.OutOfMemoryError
    Stream, Event = FakeStream, FakeEvent

    def __init__(self):
        self._current, self._default = Current(), FakeStream("default")
        self.capturing = False
        self.allocated = 0
        self.emptied = 0
        self.used = []

    def get_device_properties(self, _index):
        return types.SimpleNamespace(
            total_memory=64 << 20, major=9, minor=0, multi_processor_count=132
        )

    def record_stream(self, tensor, stream):
        self.used.append((tensor.data_ptr(), stream))

    def device(self, _index):
        return self.stream(self._default)

    def stream(self, stream):
        current = self._current

        class _On:
            def __enter__(self):
                current.stack.append(stream)

            def __exit__(self, *_):
                current.stack.pop()

        return _On()

    def memory_allocated(self, _index):
        return self.allocated

    def current_stream(self, _device=None):
        return self._current.stack[-1] if self._current.stack else self._default

    def is_current_stream_capturing(self):
        return self.capturing

    def set_device(self, _index):
        pass

    def synchronize(self, _device=None):
        pass  # work runs where it is issued

    def empty_cache(self):
        self.emptied += 1


@pytest.fixture
def cuda(monkeypatch):
    from cswap.devices import cuda, cuda_events

    fake, real = FakeCuda(), torch
    stand_in = types.SimpleNamespace(
        cuda=fake,
        device=lambda *_: real.device("cpu"),
        empty=real.empty,
        empty_strided=real.empty_strided,
        uint8=real.uint8,
    )
    monkeypatch.setattr(cuda, "cuda_streams", streams_of(fake))
    for user in (cuda, cuda_events):
        monkeypatch.setattr(user, "torch", stand_in)
    monkeypatch.setattr(cuda, "memcpy_async", lambda: lambda t, s, n, *_: ctypes.memmove(t, s, n))
    monkeypatch.setattr(real.Tensor, "record_stream", lambda x, s: fake.record_stream(x, s))
    return fake


@pytest.fixture
def device(cuda, monkeypatch):
    from cswap.devices.cuda import CudaDevice

    made = CudaDevice(0)
    monkeypatch.setattr(CudaDevice, "kind", "cpu")  # of the tensors that the engine gives it
    monkeypatch.setattr(made, "host_memory", lambda n: torch.empty(n, dtype=torch.uint8))
    return made


def test_a_moment_is_waited_for_by_other_streams_alone(device, cuda):
    moment = device.now()
    assert moment.event.recorded_on is cuda.current_stream()
    device.join(moment)
    assert cuda.current_stream().waits == []
    with cuda.stream(FakeStream("another")):
        device.join(moment)
        assert cuda.current_stream().waits == [moment.event]


def test_what_several_threads_read_is_known_to_the_allocator(device, cuda):
    # It gives a block to the stream that it was allocated on as soon as nobody refers to it.
    engine = SwapEngine(SwapConfig(codec="raw", min_bytes=0), device=device)
    x, y = torch.randn(1024), torch.randn(1024)
    packed = [engine.pack(x), engine.pack(y)]
    engine.synchronize()
    engine.unpack(packed[1])  # the other one is decoded ahead, into memory of this stream
    cuda.used.clear()
    with cuda.stream(FakeStream("another")):
        first = engine.unpack(packed[0])
        another = cuda.current_stream()
    assert torch.equal(first, x)
    assert cuda.used == [(first.data_ptr(), another)]


def test_each_device_has_a_clock_of_its_own(cuda):
    from cswap.devices.cuda import CudaDevice

    first, second = CudaDevice(0), CudaDevice(1)
    assert first.origin() is first.origin()
    assert first.origin()[0] is not second.origin()[0]


def test_out_of_memory_frees_what_is_idle_and_tries_again(device, cuda, monkeypatch):
    failures = [1]
    real = torch.empty_strided

    def empty_strided(*args, **options):
        if failures:
            failures.pop()
            raise torch.cuda.OutOfMemoryError("no memory")
        return real(*args, **options)

    monkeypatch.setattr(sys.modules["cswap.devices.cuda"].torch, "empty_strided", empty_strided)
    assert device.allocate((10,), (1,), dtype=torch.float32).numel() == 10
    assert cuda.emptied == 1
    failures.extend([1, 1])
    with pytest.raises(MemoryError, match="no memory"):
        device.allocate((10,), (1,), dtype=torch.float32)


def test_without_pinned_memory_it_goes_on_with_pageable_and_says_so_once(cuda, monkeypatch, caplog):
    from cswap.devices.cuda import CudaDevice

    made = CudaDevice(0)
    real = torch.empty

    def empty(*args, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("cudaHostAlloc failed")
        return real(*args, **options)

    monkeypatch.setattr(sys.modules["cswap.devices.cuda"].torch, "empty", empty)
    with caplog.at_level(logging.WARNING, "cswap"):
        assert made.host_memory(100).numel() == 100
        assert made.host_memory(100).numel() == 100
    assert caplog.text.count("No more pinned memory") == 1


@pytest.mark.parametrize("codec", ["raw", "zvc", "auto"])
def test_a_training_step_through_its_code_path_is_bit_equal(device, codec):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.ReLU())))
    x = torch.randn(128, 64)
    model(x).square().sum().backward()
    expected = [torch.clone(p.grad) for p in model.parameters() if p.grad is not None]
    engine = SwapEngine(SwapConfig(codec=codec, min_bytes=0), device=device)
    for _ in range(3):
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
            loss = model(x).square().sum()
        engine.synchronize()
        loss.backward()
        assert all(
            p.grad is not None and torch.equal(p.grad, want)
            for p, want in zip(model.parameters(), expected, strict=True)
        )
    stats = engine.stats
    assert stats.swapped > 10
    assert stats.fallbacks == 0
    assert all(c.decode_s > 0 for name, c in stats.by_codec.items() if name != "raw")


def test_tensors_that_are_computed_again_are_neither_encoded_nor_copied(device, monkeypatch):
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-5)  # however busy it is
    torch.manual_seed(0)
    parts = [(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in "abc"]
    model, x = torch.nn.Sequential(*(m for part in parts for m in part)), torch.randn(512, 64)
    model(x).square().sum().backward()
    expected = [torch.clone(p.grad) for p in model.parameters() if p.grad is not None]
    engine = SwapEngine(SwapConfig(codec="raw", min_bytes=0), device=device)
    for _ in range(3):
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
            loss = model(x).square().sum()
        engine.synchronize()
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, found, expected))
    by_codec = engine.stats.by_codec
    assert by_codec["remat"].count == 9
    assert by_codec["remat"].encoded == 0
    assert engine.stats.fallbacks == 0


def test_what_computation_waits_on_the_device_is_timed_now_and_then(device, cuda):
    from cswap.devices.cuda import TIME_EVERY

    before, moment = device.stalled_s, device.now()
    with cuda.stream(FakeStream("another")):
        for _ in range(3 * TIME_EVERY):
            device.join(moment)
    for _, ended in device._stalls:
        ended.synchronize()
    assert device.stalled_s - before == pytest.approx(3 * TIME_EVERY * 2e-3)  # as FakeEvent says


def test_without_cupy_the_runtime_that_torch_has_loaded_copies(monkeypatch):
    from cswap.devices import cuda_memcpy

    copied = []

    def function(*arguments):
        copied.append(arguments)
        return 1 if arguments[2] == 13 else 0

    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    runtime = types.SimpleNamespace(cudaMemcpyAsync=function)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: runtime)
    memcpy = cuda_memcpy.memcpy_async.__wrapped__()
    memcpy(1, 2, 12, cuda_memcpy.INFERRED, 7)
    assert copied == [(1, 2, 12, 4, 7)]
    with pytest.raises(RuntimeError, match="error 1"):
        memcpy(1, 2, 13, cuda_memcpy.INFERRED, 7)


def test_without_any_copy_by_address_nothing_is_swapped(cuda, monkeypatch, caplog):
    from cswap.devices import cuda as module
    from cswap.devices import cuda_memcpy

    def missing(_name):
        raise OSError("libcudart.so.0: not found")

    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(module, "memcpy_async", cuda_memcpy.memcpy_async.__wrapped__)
    module.cuda_device.cache_clear()
    engine = SwapEngine(SwapConfig(codec="raw", min_bytes=0))
    lanes = engine._state.lanes
    assert lanes.of(torch.device("cuda", 0)) is None
    assert engine.stats.fallbacks_by_reason == {"device": 1}
    assert "install CuPy" in caplog.text
    module.cuda_device.cache_clear()


def test_damage_that_a_kernel_met_is_raised_at_the_next_unpack(device, monkeypatch, caplog):
    engine = SwapEngine(SwapConfig(codec="zvc", min_bytes=0), device=device)
    packed = [engine.pack(torch.randn(1 << 12)) for _ in range(3)]
    engine.synchronize()
    engine.unpack(packed[0])
    monkeypatch.setattr("cswap.codecs.gpu.damage", lambda index: [7])
    with pytest.raises(CorruptEncodingError, match=r"cuda:0 met a damaged tile \(number 7\)"):
        engine.unpack(packed[1])
    assert engine.stats.fallbacks_by_reason["decode"] == 1
    later = SwapEngine(SwapConfig(codec="zvc", min_bytes=0), device=device)
    later.unpack(later.pack(torch.randn(1 << 12)))  # damage of before is nothing to it


def test_nothing_is_decoded_ahead_when_the_device_is_nearly_full(cuda):
    from cswap.devices.cuda import ASK_EVERY, CudaDevice

    made = CudaDevice(0)
    assert made.has_room(1 << 20)
    cuda.allocated = 63 << 20
    answers = [made.has_room(1 << 20) for _ in range(ASK_EVERY + 1)]
    assert answers[0]  # as of the last time it looked
    assert not answers[-1]


def test_while_a_graph_is_captured_tensors_stay_with_one_warning(device, cuda, caplog):
    engine = SwapEngine(SwapConfig(codec="zvc", min_bytes=0), device=device)
    cuda.capturing = True
    x = torch.randn(1 << 12)
    assert engine.unpack(engine.pack(x)).data_ptr() == x.data_ptr()
    engine.pack(torch.randn(1 << 12))
    assert engine.stats.kept_by_reason == {"capturing": 2}
    assert caplog.text.count("CUDA graph") == 1


# ------------------------------------------------------------------ launcher


def test_a_failed_compilation_is_not_tried_again(launcher, monkeypatch):
    gpu, _ = launcher
    tried = []

    def fail(name, *_):
        tried.append(name)
        raise OSError("libnvvm.so not found")

    monkeypatch.setattr(launcher_module, "compiled", fail)
    x, out = torch.zeros(100), torch.zeros(1 << 16, dtype=torch.uint8)
    for _ in range(3):
        with pytest.raises(UnsupportedError, match=r"libnvvm\.so not found"):
            gpu.encode("zvc", 4, x, out, (), None)
    assert tried == ["zvc-4-encode"]


def test_where_nothing_can_be_compiled_it_is_said_before_anything_is_encoded(cuda, monkeypatch):
    from cswap.codecs import gpu

    def fail(name, *_):
        raise OSError("libnvvm.so not found")

    available = types.SimpleNamespace(
        is_available=lambda: True, get_device_capability=lambda: (9, 0)
    )
    monkeypatch.setattr(gpu, "torch", types.SimpleNamespace(cuda=available))
    monkeypatch.setattr(gpu, "compiled", fail)
    reason = str(gpu.missing.__wrapped__())
    assert "libnvvm.so not found" in reason
    assert "pip install 'numba-cuda" in reason


def test_an_encode_is_no_part_of_a_graph(launcher, cuda):
    gpu, launched = launcher
    cuda.capturing = True
    with pytest.raises(UnsupportedError, match="captured"):
        gpu.encode("zvc", 4, torch.zeros(100), torch.zeros(1 << 16, dtype=torch.uint8), (), None)
    assert not launched


def test_damage_that_a_kernel_notes_meanwhile_is_not_lost(launcher):
    gpu, _ = launcher
    made = gpu._launcher(0)
    in_flight = made.status
    in_flight[0] = 8
    assert list(made.damage()) == [7]
    assert made.status is not in_flight  # which a kernel may still write
    in_flight[0] = 9
    made.status[0] = 3
    assert list(made.damage()) == [7, 2]


def test_a_payload_off_its_alignment_is_copied_on_the_stream_that_reads_it(
    launcher, cuda, monkeypatch
):
    gpu, _ = launcher
    streams = []
    real = torch.zeros

    def zeros(*args, pin_memory=False, **options):
        streams.append(cuda.current_stream())
        options.pop("device", None)
        return real(*args, **options)

    gpu.torch.zeros, gpu.torch.uint8 = zeros, torch.uint8
    monkeypatch.setattr(gpu, "_on_stream", cuda.stream)
    side = FakeStream()
    payload = torch.zeros(161, dtype=torch.uint8)[1:]
    gpu.decode("zvc", 4, payload, torch.zeros(100), (), side)
    assert side in streams


def test_without_a_gpu_it_is_said_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from cswap.codecs import gpu

    assert gpu.missing() == "torch sees no CUDA device"
    assert not gpu.has_kernels("zvc", 4)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        gpu.encode("zvc", 4, torch.empty(4, device="meta"), torch.empty(0), (), None)


@pytest.fixture
def launcher(cuda, monkeypatch):
    """A launcher whose driver notes the arguments of a launch instead of launching."""
    from cswap.codecs import gpu
    from cswap_kernels.cuda.compiler import Cubin

    launched: list[Any] = []

    def launch(function, *rest):
        pointers = ctypes.cast(rest[8], ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        launched.append((function, rest[:8], pointers))
        n_args = 10 if b"decode" in function[1] else 11
        launched.append([pointers[i][0] for i in range(n_args)])
        return (0,)

    driver = types.SimpleNamespace(
        cuDevicePrimaryCtxRetain=lambda _: (0, 7),
        cuCtxGetCurrent=lambda: (0, 0),
        cuCtxSetCurrent=lambda _: (0,),
        cuModuleLoadData=lambda code: (0, code),
        cuModuleGetFunction=lambda module, name: (0, (module, name)),
        cuLaunchKernel=launch,
    )
    bindings: Any = types.ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    cuda.init = lambda: None
    real = torch
    stand_in = types.SimpleNamespace(
        cuda=cuda,
        device=lambda *_: real.device("cpu"),
        zeros=lambda *a, pin_memory=False, **k: real.zeros(*a, **k),
        int32=real.int32,
        int64=real.int64,
    )
    cuda.device_count = lambda: 1
    for module in (gpu, launcher_module):
        monkeypatch.setattr(module, "torch", stand_in)
    monkeypatch.setattr(launcher_module, "cuda_streams", streams_of(cuda))
    monkeypatch.setattr(
        launcher_module, "compiled", lambda name, *_: Cubin(b"code", f"entry of {name}", 32, 0, 0)
    )
    made = launcher_module.Launcher(0)
    monkeypatch.setattr(gpu, "_launcher", lambda _: made)
    monkeypatch.setattr(gpu, "wait", lambda _: None)
    return gpu, launched


def test_encode_passes_what_the_kernels_signature_wants(launcher):
    gpu, launched = launcher
    from cswap_kernels.cuda import formats

    x, out = torch.zeros(10000), torch.zeros(1 << 16, dtype=torch.uint8)
    size = gpu.encode("zvc", 4, x, out, (5, 1 << 63), None)
    (function, shape, _), values = launched
    assert function == (b"code", b"entry of zvc-4-encode")
    assert shape[:3] == (3, 1, 1)  # a block per tile
    assert shape[3:6] == (256, 1, 1)
    assert len(values) == len(formats.kernel("zvc", 4, "encode")[1].args)
    assert values[:2] == [x.data_ptr(), out.data_ptr()]
    assert values[3] == size.address
    assert values[4:] == [10000, 0, int(x.data_ptr() % 16 == 0), 5, 1 << 63, 0, 0]
    ctypes.cast(size.address, ctypes.POINTER(ctypes.c_int64))[0] = 1234  # as the kernel does
    assert size.value() == 1234
    assert size.value() == 1234


@pytest.mark.parametrize("n_devices", [1, 2])
def test_a_launch_leaves_the_users_current_device(launcher, cuda, n_devices, monkeypatch):
    """Of several, a thread's context is its current device."""
    gpu, launched = launcher
    other, own, contexts = 5, 7, [5]
    driver = sys.modules["cuda.bindings"].driver
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (0, contexts[-1]))

    def set_current(context):
        contexts.append(context)
        return (0,)

    monkeypatch.setattr(driver, "cuCtxSetCurrent", set_current)
    cuda.device_count = lambda: n_devices
    made = launcher_module.Launcher(0)
    monkeypatch.setattr(gpu, "_launcher", lambda _: made)
    issue, at_launch = made._issue, []

    def noted(*arguments):
        at_launch.append(contexts[-1])
        issue(*arguments)

    monkeypatch.setattr(made, "_issue", noted)
    for _ in range(2):
        gpu.encode("zvc", 4, torch.zeros(100), torch.zeros(1 << 16, dtype=torch.uint8), (), None)
    assert at_launch == [own, own]
    assert contexts[-1] == (other if n_devices > 1 else own)
    assert launched


def test_decode_passes_what_the_kernels_signature_wants(launcher):
    gpu, launched = launcher
    from cswap_kernels.cuda import formats

    payload, out = torch.zeros(160, dtype=torch.uint8), torch.zeros(100)
    gpu.decode("zvc", 4, payload, out, (), FakeStream())
    (function, _, _), values = launched
    n_args = len(formats.kernel("zvc", 4, "decode")[1].args)
    assert function == (b"code", b"entry of zvc-4-decode")
    assert values[0] == payload.data_ptr()
    assert values[1:3] == [160, out.data_ptr()]
    assert values[4:n_args] == [100, int(out.data_ptr() % 16 == 0), 0, 0, 0, 0]


def test_a_size_that_is_let_go_unread_is_not_used_again():
    from cswap.codecs.pinned_sizes import SizePool

    pool = SizePool(lambda: torch.zeros(2, dtype=torch.int64))
    first, second = pool.take(), pool.take()
    addresses = {first.address, second.address}
    first.value()
    third = pool.take()
    assert third.address in addresses
    del second, third
    assert pool.take().address not in addresses


def test_launch_shapes_are_the_tuners_to_choose(launcher, monkeypatch):
    gpu, launched = launcher
    monkeypatch.setitem(SHAPES, "zvc-4-encode", LaunchShape(128, 1))
    x, out = torch.zeros(1 << 20), torch.zeros(1 << 23, dtype=torch.uint8)
    gpu.encode("zvc", 4, x, out, (), None)
    (_, shape, _), _ = launched
    assert (shape[0], shape[3]) == (132, 128)
    with pytest.raises(ConfigError, match="threads=100"):
        LaunchShape(100)
    with pytest.raises(ConfigError, match="blocks_per_sm=0"):
        LaunchShape(256, 0)
