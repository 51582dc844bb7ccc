"""The executor on the CPU and on a device that lags: the same tests, the same results."""

from __future__ import annotations

import errno
import logging
import os
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
from cswap.engine.saved.reclaim import Reclaimer
from cswap.engine.transfer.device_lanes import make_executor
from cswap.engine.transfer.handle import LEGAL, State
from cswap.engine.transfer.stored import Stored
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
        self.counters = Counters()
        self.reclaimer = Reclaimer(self.counters)
        self.host = BufferPool(device.host_memory, allowance=Allowance(limit))
        self.disk = disk
        self.executor = make_executor(
            device,
            self.host,
            disk,
            self.counters,
            self.reclaimer.watch_encoding,
            seed=0,
            verify=verify,
        )

    def token(self, x):
        token = make_token(x, LANE)
        self.counters.hold(device=token.nbytes)
        return token

    def swap_out(self, x, codec="zvc"):
        token = self.token(x)
        chosen = get_codec(codec) if isinstance(codec, str) else codec
        self.executor.swap_out(token, token.source, chosen)
        return token

    def values(self, token):
        """The tensor's values, as they come back."""
        return self.executor.memory(token)[0]

    def release(self, *tokens):
        for token in tokens:
            self.executor.release(token.handle)

    def parts(self, token):
        """The parts of a tensor on the host or on the disk."""
        if isinstance(token.stored, Stored):
            return [token.stored]
        return [] if token.stored is None else list(token.stored.region.parts)

    def stats(self):
        on_disk = self.disk.in_use_bytes if self.disk else 0
        return replace(self.counters.snapshot(), disk_bytes=on_disk)

    def settle(self):
        self.reclaimer.collect()
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
    tokens = [bench.swap_out(x.clone(), codec) for x in xs]
    bench.settle()
    assert [t.handle.state for t in tokens] == [State.STORED] * 6
    assert all(t.source is None for t in tokens)
    for x, token in reversed(list(zip(xs, tokens, strict=True))):
        assert same(bench.values(token), x)
    bench.release(*tokens)
    bench.settle()
    assert_empty(bench)


def test_a_large_tensor_goes_in_parts(monkeypatch):
    monkeypatch.setattr(link_way, "PART_ALIGN", 512)
    bench = Bench(SimDevice(0, part_bytes=PART_BYTES))
    x = values()
    token = bench.swap_out(x.clone())
    bench.settle()
    assert [p.numel for p in bench.parts(token)] == [1024] * 4 + [N - 4096]
    stats = bench.stats()
    assert (stats.swapped, stats.by_codec["zvc"].count, stats.raw_bytes) == (1, 1, x.nbytes)
    assert stats.host_bytes == sum(p.host.numel() for p in bench.parts(token))


def test_wanted_before_it_is_out_it_is_not_moved(bench):
    x = values()
    token = bench.swap_out(x)
    assert same(bench.values(token), x)
    bench.release(token)
    bench.settle()
    assert_empty(bench)


def test_what_is_computed_again_costs_no_bytes_and_no_encode():
    bench = Bench(CpuDevice())
    token = bench.token(values())
    bench.executor.recompute_later(token)
    assert bench.stats().by_codec == {"remat": CodecStats(1, token.nbytes)}


def test_a_tensor_comes_back_as_often_as_it_is_asked_for(bench_over_a_link):
    bench = bench_over_a_link
    x = values()
    token = bench.swap_out(x.clone())
    bench.settle()
    for _ in range(3):  # retain_graph
        assert same(bench.values(token), x)
        bench.settle()
    bench.release(token)
    bench.settle()
    assert_empty(bench)


@pytest.mark.parametrize("leaves", [False, True])
def test_released_in_any_state_everything_is_freed(bench, leaves):
    token = bench.swap_out(values()) if leaves else bench.token(values())
    bench.release(token)
    bench.release(token)  # again does nothing
    bench.settle()
    assert token.handle.state is State.RELEASED
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
        tokens = [bench.swap_out(values(i), codec) for i in range(3)]
        bench.settle()
    assert all(same(bench.values(t), values(i)) for i, t in enumerate(tokens))
    assert bench.stats().fallbacks_by_reason == {"failing:encode": 3}
    assert set(bench.stats().by_codec) == {"raw"}
    assert len(caplog.records) == 1


def test_a_codec_that_fails_to_decode_is_an_error_and_no_hang(bench):
    token = bench.swap_out(values(), Failing("decode", CorruptEncodingError("broken")))
    bench.settle()
    for _ in range(2):
        with pytest.raises(CorruptEncodingError, match="broken"):
            bench.executor.memory(token)
    bench.release(token)
    bench.settle()
    assert_empty(bench)


def test_no_memory_to_decode_into_is_said_and_asked_for_again(bench, monkeypatch):
    def allocate(*_args, **_options):
        raise RuntimeError("out of memory")

    token = bench.swap_out(values())
    bench.settle()
    with monkeypatch.context() as patch:
        patch.setattr(bench.device, "allocate", allocate)
        with pytest.raises(MemoryError, match="swap-in of 20000 bytes: out of memory"):
            bench.executor.memory(token)
    assert bench.stats().fallbacks_by_reason == {}
    assert same(bench.values(token), values())


