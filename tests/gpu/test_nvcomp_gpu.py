"""nvCOMP's codecs on a GPU: what comes back, what waits, what is counted."""

from __future__ import annotations

import struct
import threading
from typing import Any

import pytest
import torch

import cswap
from cswap.advisor.candidates import foretold_ratio
from cswap.codecs.base import DEFAULT_KEY, Encoding
from cswap.codecs.layout import torch_dtype
from cswap.codecs.nvcomp_library import CHUNK_BYTES, missing
from cswap.codecs.registry import NVCOMP, get_codec
from cswap.errors import ConfigError, CorruptEncodingError, UnsupportedError
from cswap.profiler import profile
from cswap.schema.tensor import DTYPES
from cswap.testing import TensorSpec
from cswap.testing.strategies import values_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing() is not None, reason=f"nvCOMP's codecs: {missing()}"),
]

LOSSLESS = (*sorted(set(NVCOMP) - {"nvcomp-bitcomp-lossy"}), "nvcomp-ans:1")
GUARD = 0xC3
SIZES = (1, 2, 63, 1000, 16_384, 16_385, 200_001)


def like_training(dtype, numel, zeros, seed=0):
    """Normally distributed, a share of them 0; of integers, small ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x[torch.rand(numel, generator=generator) < zeros] = 0
    found = torch_dtype(dtype)
    return x.to(found) if found.is_floating_point else (x * 20).to(found)


def encoded(codec, x, stream):
    """Encode x, guarded on both sides; wait; the payload."""
    bound = codec.bound(x.dtype, x.numel())
    whole = torch.full((bound + 128,), GUARD, dtype=torch.uint8, device=x.device)
    stream.wait_stream(torch.cuda.current_stream())
    size = codec.encode_flat(x, whole[64 : 64 + bound], key=DEFAULT_KEY, stream=stream)
    stream.synchronize()
    nbytes = size if isinstance(size, int) else size.value()
    assert nbytes <= x.nbytes
    assert bool((whole[:64] == GUARD).all())
    assert bool((whole[64 + bound :] == GUARD).all())
    return whole[64 : 64 + nbytes]


def assert_back(codec, x, payload, stream):
    for fill in (0xA5, 0x5A):  # what is not written differs
        out = torch.full((x.nbytes,), fill, dtype=torch.uint8, device=x.device)
        stream.wait_stream(torch.cuda.current_stream())
        codec.decode_flat(payload, out.view(x.dtype), stream=stream)
        stream.synchronize()
        assert torch.equal(out, x.view(torch.uint8))


@pytest.fixture
def stream(device):
    return torch.cuda.Stream(device)


@pytest.mark.parametrize("name", NVCOMP)
def test_each_can_be_selected(name):
    assert get_codec(name).name == name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSLESS)
def test_every_bit_comes_back(name, dtype, device, stream):
    codec = get_codec(name)
    for i, numel in enumerate(SIZES):
        kinds = values_for(dtype)  # non-finite ones and payloads of NaN among them
        x = TensorSpec(dtype, (numel,), values=kinds[i % len(kinds)], seed=i).build().to(device)
        assert_back(codec, x, encoded(codec, x, stream), stream)


@pytest.mark.parametrize("zeros", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_what_training_saves_comes_back(name, dtype, zeros, device, stream):
    x = like_training(dtype, 3_000_000, zeros).to(device)
    codec = get_codec(name)
    payload = encoded(codec, x, stream)
    assert_back(codec, x, payload, stream)
    if zeros == 1.0:  # it was not stored raw; ANS of floats codes the exponents alone
        coded = 8 if codec.name != "nvcomp-ans" or not x.is_floating_point() else 1
        assert payload.numel() < x.nbytes // coded


@pytest.mark.parametrize("zeros", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64", "bool"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_no_ratio_is_foretold_too_high(name, dtype, zeros, device):
    x = like_training(dtype, 3_000_000, zeros)
    foretold = foretold_ratio(get_codec(name), profile(x))
    assert foretold is not None
    assert foretold <= 1.05 * get_codec(name).encode(x.to(device)).ratio


@pytest.mark.parametrize("name", LOSSLESS)
def test_calls_without_a_stream_are_complete(name, device):
    codec = get_codec(name)
    x = like_training("float32", 300_000, 0.5).reshape(300, 1000).to(device).t()
    encoding = codec.encode(x)
    assert encoding.payload.device == device
    back = codec.decode(encoding)
    assert (back.stride(), back.device) == (x.stride(), device)
    assert torch.equal(back, x)
    pinned = torch.empty(codec.bound(x.dtype, x.numel()), dtype=torch.uint8, pin_memory=True)
    assert torch.equal(codec.decode(codec.encode(x)), x)
    there = codec.encode(x, out=pinned)
    assert not there.payload.is_cuda
    again = Encoding(codec.name, there.meta, there.payload.to(device))
    assert torch.equal(codec.decode(again), x)


@pytest.mark.parametrize("offset", [1, 3, 5])
@pytest.mark.parametrize("name", LOSSLESS)
def test_views_that_are_not_aligned(name, offset, device):
    codec = get_codec(name)
    x = like_training("bfloat16", 70_000, 0.7).to(device)[offset:]
    payload = codec.encode(x).payload
    shifted = torch.empty(payload.numel() + offset, dtype=torch.uint8, device=device)
    shifted[offset:] = payload
    out = torch.empty(70_000, dtype=torch.bfloat16, device=device)[offset:]
    codec.decode_flat(shifted[offset:], out, stream=None)
    assert torch.equal(out, x)


@pytest.mark.parametrize("numel", [100, CHUNK_BYTES, 5 * CHUNK_BYTES + 1000])
@pytest.mark.parametrize("name", [n for n in LOSSLESS if not n.startswith("nvcomp-ans")])
def test_a_stream_comes_back_where_its_payload_is_moved_to_the_gpu(name, numel, device):
    codec = get_codec(name)
    x = like_training("float32", numel, 0.8)
    again = Encoding.from_bytes(codec.encode(x.to(device)).to_bytes())
    there = Encoding(codec.name, again.meta, again.payload.to(device))
    assert torch.equal(codec.decode(there).cpu(), x)


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_header_has_the_size(name, device):
    """The container is as docs/format/nvcomp.md has it, whichever the algorithm."""
    x = like_training("float32", 400_000, 0.9).to(device)
    payload = get_codec(name).encode(x).payload
    head = bytes(payload[:44].cpu().tolist())
    magic, _version, nbytes, raw, n_chunks, chunk, start = struct.unpack_from("<IIQQQQI", head)
    assert (magic, raw, n_chunks, chunk) == (0x52911327, x.nbytes, -(-x.nbytes // 65536), 65536)
    assert start + nbytes == payload.numel()


@pytest.mark.parametrize("name", LOSSLESS)
def test_nothing_waits_on_the_way(name, device, stream):
    """Behind a stream that is busy for a while, encode and decode return at once."""
    codec = get_codec(name)
    x = like_training("float32", 1_000_000, 0.5).to(device)
    payload = encoded(codec, x, stream).clone()
    back = torch.empty_like(x)
    out = torch.empty(codec.bound(x.dtype, x.numel()), dtype=torch.uint8, device=device)
    torch.cuda.synchronize()  # the payload was cloned on another stream
    codec.decode_flat(payload, back, stream=stream)  # everything is made
    torch.cuda.synchronize()
    fired = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
        fired.record(stream)
    size: Any = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=stream)
    codec.decode_flat(payload, back, stream=stream)
    has_waited = fired.query()
    stream.synchronize()
    assert not has_waited
    assert abs(size.value() - payload.numel()) <= payload.numel() // 50  # ANS differs every time
    assert torch.equal(back, x)


@pytest.mark.parametrize("name", LOSSLESS)
def test_scratch_is_torchs(name, device):
    codec = get_codec(name)
    x = like_training("float32", 8_000_000, 0.5).to(device)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    encoding = codec.encode(x)
    assert torch.equal(codec.decode(encoding), x)
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0]
    # What the device has less, torch has more: nvCOMP keeps no pool of its own.
    assert taken <= torch.cuda.memory_reserved() - reserved + (64 << 20)


def test_several_threads_and_streams(device):
    names = ("nvcomp-ans", "nvcomp-bitcomp", "nvcomp-lz4", "nvcomp-zstd")
    tensors = [like_training("float32", 300_000 + i, 0.3 * i, i).to(device) for i in range(4)]
    wrong: list[str] = []

    def work(index: int) -> None:
        own: Any = torch.cuda.Stream(device)
        for turn in range(20):
            name = names[(index + turn) % len(names)]
            x = tensors[(index * 3 + turn) % len(tensors)]
            codec = get_codec(name)
            payload = encoded(codec, x, own)
            back = torch.empty_like(x)
            codec.decode_flat(payload, back, stream=own)
            own.synchronize()
            if not torch.equal(back, x):
                wrong.append(f"{name}, thread {index}, turn {turn}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("exponent", [-10, -4, 0])
def test_lossy_keeps_its_bound(dtype, exponent, device, stream):
    codec = get_codec(f"nvcomp-bitcomp-lossy:{exponent}")
    x = like_training(dtype, 500_000, 0.2).to(device)
    payload = encoded(codec, x, stream)
    back = torch.empty_like(x)
    codec.decode_flat(payload, back, stream=None)
    rounding = torch.finfo(x.dtype).eps / 2 * float(x.abs().max())
    error = float((x.double() - back.double()).abs().max())
    assert error <= 2.0**exponent / 2 + rounding
    if exponent >= -4:  # it pays, and so was not stored raw
        assert payload.numel() < x.nbytes
        assert error > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**21])
def test_lossy_stores_raw_what_it_cannot_round(value, device, stream):
    x = like_training("float32", 100_000, 0.2)
    x[50_000] = value
    x = x.to(device)
    codec = get_codec("nvcomp-bitcomp-lossy")
    payload = encoded(codec, x, stream)
    assert payload.numel() == x.nbytes
    assert_back(codec, x, payload, stream)


@pytest.mark.parametrize("name", [n for n in LOSSLESS if "ans" not in n])
def test_damage_is_found_before_nvcomp_sees_it(name, device):
    codec = get_codec(name)
    encoding = codec.encode(like_training("float32", 100_000, 0.9).to(device))
    damaged = bytearray(encoding.to_bytes())
    damaged[-5] ^= 1
    with pytest.raises(CorruptEncodingError, match="checksum differs"):
        Encoding.from_bytes(damaged)
    for at in (0, 16, 24, 32, 42):
        payload = encoding.payload.clone()
        payload[at] ^= 0x40
        with pytest.raises(CorruptEncodingError, match="nvCOMP payload"):
            codec.decode(Encoding(codec.name, encoding.meta, payload))


@pytest.mark.parametrize("name", ["nvcomp-ans", "nvcomp-ans:1"])
def test_ans_is_never_written_to_a_stream(name, device):
    encoding = get_codec(name).encode(torch.zeros(100_000, device=device))
    with pytest.raises(UnsupportedError, match="no stream is written"):
        encoding.to_bytes()


@pytest.mark.parametrize("name", LOSSLESS)
def test_gradients_are_those_without_swapping(name, layers, gradients, device):
    net = layers(6)
    x = torch.randn(512, 1024, device=device)
    expected = gradients(net, x)
    with cswap.install(net, codec=name, min_bytes=0) as handle:
        for _ in range(3):
            found = gradients(net, x)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert handle.stats.swapped > 0
    assert handle.stats.fallbacks == 0, handle.stats.fallbacks_by_reason


def test_a_composition_is_refused():
    with pytest.raises(ConfigError, match="does not encode by tiles"):
        get_codec("zvc+nvcomp-ans")
