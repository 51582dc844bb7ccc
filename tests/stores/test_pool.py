"""Buffers that are used again, and the host tier of the store."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads.saved_bytes import heap_bytes
from cswap.pool import ALWAYS_IDLE, STEPS, Allowance, BufferPool, Loan, size_class

MIB = 1 << 20


def allocate(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def lend(pool, nbytes):
    """What `take` gives where a buffer has to be there."""
    loan = pool.take(nbytes)
    assert loan is not None
    assert loan.after is None
    return loan


def take(pool, nbytes):
    """The buffer of that."""
    return lend(pool, nbytes).buffer


@given(st.integers(1, 1 << 40))
def test_a_size_class_holds_what_was_asked_for_and_little_more(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size <= max(4096, nbytes + nbytes // STEPS + 512)
    assert size_class(size) == size


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8 * MIB)), max_size=60))
def test_a_pool_never_holds_more_than_was_ever_in_use(moves):
    pool, peak = BufferPool(lambda n: torch.empty(n, dtype=torch.uint8)), 0
    out: list[torch.Tensor] = []
    for taking, nbytes in moves:
        if taking or not out:
            out.append(take(pool, nbytes))
        else:
            pool.give_back(out.pop(nbytes % len(out)))
        in_use = sum(b.numel() for b in out)
        peak = max(peak, in_use)
        assert pool.in_use_bytes == in_use
        assert pool.in_use_bytes + pool.idle_bytes <= peak == pool.peak_bytes


def test_a_buffer_is_used_again():
    pool = BufferPool(allocate)
    first = take(pool, 5000)
    address = first.data_ptr()
    pool.give_back(first)
    assert take(pool, 4700).data_ptr() == address  # of the same size class


def test_buffers_of_one_size_lie_together_though_none_was_idle_in_between():
    pool = BufferPool(allocate)
    lent, gone = lend(pool, 5000), lend(pool, 5000)
    pool.put_back(gone)
    del gone
    pool.clear()
    other = lend(pool, 5000)
    pool.put_back(other)
    pool.put_back(lent)
    assert {id(lend(pool, 5000).buffer) for _ in range(2)} == {id(lent.buffer), id(other.buffer)}
    assert pool.idle_bytes == 0


def test_an_interrupt_while_a_buffer_becomes_known(monkeypatch):
    pool = BufferPool(allocate)
    kept = lend(pool, 5000)

    def interrupted(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cswap.pool._Known", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.take(1 << 20)
    pool.recount()
    assert pool.in_use_bytes == kept.known.size
    pool.put_back(kept)
    assert lend(pool, 5000).buffer is kept.buffer


def test_a_slightly_larger_buffer_serves_an_encoding_whose_size_varies():
    pool = BufferPool(allocate)
    first = take(pool, MIB)
    pool.give_back(first)
    again = take(pool, MIB - MIB // 20)
    assert again is first
    assert pool.in_use_bytes == MIB
    pool.give_back(again)
    other = take(pool, MIB - MIB // 4)
    assert other is not first
    assert pool.in_use_bytes == MIB - MIB // 4


def test_within_a_limit_every_buffer_has_the_size_that_was_counted():
    pool = BufferPool(allocate, allowance=Allowance(2 * MIB))
    first = take(pool, MIB)
    pool.give_back(first)
    assert take(pool, MIB - MIB // 20) is not first


def test_what_idles_is_bounded_by_its_share_but_for_a_little():
    pool = BufferPool(allocate, idle_share=0.25)
    buffers = [take(pool, MIB) for _ in range(40)]
    for buffer in buffers:
        pool.give_back(buffer)
    assert pool.idle_bytes == 10 * MIB
    small = BufferPool(allocate, idle_share=0.25)
    small.give_back(take(small, MIB))
    assert small.idle_bytes == MIB <= ALWAYS_IDLE
    small.clear()
    assert small.idle_bytes == 0


def test_the_heap_has_the_memory_of_what_is_not_kept_idle_back():
    pool = BufferPool(allocate, idle_share=0.25)
    before = heap_bytes()
    loans = [lend(pool, MIB) for _ in range(40)]
    full = heap_bytes()
    while loans:
        pool.put_back(loans.pop())
    after = heap_bytes()
    if before is None or full is None or after is None:
        pytest.skip("the C library does not say how much is allocated")
    assert full - before >= 40 * MIB
    assert after - before < 10 * MIB + MIB


def test_an_allocation_that_fails_leaves_the_accounts_as_they_were():
    def fail(_):
        raise MemoryError("none left")

    pool = BufferPool(fail)
    assert pool.take(100) is None  # full, not broken
    assert pool.in_use_bytes == 0


def test_the_host_store_keeps_to_its_limit():
    store = BufferPool(allocate, allowance=Allowance(3 * 4096))
    held = [take(store, 4000) for _ in range(3)]
    assert store.take(1) is None
    store.give_back(held.pop())
    assert store.take(1) is not None


def test_the_host_stores_of_all_devices_keep_to_one_limit():
    allowance = Allowance(3 * 4096)
    stores = [BufferPool(allocate, allowance=allowance) for _ in range(2)]
    held = [take(stores[i], 4096) for i in (0, 1, 0)]
    assert stores[1].take(1) is None
    stores[0].give_back(held[0])
    assert stores[1].take(1) is not None


class Later:
    """A point in a device's work that the test lets it reach."""

    def __init__(self):
        self.reached = False

    def query(self):
        return self.reached


def test_a_buffer_that_is_free_later_comes_with_its_event():
    pool = BufferPool(allocate)
    event = Later()
    first = take(pool, 4096)
    pool.give_back(first, event)
    again = pool.take(4096)
    assert again is not None
    assert (again.buffer is first, again.after) == (True, event)


def test_what_is_let_go_before_it_is_free_is_told():
    told: list[Loan] = []
    pool = BufferPool(allocate, discard=told.append)
    buffers = [take(pool, MIB) for _ in range(3)]
    event = Later()
    for buffer in buffers:
        pool.give_back(buffer, event)
    pool.clear()
    assert [loan.after for loan in told] == [event] * 3