def test_host_limit_without_a_disk_keeps_the_tensor():
    bench = Bench(CpuDevice(), limit=4096)
    token = bench.swap_out(values())
    assert token.handle.state is State.KEPT
    assert same(bench.values(token), values())
    assert bench.stats().fallbacks_by_reason == {"host_limit": 1}
    assert bench.stats().kept_by_reason == {"host_limit": 1}


@pytest.mark.parametrize("make", OVER_A_LINK.values(), ids=OVER_A_LINK)
def test_over_a_link_a_host_limit_keeps_a_tensor_or_its_encoding(make):
    bench = Bench(make(), limit=4096)
    token, raw = bench.swap_out(values()), bench.swap_out(values(1), "raw")
    bench.settle()
    assert (token.handle.state, raw.handle.state) == (State.STORED, State.KEPT)
    assert same(bench.values(token), values())
    assert same(bench.values(raw), values(1))
    stats = bench.stats()
    assert stats.fallbacks_by_reason.keys() == {"host_limit"}
    assert stats.kept_by_reason == {"host_limit": 1}
    assert raw.nbytes < stats.device_bytes < 2 * raw.nbytes
    for one in (token, raw):
        bench.release(one)
    bench.settle()
    assert_empty(bench)


@pytest.fixture
def disk(tmp_path):
    store = DiskStore(tmp_path)
    yield store
    store.close()


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_past_the_host_limit_encodings_go_to_disk_and_come_back(make, disk):
    bench = Bench(make(), limit=4096, disk=disk)
    tokens = [bench.swap_out(values(i)) for i in range(3)]
    bench.settle()
    parts = [part for token in tokens for part in bench.parts(token)]
    assert any(part.file is not None for part in parts)
    host = "loan" if bench.device.unified else "host"
    assert all(part.file is None or getattr(part, host) is None for part in parts)
    assert bench.host.in_use_bytes <= 4096
    assert all(same(bench.values(t), values(i)) for i, t in enumerate(tokens))
    bench.release(*tokens)
    del parts
    bench.settle()
    assert_empty(bench)


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_a_full_disk_loses_no_tensor(make, disk, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    bench = Bench(make(), limit=4096, disk=disk)
    token = bench.swap_out(values())
    bench.settle()
    monkeypatch.undo()
    assert same(bench.values(token), values())
    assert bench.stats().fallbacks_by_reason.keys() == {"disk"}
    if bench.device.unified:
        assert token.handle.state is State.KEPT
        assert bench.stats().kept_by_reason == {"disk": 1}
    bench.release(token)
    bench.settle()
    assert_empty(bench)


def settled(make, codec):
    """A bench that verifies, and a handle that has left through this codec."""
    bench = Bench(make(), verify=True)
    token = bench.swap_out(values(), codec)
    bench.settle()
    return bench, token


@pytest.mark.parametrize("codec", ["zvc", "int8"])
@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_verify_notices_a_changed_byte(make, codec):
    bench, token = settled(make, codec)
    part = bench.parts(token)[0]
    host = part.loan.buffer if bench.device.unified else part.host
    host[part.nbytes - 20] ^= 1
    with pytest.raises(CorruptEncodingError):
        bench.executor.memory(token)


@pytest.mark.parametrize("codec", ["zvc", "int8"])
@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_verify_lets_pass_what_nobody_has_changed(make, codec):
    bench, token = settled(make, codec)
    assert torch.allclose(bench.values(token), values(), atol=0.1)


@pytest.mark.parametrize("codec", ["raw", "bitpack", "zvc"])
def test_indices_are_always_verified(codec):
    """torch reads wherever a wrong index of a max-pool points to."""
    bench = Bench(CpuDevice())
    token = bench.swap_out(torch.arange(N), codec)
    bench.settle()
    part = bench.parts(token)[0]
    part.loan.buffer[part.nbytes - 4] ^= 64
    with pytest.raises(CorruptEncodingError):
        bench.executor.memory(token)
    bench = Bench(CpuDevice())
    token = bench.swap_out(torch.arange(N) % 2 == 0, "bitpack")  # a mask points nowhere
    bench.settle()
    assert token.stored.checked == ""


def test_an_interrupted_encode_leaves_the_tensor_where_it_is():
    bench = Bench(CpuDevice())
    token = bench.token(values())
    with pytest.raises(KeyboardInterrupt):
        bench.executor.swap_out(token, token.source, Failing("encode", KeyboardInterrupt()))
    assert token.handle.state is State.KEPT
    assert bench.host.in_use_bytes == 0


def test_memory_says_whether_it_is_the_tensors_own():
    # Views count from the start of the storage in the one and of the region in the other.
    bench = Bench(CpuDevice())
    token = bench.token(values())
    own = bench.executor.memory(token)
    bench.executor.swap_out(token, token.source, get_codec("zvc"))
    assert own[1]
    assert token.source is None  # as another thread may see to while the first one looks at it
    assert not bench.executor.memory(token)[1]


def test_a_handle_counts_on_without_its_memory():
    bench = Bench(CpuDevice())
    x = values()
    storage = weakref.ref(x.untyped_storage())
    handle = bench.swap_out(x).handle
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
    handle.to(State.STORED)
    with pytest.raises(InternalError, match="stored -> kept is not legal"):
        handle.to(State.KEPT)
