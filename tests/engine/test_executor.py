"""The executor on the CPU and on the adversarial simulator: the same tests, the same results."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cswap.codecs.base import Codec
from cswap.codecs.registry import get_codec
from cswap.devices.cpu import CpuDevice
from cswap.engine.saved.aliases import make_token
from cswap.engine.transfer import section as section_module
from cswap.engine.transfer.device_lanes import make_executor
from cswap.engine.transfer.handle import LEGAL, Handle, State
from cswap.errors import CorruptEncodingError, InternalError
from cswap.pool import Allowance
from cswap.stats.counters import Counters
from cswap.stats.stats import CodecStats
from cswap.stores.disk import DiskStore
from cswap.stores.host import HostStore
from tests.devices import sim as sim_module
from tests.devices.sim import SimDevice, SimEvent, poisoned

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = range(12)
SECTION_BYTES = 4096
OVER_A_LINK: dict[str, Callable[[], Any]] = {
    **{f"sim{s}": partial(SimDevice, s, eager=True) for s in SEEDS},
    **{
        f"sections{s}": partial(SimDevice, s, eager=True, section_bytes=SECTION_BYTES)
        for s in SEEDS
    },
}
DEVICES: dict[str, Callable[[], Any]] = {"cpu": CpuDevice, **OVER_A_LINK}
N = 5000
NO_LANE: Any = None  # executors know none


class Bench:
    """An executor with its stores and counters."""

    def __init__(self, device, *, limit=None, disk=None, verify=False):
        self.device = device
        self.tokens = []
        self.counters = Counters()
        self.host = HostStore(device.host_memory, allowance=Allowance(limit))
        self.disk = disk
        self.executor = make_executor(device, self.host, disk, self.counters, seed=0, verify=verify)

    def handle(self, x):
        token = make_token(x, NO_LANE)
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

    def stats(self):
        on_disk = self.disk.in_use_bytes if self.disk else 0
        return replace(self.counters.snapshot(), disk_bytes=on_disk)

    def settle(self, *handles):
        for handle in handles:
            self.executor.settle(handle)
        if isinstance(self.device, SimDevice):
            self.device.drain()


@pytest.fixture(params=DEVICES, ids=str)
def bench(request, monkeypatch):
    monkeypatch.setattr(section_module, "SECTION_ALIGN", 512)
    return Bench(DEVICES[request.param]())


@pytest.fixture(params=OVER_A_LINK, ids=str)
def bench_over_a_link(request, monkeypatch):
    monkeypatch.setattr(section_module, "SECTION_ALIGN", 512)
    return Bench(OVER_A_LINK[request.param]())


def values(seed=0, n=N):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return torch.relu(x)


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_empty(bench):
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


def test_a_large_tensor_goes_in_sections(monkeypatch):
    monkeypatch.setattr(section_module, "SECTION_ALIGN", 512)
    bench = Bench(SimDevice(0, eager=True, section_bytes=SECTION_BYTES))
    x = values()
    handle = bench.swap_out(x.clone())
    bench.settle(handle)
    assert [p.numel for p in handle.sections] == [1024] * 4 + [N - 4096]
    stats = bench.stats()
    assert (stats.swapped, stats.by_codec["zvc"].count, stats.raw_bytes) == (1, 1, x.nbytes)
    assert stats.host_bytes == sum(p.host.numel() for p in handle.sections)


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


def test_where_host_memory_is_device_memory_nothing_is_decoded_ahead():
    bench = Bench(CpuDevice())
    handle = bench.swap_out(values())
    assert not bench.executor.prefetch(handle)
    assert handle.state is State.STORED


def test_a_prefetched_tensor_is_a_hit_and_can_be_fetched_again(bench_over_a_link):
    bench = bench_over_a_link
    x = values()
    handle = bench.swap_out(x.clone())
    bench.settle(handle)
    assert bench.executor.prefetch(handle)
    assert not bench.executor.prefetch(handle)
    assert same(bench.executor.memory(handle)[0], x)
    bench.settle(handle)
    bench.executor.drop_result(handle)
    assert handle.state is State.STORED
    assert same(bench.executor.memory(handle)[0], x)  # retain_graph
    assert (bench.stats().prefetch_hits, bench.stats().prefetch_misses) == (1, 1)
    bench.executor.release(handle)
    bench.settle()
    assert_empty(bench)


def test_what_was_decoded_ahead_is_decoded_once_for_all_that_ask(bench_over_a_link):
    bench = bench_over_a_link
    x = values()
    handle = bench.swap_out(x.clone())
    bench.settle(handle)
    bench.executor.prefetch(handle)
    first, second = (bench.executor.memory(handle) for _ in range(2))
    assert same(second[0], x)
    assert second[0].data_ptr() == first[0].data_ptr()
    assert (bench.stats().prefetch_hits, bench.stats().prefetch_misses) == (2, 0)


@pytest.mark.parametrize("ahead", [True, False])
def test_decoded_memory_that_a_user_holds_serves_the_next_one_too(bench, ahead):
    handle = bench.swap_out(values())
    bench.settle(handle)
    ahead = ahead and bench.executor.prefetch(handle)
    held = bench.executor.memory(handle)[0]
    bench.executor.drop_result(handle)
    assert bench.executor.memory(handle)[0].data_ptr() == held.data_ptr()
    assert bench.stats().prefetch_misses == (0 if ahead else 1)


class Joining(SimDevice):
    """Takes down what the computation is ordered after."""

    def __init__(self, seed):
        super().__init__(seed)
        self.joined = []

    def join(self, event, at=None):
        self.joined.append((event, at))
        super().join(event, at)


@pytest.mark.parametrize("let_go", ["drop_result", "release"])
def test_memory_that_nobody_asked_for_is_let_go_after_its_decode(let_go):
    bench = Bench(Joining(0))
    handle = bench.swap_out(values())
    bench.settle(handle)
    bench.executor.prefetch(handle)
    ahead = bench.executor._ahead[id(handle)]
    getattr(bench.executor, let_go)(handle)
    assert bench.device.joined == [(ahead.decoded, ahead.issued)]


def reach(bench, state):
    """A handle that is in this state, or was a moment ago."""
    x = values()
    if state is State.KEPT:
        return bench.handle(x)
    handle = bench.swap_out(x)
    if state is State.LEAVING:
        return handle
    bench.settle(handle)
    if state in (State.FETCHING, State.READY):
        bench.executor.prefetch(handle)
    if state is State.READY:
        bench.settle(handle)
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
            raise self._error
        return self._raw.encode_flat(x, out, key=key, stream=stream)

    def decode_flat(self, payload, out, *, stream):
        if self._at == "decode":
            raise self._error
        self._raw.decode_flat(payload, out, stream=stream)


def test_a_codec_that_fails_to_encode_gives_way_to_raw(bench, caplog):
    codec = Failing("encode", ValueError("no"))
    with caplog.at_level(logging.WARNING, logger="cswap"):
        handles = [bench.swap_out(values(i), codec) for i in range(3)]
        bench.settle(*handles)
    assert all(same(bench.executor.memory(h)[0], values(i)) for i, h in enumerate(handles))
    n_parts = sum(len(h.sections) for h in handles)
    assert bench.stats().fallbacks_by_reason == {"failing:encode": n_parts}
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
    ahead = not bench.device.unified

    def allocate(*_args, **_options):
        raise RuntimeError("out of memory")

    handle = bench.swap_out(values())
    bench.settle(handle)
    with monkeypatch.context() as patch:
        patch.setattr(bench.device, "allocate", allocate)
        assert not bench.executor.prefetch(handle)
        with pytest.raises(MemoryError, match="swap-in of 20000 bytes: out of memory"):
            bench.executor.memory(handle)
    assert bench.stats().fallbacks_by_reason == ({"prefetch": 1} if ahead else {})
    assert same(bench.executor.memory(handle)[0], values())


def test_host_limit_without_a_disk_keeps_the_tensor(request):
    for make in DEVICES.values():
        bench = Bench(make(), limit=4096)
        handle = bench.swap_out(values())
        bench.settle(handle)
        assert handle.state is State.KEPT
        assert same(bench.executor.memory(handle)[0], values())
        assert bench.stats().fallbacks_by_reason == {"host_limit": 1}
        assert bench.stats().kept_by_reason == {"host_limit": 1}


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
    assert all(h.sections[0].file is not None and h.sections[0].host is None for h in handles)
    assert all(same(bench.executor.memory(h)[0], values(i)) for i, h in enumerate(handles))
    for handle in handles:
        bench.executor.release(handle)
    bench.settle()
    assert_empty(bench)


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_a_full_disk_keeps_the_tensor(make, disk, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    bench = Bench(make(), limit=4096, disk=disk)
    handle = bench.swap_out(values())
    bench.settle(handle)
    monkeypatch.undo()
    assert same(bench.executor.memory(handle)[0], values())
    assert handle.state is State.KEPT
    assert bench.stats().fallbacks_by_reason == {"disk": 1}
    assert bench.stats().kept_by_reason == {"disk": 1}
    bench.executor.release(handle)
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
    part = handle.sections[0]
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
    part = handle.sections[0]
    part.host[part.nbytes - 4] ^= 64
    with pytest.raises(CorruptEncodingError):
        bench.executor.memory(handle)
    bench = Bench(CpuDevice())
    handle = bench.swap_out(torch.arange(N) % 2 == 0, "bitpack")  # a mask points nowhere
    bench.settle(handle)
    assert handle.sections[0].checked == ""


def test_indices_that_cross_a_link_are_not_verified_unasked():
    bench = Bench(SimDevice(0, eager=True))
    handle = bench.swap_out(torch.arange(N))
    bench.settle(handle)
    assert [section.checked for section in handle.sections] == [""]


def test_an_interrupted_encode_leaves_the_tensor_where_it_is():
    bench = Bench(CpuDevice())
    handle = bench.handle(values())
    with pytest.raises(KeyboardInterrupt):
        bench.executor.swap_out(handle, handle.source, Failing("encode", KeyboardInterrupt()))
    assert handle.state is State.KEPT
    assert bench.host.in_use_bytes == 0


def test_a_tensor_modified_before_its_encode_stays():
    for seed in SEEDS:
        bench = Bench(SimDevice(seed, eager=True))
        x = values()
        handle = bench.swap_out(x)
        x.add_(1)
        bench.settle(handle)
        assert handle.state is State.KEPT
        assert handle.modified()


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
    handle = make_token(values(), NO_LANE).handle
    with pytest.raises(InternalError, match="kept -> ready is not legal"):
        handle.to(State.READY)


# Computation as jobs: the source is produced late, the result is read late. Any dependency that
# the executor drops must be noticed under some seed.


class Late:
    """A size that may be asked for only once the stream has got there."""

    def __init__(self):
        self.size = None

    def value(self):
        assert self.size is not None, "asked for before it was known"
        return self.size


class LateRaw(Failing):
    """raw that learns its size as a GPU codec does: while it runs."""

    def __init__(self):
        super().__init__("", None)

    def encode_flat(self, x, out, *, key, stream):
        late = Late()
        late.size = super().encode_flat(x, out, key=key, stream=stream)
        return late


def round_trip(device):
    """Whether a tensor that a job produces comes back to a job that reads it."""
    bench = Bench(device)
    right = []
    handles = []
    for i in range(3):
        x = poisoned(4 * N).view(torch.float32)
        expected = values(i)
        device.submit(lambda _, x=x, e=expected: x.copy_(e) and None, role="compute")
        handles.append(bench.handle(x))
        del x
        handle = handles[-1]
        bench.executor.swap_out(handle, handle.source, LateRaw())
    device.drain()
    for i, handle in enumerate(handles):
        bench.executor.prefetch(handle)
        memory, expected = bench.executor.memory(handle)[0], values(i)
        device.submit(
            lambda _, m=memory, e=expected: right.append(torch.equal(m, e)), role="compute"
        )
        del memory
        bench.executor.drop_result(handle)
    device.drain()
    for handle in handles:
        bench.executor.release(handle)
    device.drain()
    return len(right) == 3 and all(right)


@pytest.fixture
def unversioned(monkeypatch):
    # Simulated computation writes when the scheduler says so, after the version was recorded.
    monkeypatch.setattr(Handle, "modified", lambda _self: False)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.usefixtures("unversioned")
def test_late_computation_gets_and_gives_the_right_bytes(seed):
    assert round_trip(SimDevice(seed))


class Forgetful(SimDevice):
    """Forgets the dependencies of one role's jobs, or what orders jobs and computation."""

    def __init__(self, seed, what):
        super().__init__(seed)
        self._what = what

    def submit(self, job, *, role, after=(), measure=False):
        return super().submit(job, role=role, after=() if role == self._what else after)

    def now(self):
        return SimEvent(None, (), "codec", fired=True) if self._what == "now" else super().now()

    def join(self, event, at=None):
        if self._what != "join":
            super().join(event, at)


