"""The executor on the CPU and on a device that lags: the same tests, the same results."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cswap.codecs.base import Codec
from cswap.codecs.registry import get_codec
from cswap.devices.cpu import CpuDevice
from cswap.engine.link import link_way
from cswap.engine.saved.aliases import make_token
from cswap.engine.transfer.device_lanes import make_executor
from cswap.engine.transfer.handle import LEGAL, State
from cswap.errors import CorruptEncodingError, InternalError
from cswap.pool import Allowance, BufferPool
from cswap.stats.counters import Counters
from cswap.stats.stats import CodecStats
from cswap.stores.disk import DiskStore
from tests.devices.sim import SimDevice

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = range(8)
PART_BYTES = 4096
OVER_A_LINK: dict[str, Callable[[], Any]] = {
    **{f"sim{s}": partial(SimDevice, s) for s in SEEDS},
    **{f"parts{s}": partial(SimDevice, s, part_bytes=PART_BYTES) for s in SEEDS},
}
DEVICES: dict[str, Callable[[], Any]] = {"cpu": CpuDevice, **OVER_A_LINK}
N = 5000


class NoLane:
    """The part of a `Lane` that an executor asks for."""

    ahead, step_bytes = 16, None


LANE: Any = NoLane()


class Place:
    """See `WayPlace`."""

    recipe = SimpleNamespace(contiguous=False)
    way = None


class Bench:
    """An executor with its stores and counters."""

    def __init__(self, device, *, limit=None, disk=None, verify=False):
        self.device = device
        self.tokens = []
        self.counters = Counters()
        self.host = BufferPool(device.host_memory, allowance=Allowance(limit))
        self.disk = disk
        self.executor = make_executor(device, self.host, disk, self.counters, seed=0, verify=verify)

    def handle(self, x):
        token = make_token(x, LANE)
        self.tokens.append(token)
        handle = token.handle
        handle.views = 1
        self.counters.hold(device=handle.raw_nbytes)
        return handle

    def swap_out(self, x, codec="zvc"):
        handle = self.handle(x)
        chosen = get_codec(codec) if isinstance(codec, str) else codec
        self.executor.swap_out(handle, handle.source, chosen)
        return handle

    def parts(self, handle):
        """The parts of a tensor on the host or on the disk."""
        if handle.stored is not None:
            return [handle.stored]
        passage = handle.token().passage
        return [] if passage is None else list(passage.region.parts)

    def stats(self):
        on_disk = self.disk.in_use_bytes if self.disk else 0
        return replace(self.counters.snapshot(), disk_bytes=on_disk)

    def settle(self, *handles):
        for handle in handles:
            self.executor.settle(handle)
        if isinstance(self.device, SimDevice):
            link: Any = self.executor.link
            link.drain()
            link.release_dead()
            assert not self.device.cuda.faults


@pytest.fixture(params=DEVICES, ids=str)
def bench(request, monkeypatch):
    monkeypatch.setattr(link_way, "PART_ALIGN", 512)
    return Bench(DEVICES[request.param]())


@pytest.fixture(params=OVER_A_LINK, ids=str)
def bench_over_a_link(request, monkeypatch):
    monkeypatch.setattr(link_way, "PART_ALIGN", 512)
    return Bench(OVER_A_LINK[request.param]())


def values(seed=0, n=N):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return torch.relu(x)


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_empty(bench):
    if bench.executor.link is not None:
        bench.executor.link.close()  # else the memory is for the next step
    stats = bench.stats()
    assert (stats.device_bytes, stats.host_bytes, stats.disk_bytes) == (0, 0, 0)
    assert bench.host.in_use_bytes == 0


@pytest.mark.parametrize("codec", ["raw", "zvc", "expk", "zvc+expk"])
def test_what_goes_out_comes_back(bench, codec):
    xs = [values(i) for i in range(6)]
    handles = [bench.swap_out(x.clone(), codec) for x in xs]
    bench.settle(*handles)
    assert [h.state for h in handles] == [State.STORED] * 6
    assert all(h.source is None for h in handles)
    for x, handle in reversed(list(zip(xs, handles, strict=True))):
        assert same(bench.executor.memory(handle)[0], x)
    for handle in handles:
        bench.executor.release(handle)
    bench.settle()
    assert_empty(bench)


def test_a_large_tensor_goes_in_parts(monkeypatch):
    monkeypatch.setattr(link_way, "PART_ALIGN", 512)
    bench = Bench(SimDevice(0, part_bytes=PART_BYTES))
    x = values()
    handle = bench.swap_out(x.clone())
    bench.settle(handle)
    assert [p.numel for p in bench.parts(handle)] == [1024] * 4 + [N - 4096]
    stats = bench.stats()
    assert (stats.swapped, stats.by_codec["zvc"].count, stats.raw_bytes) == (1, 1, x.nbytes)
    assert stats.host_bytes == sum(p.host.numel() for p in bench.parts(handle))


def test_wanted_before_it_is_out_it_is_not_moved(bench):
    x = values()
    handle = bench.swap_out(x)
    assert same(bench.executor.memory(handle)[0], x)
    bench.executor.release(handle)
    bench.settle()
    assert_empty(bench)


@pytest.mark.parametrize(("views", "after"), [(1, State.STORED), (2, State.READY)])
def test_decoded_memory_is_held_for_the_other_views(bench, views, after):
    handle = bench.swap_out(values())
    bench.settle(handle)
    handle.views = views
    assert same(bench.executor.memory(handle)[0], values())
    assert handle.state is after


def test_what_is_computed_again_costs_no_bytes_and_no_encode():
    bench = Bench(CpuDevice())
    handle = bench.handle(values())
    bench.executor.recompute_later(handle)
    assert bench.stats().by_codec == {"remat": CodecStats(1, handle.raw_nbytes)}


def test_decoded_memory_that_a_user_holds_serves_the_next_one_too(bench):
    handle = bench.swap_out(values())
    bench.settle(handle)
    held = bench.executor.memory(handle)[0]
    bench.executor.drop_result(handle)
    assert bench.executor.memory(handle)[0].data_ptr() == held.data_ptr()
    assert bench.stats().prefetch_misses == 1


def test_a_tensor_comes_back_as_often_as_it_is_asked_for(bench_over_a_link):
    bench = bench_over_a_link
    x = values()
    handle = bench.swap_out(x.clone())
    bench.settle(handle)
    for _ in range(3):  # retain_graph
        assert same(bench.executor.memory(handle)[0], x)
        bench.settle()
    bench.executor.release(handle)
    bench.settle()
    assert_empty(bench)


def reach(bench, state):
    """A handle that is in this state, or was a moment ago."""
    x = values()
    if state is State.KEPT:
        return bench.handle(x)
    handle = bench.swap_out(x)
    if state is State.LEAVING:
        return handle
    bench.settle(handle)
    if state is State.READY:
        handle.views = 2
        bench.executor.memory(handle)
    return handle


@pytest.mark.parametrize("state", [s for s in State if s is not State.RELEASED])
def test_released_in_any_state_everything_is_freed(bench, state):
    handle = reach(bench, state)
    bench.executor.release(handle)
    bench.executor.release(handle)  # again does nothing
    bench.settle()
    assert handle.state is State.RELEASED
    assert_empty(bench)


class Failing(Codec):
    """raw, but for what it is told to fail at."""

    name = "failing"
    lossless = True
    max_ratio = 1

    def __init__(self, at, error):
        self._at, self._error, self._raw = at, error, get_codec("raw")

    def supports(self, dtype, device="cpu"):
        return True

    def bound(self, dtype, numel):
        return self._raw.bound(dtype, numel)

    def encode_flat(self, x, out, *, key, stream):
        if self._at == "encode":
            raise type(self._error)(*self._error.args)  # one that is kept would keep its frames
        return self._raw.encode_flat(x, out, key=key, stream=stream)

    def decode_flat(self, payload, out, *, stream):
        if self._at == "decode":
            raise type(self._error)(*self._error.args)
        self._raw.decode_flat(payload, out, stream=stream)


def test_a_codec_that_fails_to_encode_gives_way_to_raw(bench, caplog):
    codec = Failing("encode", ValueError("no"))
    with caplog.at_level(logging.WARNING, logger="cswap"):
        handles = [bench.swap_out(values(i), codec) for i in range(3)]
        bench.settle(*handles)
    assert all(same(bench.executor.memory(h)[0], values(i)) for i, h in enumerate(handles))
    assert bench.stats().fallbacks_by_reason == {"failing:encode": 3}
    assert set(bench.stats().by_codec) == {"raw"}
    assert len(caplog.records) == 1


def test_a_codec_that_fails_to_decode_is_an_error_and_no_hang(bench):
    handle = bench.swap_out(values(), Failing("decode", CorruptEncodingError("broken")))
    bench.settle(handle)
    for _ in range(2):
        with pytest.raises(CorruptEncodingError, match="broken"):
            bench.executor.memory(handle)
    bench.executor.release(handle)
    bench.settle()
    assert_empty(bench)


def test_no_memory_to_decode_into_is_said_and_asked_for_again(bench, monkeypatch):
    def allocate(*_args, **_options):
        raise RuntimeError("out of memory")

    handle = bench.swap_out(values())
    bench.settle(handle)
    with monkeypatch.context() as patch:
        patch.setattr(bench.device, "allocate", allocate)
        with pytest.raises(MemoryError, match="swap-in of 20000 bytes: out of memory"):
            bench.executor.memory(handle)
    assert bench.stats().fallbacks_by_reason == {}
    assert same(bench.executor.memory(handle)[0], values())


def test_host_limit_without_a_disk_keeps_the_tensor():
    bench = Bench(CpuDevice(), limit=4096)
    handle = bench.swap_out(values())
    assert handle.state is State.KEPT
    assert same(bench.executor.memory(handle)[0], values())
    assert bench.stats().fallbacks_by_reason == {"host_limit": 1}
    assert bench.stats().kept_by_reason == {"host_limit": 1}


@pytest.mark.parametrize("make", OVER_A_LINK.values(), ids=OVER_A_LINK)
def test_over_a_link_a_host_limit_keeps_a_tensor_or_its_encoding(make):
    bench = Bench(make(), limit=4096)
    handle, raw = bench.swap_out(values()), bench.swap_out(values(1), "raw")
    bench.settle(handle, raw)
    assert (handle.state, raw.state) == (State.STORED, State.KEPT)
    assert same(bench.executor.memory(handle)[0], values())
    assert same(bench.executor.memory(raw)[0], values(1))
    stats = bench.stats()
    assert stats.fallbacks_by_reason.keys() == {"host_limit"}
    assert stats.kept_by_reason == {"host_limit": 1}
    assert raw.raw_nbytes < stats.device_bytes < 2 * raw.raw_nbytes
    for one in (handle, raw):
        bench.executor.release(one)
    bench.settle()
    assert_empty(bench)


@pytest.fixture
def disk(tmp_path):
    store = DiskStore(tmp_path, None)
    yield store
    store.close()


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_past_the_host_limit_encodings_go_to_disk_and_come_back(make, disk):
    bench = Bench(make(), limit=4096, disk=disk)
    handles = [bench.swap_out(values(i)) for i in range(3)]
    bench.settle(*handles)
    parts = [part for handle in handles for part in bench.parts(handle)]
    assert any(part.file is not None for part in parts)
    assert all(part.file is None or part.host is None for part in parts)
    assert bench.host.in_use_bytes <= 4096
    assert all(same(bench.executor.memory(h)[0], values(i)) for i, h in enumerate(handles))
    for handle in handles:
        bench.executor.release(handle)
    bench.settle()
    assert_empty(bench)


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_a_full_disk_loses_no_tensor(make, disk, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    bench = Bench(make(), limit=4096, disk=disk)
    handle = bench.swap_out(values())
    bench.settle(handle)
    monkeypatch.undo()
    assert same(bench.executor.memory(handle)[0], values())
    assert bench.stats().fallbacks_by_reason.keys() == {"disk"}
    if bench.device.unified:
        assert handle.state is State.KEPT
        assert bench.stats().kept_by_reason == {"disk": 1}
    bench.executor.release(handle)
    bench.settle()
    assert_empty(bench)


def settled(make, codec):
    """A bench that verifies, and a handle that has left through this codec."""
    bench = Bench(make(), verify=True)
    handle = bench.swap_out(values(), codec)
    bench.settle(handle)
    return bench, handle


@pytest.mark.parametrize("codec", ["zvc", "int8"])
@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_verify_notices_a_changed_byte(make, codec):
    bench, handle = settled(make, codec)
    part = bench.parts(handle)[0]
    part.host[part.nbytes - 20] ^= 1
    with pytest.raises(CorruptEncodingError):
        bench.executor.memory(handle)


@pytest.mark.parametrize("codec", ["zvc", "int8"])
@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_verify_lets_pass_what_nobody_has_changed(make, codec):
    bench, handle = settled(make, codec)
    assert torch.allclose(bench.executor.memory(handle)[0], values(), atol=0.1)


@pytest.mark.parametrize("codec", ["raw", "bitpack", "zvc"])
def test_indices_are_always_verified(codec):
    """torch reads wherever a wrong index of a max-pool points to."""
    bench = Bench(CpuDevice())
    handle = bench.swap_out(torch.arange(N), codec)
    bench.settle(handle)
    part = bench.parts(handle)[0]
    part.host[part.nbytes - 4] ^= 64
    with pytest.raises(CorruptEncodingError):
        bench.executor.memory(handle)
    bench = Bench(CpuDevice())
    handle = bench.swap_out(torch.arange(N) % 2 == 0, "bitpack")  # a mask points nowhere
    bench.settle(handle)
    assert handle.stored.checked == ""


def test_an_interrupted_encode_leaves_the_tensor_where_it_is():
    bench = Bench(CpuDevice())
    handle = bench.handle(values())
    with pytest.raises(KeyboardInterrupt):
        bench.executor.swap_out(handle, handle.source, Failing("encode", KeyboardInterrupt()))
    assert handle.state is State.KEPT
    assert bench.host.in_use_bytes == 0


# Several threads compute: one asks for a tensor that another encodes.


class Held(Failing):
    """raw, whose encode waits for ``go``."""

    def __init__(self):
        super().__init__("", None)
        self.reached, self.go = threading.Event(), threading.Event()

    def encode_flat(self, x, out, *, key, stream):
        nbytes = super().encode_flat(x, out, key=key, stream=stream)
        self.reached.set()
        assert self.go.wait(10)
        return nbytes


@pytest.fixture(params=[None, 0], ids=["host", "disk"])
def encoding(request, disk):
    """A tensor that another thread encodes: its bench, its handle, what lets that thread go on."""
    bench, codec = Bench(CpuDevice(), limit=request.param, disk=disk), Held()
    handle = bench.handle(values())
    thread = threading.Thread(
        target=bench.executor.swap_out, args=(handle, handle.source, codec), daemon=True
    )
    thread.start()
    assert codec.reached.wait(10)

    def go_on():
        codec.go.set()
        thread.join(10)

    yield bench, handle, go_on
    go_on()


def test_wanted_while_another_thread_encodes_it_it_stays(encoding):
    bench, handle, go_on = encoding
    memory, own = bench.executor.memory(handle)
    assert own
    go_on()
    assert handle.state is State.KEPT
    assert same(memory, values())
    stats = bench.stats()
    assert stats.kept_by_reason == {"wanted_early": 1}
    assert (stats.host_bytes, stats.disk_bytes, bench.host.in_use_bytes) == (0, 0, 0)


def test_modified_while_another_thread_encodes_it_it_stays(encoding):
    bench, handle, go_on = encoding
    handle.source.add_(1)
    go_on()
    assert handle.state is State.KEPT
    stats = bench.stats()
    assert stats.kept_by_reason == {"modified": 1}
    assert (stats.host_bytes, stats.disk_bytes, bench.host.in_use_bytes) == (0, 0, 0)


def test_what_another_thread_encodes_is_settled_when_that_is_done(encoding):
    bench, handle, go_on = encoding
    threading.Timer(0.05, go_on).start()
    bench.executor.settle(handle)
    assert handle.state is State.STORED


def test_memory_says_whether_it_is_the_tensors_own():
    # Views count from the start of the storage in the one and of the region in the other.
    bench = Bench(CpuDevice())
    handle = bench.handle(values())
    own = bench.executor.memory(handle)
    bench.executor.swap_out(handle, handle.source, get_codec("zvc"))
    assert own[1]
    assert handle.source is None  # as another thread may see to while the first one looks at it
    assert not bench.executor.memory(handle)[1]


def test_a_handle_counts_on_without_its_memory():
    bench = Bench(CpuDevice())
    x = values()
    storage = weakref.ref(x.untyped_storage())
    handle = bench.swap_out(x)
    assert handle.counter.numel() == 0
    assert not handle.modified()
    x.add_(1)
    assert handle.modified()
    del x
    assert storage() is None


def test_the_table_of_states_is_closed_and_has_one_end():
    assert set(LEGAL) == set(State)
    assert all(new in LEGAL for moves in LEGAL.values() for new in moves)
    assert [s for s, moves in LEGAL.items() if not moves] == [State.RELEASED]
    assert all(State.RELEASED in moves for s, moves in LEGAL.items() if moves)


def test_an_illegal_move_is_an_internal_error():
    handle = make_token(values(), LANE).handle
    with pytest.raises(InternalError, match="kept -> ready is not legal"):
        handle.to(State.READY)
