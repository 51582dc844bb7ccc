"""Saved indices without handles: their encodings bring a checksum along."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional

import cswap
from cswap.codecs.registry import get_codec
from cswap.engine.saved.encoded import Encoded
from cswap.engine.transfer.checked_way import CHECKSUM_BYTES, CheckedByAddress
from cswap.errors import CorruptEncodingError
from tests.engine.engines import assert_empty

N = 5000


def checked(codec="bitpack", dtype=torch.int64, n=N):
    size = n * dtype.itemsize
    way = get_codec(codec).by_address(dtype, size, 1)
    assert way is not None
    return CheckedByAddress(codec, way)


def encoded(way, x):
    """Its encoding, as so many bytes."""
    payload = torch.empty(way.bound, dtype=torch.uint8)
    nbytes = way.encode(x.data_ptr(), payload.data_ptr())
    return payload[:nbytes].clone()


@pytest.mark.parametrize("codec", ["bitpack", "zvc", "csr"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_indices_come_back_and_a_changed_bit_is_seen(codec, dtype):
    way, x = checked(codec, dtype), torch.randint(0, 1 << 9, (N,), dtype=dtype)
    payload, out = encoded(way, x), torch.empty_like(x)
    way.decode(payload.data_ptr(), payload.numel(), out.data_ptr())
    assert torch.equal(out, x)
    for at in (0, payload.numel() // 2, payload.numel() - CHECKSUM_BYTES, payload.numel() - 1):
        payload[at] ^= 4
        with pytest.raises(CorruptEncodingError, match=codec):
            way.decode(payload.data_ptr(), payload.numel(), out.data_ptr())
        payload[at] ^= 4


@pytest.mark.parametrize("nbytes", [0, 1, 3])
def test_fewer_bytes_than_a_checksum_are_no_encoding(nbytes):
    way, out = checked(), torch.empty(N, dtype=torch.int64)
    payload = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(CorruptEncodingError):
        way.decode(payload.data_ptr(), nbytes, out.data_ptr())


class Impossible:
    """A way that claims sizes that it cannot reach."""

    bound = 100

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def encode(self, _source, _target):
        return self.nbytes

    def decode(self, *_):
        raise AssertionError


@pytest.mark.parametrize("nbytes", [-5, -1, 101, 103, 1 << 40])
def test_an_impossible_size_is_not_read(nbytes):
    way = CheckedByAddress("mine", Impossible(nbytes))
    assert not 0 <= way.encode(0, 0) <= way.bound


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
        loan, used, _, _ = packed.encoding
        loan.buffer[used // 2] ^= 1
        for _ in range(2):
            with pytest.raises(CorruptEncodingError, match="bitpack"):
                torch.autograd.grad(y.sum(), x, retain_graph=True)
        loan.buffer[used // 2] ^= 1
        (found,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad(pooled(x).sum(), x)
    assert torch.equal(found, wanted)


def test_with_verify_indices_have_handles(made):
    x = image()
    with swapping(verify=True) as engine:
        for _ in range(5):
            step(engine, x)
        assert engine.stats.swapped > 0
    assert made == []


def indexed(engine, index, w):
    engine.begin_step()
    return torch.autograd.grad(w[index].square().sum(), w)[0]


@pytest.mark.parametrize("codec", ["zvc", "bitpack"])
def test_indices_that_cannot_be_checked_so_have_handles(made, monkeypatch, codec):
    index = torch.randint(0, 50, (N,))
    if codec == "zvc":  # memory that begins anywhere, as that of NumPy's files
        whole = torch.empty(4 * N + 4, dtype=torch.uint8)
        odd = torch.frombuffer(whole.numpy(), dtype=torch.int32, offset=4)
        assert odd.data_ptr() % 8 == 4
        index = odd.copy_(index)
    else:  # no way by address
        monkeypatch.setattr(type(get_codec(codec)), "by_address", lambda *_: None)
    w = torch.randn(50, requires_grad=True)
    (wanted,) = torch.autograd.grad(w[index].square().sum(), w)
    with swapping(codec) as engine:
        for _ in range(6):
            assert torch.equal(indexed(engine, index, w), wanted)
        assert engine.stats.fallbacks == 0
        assert engine.stats.swapped > 0
        assert_empty(engine)
    assert all(dtype != index.dtype for dtype, _ in made)


def test_indices_as_they_are_take_no_larger_buffer(made):
    x = image()  # its pool saves 4 * 4 * 16 * 16 * 8 bytes of indices
    with swapping("raw") as engine:
        for _ in range(5):
            engine.begin_step()
            y = pooled(x)
            held = engine.stats.host_bytes
            y.sum().backward()
        assert held == x.nbytes + (1 << 15)
    assert all(dtype != torch.int64 for dtype, _ in made)
