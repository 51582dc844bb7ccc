"""`Codec.by_address` does what `encode_flat` and `decode_flat` do, byte by byte."""

from __future__ import annotations

import ctypes

import pytest
import torch

from cswap.codecs.base import DEFAULT_KEY, ByAddress, Codec, takes, word_dtype
from cswap.codecs.parallel import MIN_RANGE_TILES
from cswap.codecs.registry import get_codec
from cswap.codecs.tiled import tile_numel
from cswap.devices.cpu import CpuStream
from cswap.errors import CorruptEncodingError
from cswap.testing.addresses import check_by_address
from cswap_kernels.tiles import TILE_WORDS

CODECS = ("zvc", "csr", "rle", "bitpack", "expk", "zvc+expk", "zvc+bitpack", "int8", "bf16")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
TAKEN = [(n, d) for n in CODECS for d in DTYPES if takes(get_codec(n), d, "cpu")]
ONE = CpuStream(1)


def values(dtype: torch.dtype, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator).relu()
    return x > 0 if dtype is torch.bool else (4 * x).to(dtype)


def flat(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codec.bound(x.dtype, x.numel()), dtype=torch.uint8)
    size = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=ONE)
    assert isinstance(size, int)
    return out[:size]


@pytest.mark.parametrize(("name", "dtype"), TAKEN, ids=str)
@pytest.mark.parametrize("numel", [1, 1000, 20_001])
def test_both_ways_give_the_same_bytes(name: str, dtype: torch.dtype, numel: int) -> None:
    codec, x = get_codec(name), values(dtype, numel)
    way = codec.by_address(dtype, x.nbytes, 1)
    assert way is not None
    assert way.bound <= codec.bound(dtype, numel)
    payload = torch.zeros(way.bound, dtype=torch.uint8)
    nbytes = way.encode(x.data_ptr(), payload.data_ptr())
    wanted, back = flat(codec, x), torch.empty_like(x)
    assert torch.equal(payload[:nbytes], wanted)
    way.decode(payload.data_ptr(), nbytes, back.data_ptr())
    again = torch.empty_like(x)
    codec.decode_flat(wanted, again, stream=ONE)
    assert torch.equal(back.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("name", ["zvc", "expk"])
def test_a_payload_that_is_too_short_is_refused(name: str) -> None:
    x = values(torch.float32, 3 * tile_numel(torch.float32))
    way = get_codec(name).by_address(x.dtype, x.nbytes, 1)
    assert way is not None
    payload, back = flat(get_codec(name), x).clone(), torch.empty_like(x)
    with pytest.raises(CorruptEncodingError):
        way.decode(payload.data_ptr(), 8, back.data_ptr())


def test_a_damaged_tile_is_refused() -> None:
    codec = get_codec("zvc")
    x = values(torch.float32, 3 * tile_numel(torch.float32))
    way = codec.by_address(x.dtype, x.nbytes, 1)
    assert way is not None
    payload, back = flat(codec, x).clone(), torch.empty_like(x)
    payload[8:16] = 0xFF  # of the second tile's entry in the directory
    with pytest.raises(CorruptEncodingError, match="tile 1 is damaged"):
        way.decode(payload.data_ptr(), payload.numel(), back.data_ptr())


def test_tensors_that_several_threads_share_have_no_such_way() -> None:
    d = word_dtype(torch.float32)
    few = 2 * MIN_RANGE_TILES * TILE_WORDS[d.word] * d.word
    assert get_codec("zvc").by_address(torch.float32, few, 2) is None
    assert get_codec("zvc").by_address(torch.float32, few, 1) is not None
    assert get_codec("zvc").by_address(torch.float32, few // 2, 2) is not None


def test_a_subclass_that_encodes_in_its_own_way_inherits_none() -> None:
    base = type(get_codec("zvc"))

    class Own(base):  # type: ignore[misc, valid-type]
        def encode_flat(self, x, out, *, key, stream):
            return super().encode_flat(x, out, key=key, stream=stream)

    assert base().by_address(torch.float32, 4096, 1) is not None
    assert Own().by_address(torch.float32, 4096, 1) is None


class _Wrong:
    def __init__(self, way: ByAddress) -> None:
        self.bound, self.encode, self._way = way.bound, way.encode, way

    def decode(self, payload: int, nbytes: int, target: int) -> None:
        self._way.decode(payload, nbytes, target)
        ctypes.memset(target, 1, 1)


def test_another_value_by_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = get_codec("zvc"), values(torch.float32, 100)
    check_by_address(codec, x, ONE, "x")
    way = codec.by_address(x.dtype, x.nbytes, 1)
    assert way is not None
    monkeypatch.setattr(type(codec), "by_address", lambda *_: _Wrong(way))
    with pytest.raises(AssertionError, match="decode by address gave other values"):
        check_by_address(codec, x, ONE, "x")
