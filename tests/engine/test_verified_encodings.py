"""Encodings in host memory whose bytes are compared on the way back: indices, and `verify=True`."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional

import cswap
from cswap.engine.saved.encoded import Encoded
from cswap.engine.transfer.stored import Stored
from cswap.errors import CorruptEncodingError
from tests.engine.engines import assert_empty

N = 5000


@pytest.fixture
def made(monkeypatch):
    """Dtype and packed object of each tensor that went by a slot."""
    found, init = [], Encoded.__init__

    def noted(self, tensor, *args, **named):
        found.append((tensor.dtype, weakref.ref(self)))
        init(self, tensor, *args, **named)

    monkeypatch.setattr(Encoded, "__init__", noted)
    return found


def swapping(codec="bitpack", **options):
    return cswap.swapping(min_bytes=0, codec=codec, remat=False, **options)


def pooled(x):
    return functional.max_pool2d(x, 2)


def step(engine, x):
    engine.begin_step()
    y = pooled(x)
    return torch.autograd.grad(y.sum(), x)[0]


def image():
    return torch.randn(4, 4, 32, 32, requires_grad=True)


def test_indices_at_a_known_place_have_no_handle(made):
    x = image()
    (wanted,) = torch.autograd.grad(pooled(x).sum(), x)
    with swapping() as engine:
        for _ in range(5):
            assert torch.equal(step(engine, x), wanted)
        assert engine.stats.fallbacks == 0
        assert_empty(engine)
    assert [dtype for dtype, _ in made].count(torch.int64) >= 3


@pytest.mark.parametrize("n_steps", [3, 5])  # the last one by a slot
def test_indices_without_a_handle_are_verified(made, n_steps):
    x = image()
    with swapping() as engine:
        for _ in range(n_steps):
            step(engine, x)
        made.clear()
        engine.begin_step()
        y = pooled(x)
        (packed,) = [reference() for dtype, reference in made if dtype == torch.int64]
        loan, used = packed.stored.loan, packed.stored.nbytes
        loan.buffer[used // 2] ^= 1
        for _ in range(2):
            with pytest.raises(CorruptEncodingError, match="bitpack"):
                torch.autograd.grad(y.sum(), x, retain_graph=True)
        loan.buffer[used // 2] ^= 1
        (found,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad(pooled(x).sum(), x)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("codec", ["zvc", "int8"])
@pytest.mark.parametrize("n_steps", [1, 3])  # with a handle, and by a slot
def test_with_verify_a_changed_bit_is_seen(made, codec, n_steps):
    x = image()
    with swapping(codec, verify=True) as engine:
        for n in range(n_steps):
            made.clear()
            engine.begin_step()
            y = x.sin().square()
            if n < n_steps - 1:
                y.sum().backward()
        stored = [death() for death in engine._state.reclaimer.alive]
        for one in stored:
            if isinstance(one, Stored) and one.loan is not None:
                one.loan.buffer[one.nbytes // 2] ^= 1
        assert bool(made) is (n_steps > 1)
        with pytest.raises(CorruptEncodingError, match=codec):
            y.sum().backward()


def indexed(engine, index, w):
    engine.begin_step()
    return torch.autograd.grad(w[index].square().sum(), w)[0]


def test_indices_in_memory_that_begins_anywhere():
    whole = torch.empty(4 * N + 4, dtype=torch.uint8)
    odd = torch.frombuffer(whole.numpy(), dtype=torch.int32, offset=4)  # as that of NumPy's files
    assert odd.data_ptr() % 8 == 4
    index = odd.copy_(torch.randint(0, 50, (N,)))
    w = torch.randn(50, requires_grad=True)
    (wanted,) = torch.autograd.grad(w[index].square().sum(), w)
    with swapping("zvc") as engine:
        for _ in range(6):
            assert torch.equal(indexed(engine, index, w), wanted)
        assert engine.stats.fallbacks == 0
        assert engine.stats.swapped > 0
        assert_empty(engine)


def test_indices_as_they_are_take_no_larger_buffer(made):
    x = image()  # its pool saves 4 * 4 * 16 * 16 * 8 bytes of indices
    with swapping("raw") as engine:
        for _ in range(5):
            engine.begin_step()
            y = pooled(x)
            held = engine.stats.host_bytes
            y.sum().backward()
        assert held == x.nbytes + (1 << 15)