def notices(device):
    """Whether the round trip fails on this device."""
    try:
        return not round_trip(device)
    except (InternalError, CorruptEncodingError, AssertionError):
        return True


# Not "d2h" and "h2d": their jobs are submitted by callbacks of what they wait for.
@pytest.mark.parametrize("what", ["codec", "now", "join"])
@pytest.mark.usefixtures("unversioned")
def test_the_simulator_notices_a_forgotten_dependency(what):
    assert any(notices(Forgetful(seed, what)) for seed in range(40))


@pytest.mark.usefixtures("unversioned")
def test_the_simulator_notices_scratch_given_back_too_early(monkeypatch):
    taken = SimDevice.scratch

    def scratch(self, nbytes, role):
        memory = taken(self, nbytes, role)
        self.submit(lambda _: self.give_back(memory), role="h2d")  # whenever
        return memory

    monkeypatch.setattr(SimDevice, "scratch", scratch)
    assert any(notices(SimDevice(seed)) for seed in range(40))


def test_memory_is_poisoned_when_it_is_handed_out_and_when_it_is_let_go(monkeypatch):
    behind = []
    full = np.full

    def remembered(*arguments):
        behind.append(full(*arguments))
        return behind[-1]

    monkeypatch.setattr(np, "full", remembered)
    x = poisoned(64)
    assert (x == sim_module.POISON).all()
    view = x[8:16]
    x.fill_(1)
    del x
    assert (behind[0] == 1).all()
    del view
    assert (behind[0] == sim_module.POISON).all()
