"""Buffers whose memory is let go, and that a pool fills again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads.saved_bytes import heap_bytes
from cswap import emptied_buffers
from cswap.config import SwapConfig
from cswap.emptied_buffers import EmptiedBuffers, fill
from cswap.engine.engine import SwapEngine
from cswap.pool import ALWAYS_IDLE, Allowance, BufferPool, Loan
from cswap.stores.host import HostStore

MIB = 1 << 20


def allocate(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def bytes_of(loans):
    """Bytes of memory that their buffers have, as torch says."""
    return sum(loan.buffer.untyped_storage().nbytes() for loan in loans)


def taken(pool, n, nbytes=MIB):
    loans = [pool.take(nbytes) for _ in range(n)]
    assert None not in loans
    return loans


@pytest.fixture
def made():
    return []


@pytest.fixture
def pool(made):
    """Keeps 4 MiB idle; `made` lists the sizes of the buffers that it has allocated."""

    def note(nbytes):
        made.append(nbytes)
        return allocate(nbytes)

    return BufferPool(note, idle_share=0.25, refills=True)


def test_a_buffer_that_is_not_kept_idle_has_no_memory_and_is_filled_again(pool, made):
    loans = taken(pool, 10)
    for loan in loans:
        pool.put_back(loan)
    assert bytes_of(loans) == pool.idle_bytes == ALWAYS_IDLE
    again = taken(pool, 10)
    assert {id(loan.buffer) for loan in again} == {id(loan.buffer) for loan in loans}
    assert made == [MIB] * 10
    assert (pool.in_use_bytes, pool.idle_bytes, pool.peak_bytes) == (10 * MIB, 0, 10 * MIB)
    for n, loan in enumerate(again):
        loan.buffer.fill_(n)
    assert all(bool((loan.buffer == n).all()) for n, loan in enumerate(again))
    for loan in again:
        pool.put_back(loan)
        pool.put_back(loan)  # a second time does nothing
    assert (pool.in_use_bytes, pool.idle_bytes) == (0, ALWAYS_IDLE)


def test_the_heap_has_the_memory_back(pool):
    before = heap_bytes()
    loans = taken(pool, 40)
    full = heap_bytes()
    for loan in loans:
        pool.put_back(loan)
    after = heap_bytes()
    if before is None or full is None or after is None:
        pytest.skip("the C library does not say how much is allocated")
    assert full - before >= 40 * MIB
    assert after - before < 10 * MIB + MIB  # a quarter is kept idle


def test_without_leave_a_buffer_that_is_not_kept_idle_keeps_its_memory():
    pool = BufferPool(allocate, idle_share=0.25)
    loans = taken(pool, 10)
    for loan in loans:
        pool.put_back(loan)
    assert bytes_of(loans) == 10 * MIB  # somebody may still read it


def test_a_buffer_is_filled_for_its_own_size_only(pool, made):
    for loan in taken(pool, 10):
        pool.put_back(loan)
    pool.clear()
    (other,) = taken(pool, 1, 2 * MIB)
    assert other.buffer.numel() == bytes_of([other]) == 2 * MIB
    assert made[-1] == 2 * MIB


def test_a_closed_pool_keeps_no_buffer(pool, made):
    for loan in taken(pool, 10):
        pool.put_back(loan)
    pool.close()
    taken(pool, 1)
    assert len(made) == 11


def test_the_bytes_are_right_after_a_recount(pool):
    loans = taken(pool, 10)
    for loan in loans[:7]:
        pool.put_back(loan)
    pool.recount()
    assert (pool.in_use_bytes, pool.idle_bytes) == (3 * MIB, ALWAYS_IDLE)
    taken(pool, 7)
    assert (pool.in_use_bytes, pool.idle_bytes) == (10 * MIB, 0)


def test_few_buffers_are_kept_without_memory(pool, made, monkeypatch):
    monkeypatch.setattr(emptied_buffers, "MOST", 2)
    for loan in taken(pool, 10):
        pool.put_back(loan)
    taken(pool, 10)
    assert 10 < len(made) < 20


def test_the_size_that_was_seen_last_is_kept_longest(monkeypatch):
    monkeypatch.setattr(emptied_buffers, "MOST", 3)
    buffers: EmptiedBuffers[int] = EmptiedBuffers()
    for nbytes in (1, 2, 2, 3, 3):
        buffers.empty(allocate(nbytes), nbytes)
    assert sorted(buffers) == [2, 3, 3]
    assert [buffers.take(nbytes) for nbytes in (1, 2, 2, 3)] == [None, 2, None, 3]


def test_a_buffer_that_numpy_has_seen_goes_with_its_memory(pool, made):
    loans = taken(pool, 10)
    for loan in loans:
        loan.buffer.numpy()[0] = 1  # torch resizes it no more
        pool.put_back(loan)
    assert bytes_of(loans) == 10 * MIB
    del loan, loans
    assert pool.in_use_bytes == 0
    taken(pool, 10)
    assert len(made) == 16  # four were idle


def test_a_recount_while_a_buffer_is_filled_counts_it_once(pool, monkeypatch):
    for loan in taken(pool, 10):
        pool.put_back(loan)
    pool.clear()

    def filled(buffer, size):
        pool.recount()  # as after an interrupt of another thread
        fill(buffer, size)

    monkeypatch.setattr("cswap.pool.fill", filled)
    (loan,) = taken(pool, 1)
    assert pool.in_use_bytes == MIB
    pool.put_back(loan)
    assert pool.in_use_bytes == 0


class FullError(RuntimeError):
    """As torch's, where there is no memory."""


