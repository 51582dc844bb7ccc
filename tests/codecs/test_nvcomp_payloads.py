"""What nvCOMP's codecs make of their payloads: against a fake of the library and of streams."""

from __future__ import annotations

import gc
import threading
import types

import pytest
import torch

from cswap.codecs import nvcomp, nvcomp_library, registry
from cswap.codecs.base import DEFAULT_KEY, Encoding
from cswap.codecs.layout import torch_dtype
from cswap.codecs.nvcomp_trust import Trust
from cswap.codecs.registry import NVCOMP, get_codec
from cswap.errors import CorruptEncodingError, UnsupportedError
from cswap.schema.tensor import DTYPES, TensorMeta
from tests.codecs.nvcomp_stand_in import SCRATCH_BYTES, STREAM, FakeStream, forgotten, installed


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """What was found out and made in a test holds for that test."""
    with forgotten(monkeypatch):
        yield


@pytest.fixture
def library(monkeypatch):
    """The fake, which is trusted without a proof."""
    monkeypatch.setattr(Trust, "prove", lambda *_: None)
    return installed(monkeypatch)


def encoded(codec, x, stream=None):
    """Payload and size of flat x."""
    out = torch.empty(codec.bound(x.dtype, x.numel()), dtype=torch.uint8)
    return out, codec.encode_flat(x, out, key=DEFAULT_KEY, stream=stream)


def compressible(dtype, numel):
    return (
        (torch.arange(numel * DTYPES[dtype].itemsize) % 7).to(torch.uint8).view(torch_dtype(dtype))
    )


LOSSLESS = sorted(set(NVCOMP) - {"nvcomp-bitcomp-lossy"})


def decoded(codec, payload, x, stream=None):
    out = torch.empty(x.nbytes, dtype=torch.uint8).view(x.dtype)
    codec.decode_flat(payload, out, stream=stream)
    return out


def same(x, y):
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.sampled
@pytest.mark.parametrize("numel", [1, 63, 30_000])
@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.usefixtures("library")
def test_round_trip(name, numel):
    codec = get_codec(name)
    for dtype in DTYPES:
        x = compressible(dtype, numel)
        out, nbytes = encoded(codec, x)
        assert nbytes <= x.nbytes
        assert same(decoded(codec, out[:nbytes], x), x)


@pytest.mark.usefixtures("library")
def test_sizes_arrive_late_and_nothing_waits_before(library):
    codec = get_codec("nvcomp-lz4")
    x = compressible("float32", 50_000)
    out, size = encoded(codec, x, FakeStream())
    assert library.log == ["config 200000", "encode"]
    nbytes = size.value()
    assert library.log == ["config 200000", "encode", "wait"]
    assert size.value() == nbytes  # asked again, it is remembered
    assert same(decoded(codec, out[:nbytes], x, FakeStream()), x)
    assert library.log == ["config 200000", "encode", "wait", "decode"]


def test_objects_and_configurations_are_made_once_per_thread(library):
    codec = get_codec("nvcomp-lz4")
    library.made.clear()  # the trial at selection

    def work():
        for numel in (1000, 1000, 2000):
            x = compressible("float32", numel)
            out, nbytes = encoded(codec, x)
            decoded(codec, out[:nbytes], x)

    work()
    assert (len(library.made), library.log.count("config 4000")) == (1, 1)
    encoded(codec, compressible("float16", 1000))  # another dtype, other options
    assert len(library.made) == 2
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (len(library.made), library.log.count("config 8000")) == (3, 2)


def test_configurations_do_not_pile_up(library, monkeypatch):
    monkeypatch.setattr(nvcomp_library, "MAX_CONFIGS", 2)
    codec = get_codec("nvcomp-lz4")
    for numel in (100, 200, 300, 100):
        encoded(codec, compressible("float32", numel))
    assert [e for e in library.log if e.startswith("config")] == [
        *("config 400", "config 800", "config 1200", "config 400")
    ]


@pytest.mark.usefixtures("library")
def test_what_does_not_shrink_is_stored_raw():
    x = torch.randint(256, (100_000,), dtype=torch.uint8, generator=torch.Generator())
    codec = get_codec("nvcomp-snappy")
    out, nbytes = encoded(codec, x)
    assert nbytes == x.nbytes
    assert torch.equal(out[:nbytes], x)
    assert torch.equal(decoded(codec, out[:nbytes], x), x)


def test_no_elements_no_payload(library):
    codec = get_codec("nvcomp-zstd")
    out, nbytes = encoded(codec, torch.empty(0))
    assert (nbytes, decoded(codec, out[:0], torch.empty(0)).numel()) == (0, 0)
    assert library.log == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**21, -(2.0**21)])
@pytest.mark.usefixtures("library")
def test_lossy_stores_raw_what_it_cannot_round(value):
    """float32 in steps of 2**-10: up to 2**30 of them fit, so magnitudes below 2**20."""
    codec = get_codec("nvcomp-bitcomp-lossy")
    x = torch.zeros(50_000)
    assert encoded(codec, x)[1] < x.nbytes
    x[777] = value
    out, nbytes = encoded(codec, x)
    assert nbytes == x.nbytes
    assert same(decoded(codec, out[:nbytes], x), x)


@pytest.mark.usefixtures("library")
def test_sources_results_and_payloads_may_begin_anywhere():
    codec = get_codec("nvcomp-lz4")
    x = compressible("float32", 5001)[1:]
    out, nbytes = encoded(codec, x)
    shifted = torch.empty(nbytes + 3, dtype=torch.uint8)
    shifted[3:] = out[:nbytes]
    result = torch.empty(5001)[1:]
    codec.decode_flat(shifted[3:], result, stream=None)
    assert same(result, x)


@pytest.mark.usefixtures("library")
def test_scratch_is_given_back_to_torchs_allocator(monkeypatch):
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", freed.append)
    held = nvcomp_library.allocate(1 << 20, types.SimpleNamespace(ptr=STREAM, device=0))
    assert held.ptr == 1 << 20
    encoded(get_codec("nvcomp-lz4"), torch.zeros(100))
    gc.collect()
    assert set(freed) == {SCRATCH_BYTES}
    del held
    gc.collect()
    assert freed.count(1 << 20) == 1


@pytest.mark.usefixtures("library")
def test_damaged_headers_never_reach_nvcomp(library):
    codec = get_codec("nvcomp-lz4")
    x = compressible("float32", 40_000)
    out, nbytes = encoded(codec, x)
    library.log.clear()
    # magic, bytes of chunks, raw bytes, chunks, raw bytes of a chunk, start of the first
    for at in (0, 8 + 2, 16, 24, 32, 40 + 3):
        damaged = out[:nbytes].clone()
        damaged[at] ^= 0x40
        with pytest.raises(CorruptEncodingError, match="nvCOMP payload"):
            decoded(codec, damaged, x)
    for length in (1, 3, 43, x.nbytes + 1):
        with pytest.raises(CorruptEncodingError, match=f"payload of {length} bytes for 160000"):
            decoded(codec, torch.zeros(length, dtype=torch.uint8), x)
    with pytest.raises(CorruptEncodingError, match="do not add up"):
        decoded(codec, out[: nbytes - 1], x)
    assert library.log == []


# Streams


@pytest.mark.usefixtures("library")
def test_streams_carry_a_checksum():
    codec = get_codec("nvcomp-deflate")
    x = compressible("float32", 40_000)
    out, nbytes = encoded(codec, x)
    stream = Encoding(codec.name, TensorMeta("float32", (40_000,), (1,)), out[:nbytes]).to_bytes()
    again = Encoding.from_bytes(stream)
    assert same(codec.decode(again), x)
    for at in range(8, len(stream), 37):
        damaged = bytearray(stream)
        damaged[at] ^= 1
        with pytest.raises(CorruptEncodingError, match="checksum differs"):
            Encoding.from_bytes(damaged)


@pytest.mark.usefixtures("library")
def test_what_only_a_gpu_decodes_is_refused_on_the_host(monkeypatch):
    codec = get_codec("nvcomp-cascaded")
    x = compressible("int64", 10_000)
    out, nbytes = encoded(codec, x)
    monkeypatch.setattr(nvcomp, "on_gpu", lambda x: x.is_cuda)
    with pytest.raises(UnsupportedError, match=r"decodes on a GPU only\. Move encoding\.payload"):
        decoded(codec, out[:nbytes], x)


@pytest.mark.parametrize("name", ["nvcomp-ans", "nvcomp-ans:1"])
@pytest.mark.usefixtures("library")
def test_ans_is_never_written_to_a_stream(name):
    codec = get_codec(name)
    x = compressible("float32", 10_000)
    out, nbytes = encoded(codec, x)
    meta = TensorMeta("float32", (10_000,), (1,))
    encoding = Encoding(codec.name, meta, out[:nbytes], codec.persistent)
    with pytest.raises(UnsupportedError, match="its format changes with the library's version"):
        encoding.to_bytes()


def test_a_stream_read_where_nvcomp_is_missing_is_not_called_corrupt(library, monkeypatch):
    x = compressible("float32", 10_000)
    out, nbytes = encoded(get_codec("nvcomp-lz4"), x)
    stream = Encoding("nvcomp-lz4", TensorMeta("float32", (10_000,), (1,)), out[:nbytes]).to_bytes()
    del registry._made["nvcomp-lz4"]
    nvcomp_library.missing.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        get_codec(Encoding.from_bytes(stream).codec)