@pytest.fixture
def full(monkeypatch):
    """A machine on which no buffer can be filled."""

    class Storage:
        def resize_(self, size):
            if size:
                raise FullError("can't allocate memory")

    def storage(_):
        return Storage()

    def begin():
        monkeypatch.setattr(torch.Tensor, "untyped_storage", storage)

    return begin


def test_without_memory_a_buffer_is_not_filled_and_not_counted(pool, full):
    for loan in taken(pool, 10):
        pool.put_back(loan)
    pool.clear()
    full()
    with pytest.raises(MemoryError, match="can't allocate"):
        pool.take(MIB)
    assert (pool.in_use_bytes, pool.idle_bytes) == (0, 0)


def test_a_host_store_says_that_it_is_full(full):
    allowance = Allowance(100 * MIB)
    store = HostStore(allocate, allowance, 0.25, refills=True)
    for loan in taken(store, 10):
        store.put_back(loan)
    store.clear()
    full()
    assert store.take(MIB) is None
    assert allowance.reserve(100 * MIB)  # all of it is free


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 99)), max_size=80))
def test_no_buffer_is_lent_twice_and_each_has_its_memory(moves):
    pool = BufferPool(allocate, idle_share=0.1, refills=True)
    lent: list[Loan] = []
    for taking, mebibytes, which in moves:
        if taking or not lent:
            loan = pool.take((mebibytes + 1) * MIB)
            assert loan is not None
            assert all(loan.buffer is not other.buffer for other in lent)
            lent.append(loan)
        else:
            pool.put_back(lent.pop(which % len(lent)))
        assert bytes_of(lent) == sum(loan.buffer.numel() for loan in lent) == pool.in_use_bytes
        assert pool.in_use_bytes + pool.idle_bytes <= pool.peak_bytes


def test_the_host_memory_of_a_cpu_lets_go_of_idle_buffers():
    engine = SwapEngine(SwapConfig())
    lane = engine._state.lanes.of(torch.device("cpu"))
    assert lane is not None
    host = lane.host
    loans = taken(host, 10)
    for loan in loans:
        host.put_back(loan)
    assert host.idle_bytes == ALWAYS_IDLE
    assert bytes_of(loans) == 4 * MIB
