"""What nvCOMP's codecs make of their payloads: against a fake of the library and of streams.

The fake encodes with Deflate, in nvCOMP's container, whatever it is asked for.
"""

from __future__ import annotations

import contextlib
import gc
import struct
import sys
import threading
import types
import zlib

import pytest
import torch

from cswap.codecs import nvcomp, nvcomp_library, registry
from cswap.codecs.base import DEFAULT_KEY, Encoding
from cswap.codecs.layout import torch_dtype
from cswap.codecs.nvcomp_host import MAGIC, TABLE_ENTRY, decode_on_host
from cswap.codecs.nvcomp_library import CHUNK_BYTES, SCRATCH
from cswap.codecs.registry import NVCOMP, get_codec
from cswap.errors import CorruptEncodingError, UnsupportedError
from cswap.schema.tensor import DTYPES, TensorMeta

STREAM = 0x5EED
SCRATCH_BYTES = 4096


class FakeArray:
    def __init__(self, source, cuda_stream=0):
        assert cuda_stream == STREAM
        assert source.dtype == torch.uint8
        assert source.dim() == 1
        assert source.data_ptr() % 16 == 0
        self.source = source
        self.log, self.nbytes = [], source.numel()

    @property
    def buffer_size(self):
        """Of an array that was encoded into: waits for the stream."""
        self.log.append("wait")
        return self.nbytes


class FakeCodec:
    """Deflate in a container as nvCOMP's; remembers what was asked of it."""

    def __init__(self, library, **options):
        self.library, self.log = library, library.log
        library.made.append(options)

    def compression_config(self, nbytes):
        assert nbytes > 0
        self.log.append(f"config {nbytes}")
        return ("compress", nbytes)

    def decompression_config(self, config):
        assert config[0] == "compress", "made from a payload, it would wait for the stream"
        return ("decompress", config[1])

    def encode(self, array, out=None, compression_config=None):
        raw = bytes(array.source.tolist())
        assert compression_config == ("compress", len(raw))
        scratch = self.library.allocate(SCRATCH_BYTES, types.SimpleNamespace(ptr=STREAM, device=0))
        assert scratch.ptr == SCRATCH_BYTES
        payload = container([deflate(raw[i : i + CHUNK_BYTES]) for i in offsets(raw)], len(raw))
        # A foreign buffer would be returned as it is, without the encoding's size.
        assert isinstance(out, FakeArray)
        if len(payload) > out.source.numel():
            raise ValueError("out is too small")
        out.source[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        out.log, out.nbytes = self.log, len(payload)
        self.log.append("encode")
        return out

    def decode(self, array, data_type="", out=None, decompression_config=None):
        assert data_type == "|u1"
        assert decompression_config == ("decompress", out.numel())
        payload = bytes(array.source.tolist())
        raw = decode_on_host("nvcomp-deflate", payload, out.numel())
        out[:] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self.log.append("decode")


class FakeLibrary(types.ModuleType):
    __version__ = "6.0.0"

    def __init__(self):
        super().__init__("nvidia.nvcomp")
        self.log, self.made, self.allocate = [], [], None
        self.as_array = FakeArray
        self.BitstreamKind = types.SimpleNamespace(NVCOMP_NATIVE="native")
        self.BitcompMode = types.SimpleNamespace(BITCOMP_LOSSY_FP_TO_SIGNED="signed")
        self.CascadedFineGrainedEncoding = types.SimpleNamespace(DELTA=1, RLE=2, FOR=4)

    def Codec(self, **options):  # noqa: N802 (nvCOMP's name)
        return FakeCodec(self, **options)

    def set_device_allocator(self, allocator=None):
        self.allocate = allocator


class FakeStream:
    cuda_stream = STREAM

    def synchronize(self):
        pass


def deflate(raw):
    stream = zlib.compressobj(1, zlib.DEFLATED, -15)
    return stream.compress(raw) + stream.flush()


def offsets(raw):
    return range(0, len(raw), CHUNK_BYTES)


def container(segments, raw_nbytes, chunk_nbytes=CHUNK_BYTES):
    """As docs/format/nvcomp.md has it."""
    starts, data = [], b""
    for segment in segments:
        starts.append(len(data))
        data += segment + bytes(-len(segment) % 8)
    begin = 72 + TABLE_ENTRY * len(segments)
    numbers = (len(data), raw_nbytes, len(segments), chunk_nbytes, begin)
    head = struct.pack("<IBBHQQQQI", MAGIC, 6, 0, 0, *numbers).ljust(72, b"\0")
    tables = struct.pack(f"<{2 * len(segments)}Q", *starts, *map(len, segments))
    return head + tables + data


@contextlib.contextmanager
def _here(_stream, _device):
    yield FakeStream()


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """What was found out and made in a test holds for that test."""
    monkeypatch.setattr(registry, "_made", dict(registry._made))
    monkeypatch.setattr(nvcomp_library, "_coders", nvcomp_library._Coders())
    caches = (nvcomp_library.missing, nvcomp_library.library, nvcomp_library._refusal)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def library(monkeypatch):
    """The fake; tensors of the host count as a GPU's, and all streams as one."""
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvcomp, "running_on", _here)
    monkeypatch.setattr(nvcomp, "copy_now", lambda out, source: out.copy_(source))
    monkeypatch.setattr(nvcomp, "on_gpu", lambda _x: True)
    monkeypatch.setattr(nvcomp.NvcompCodec, "_outliers", lambda codec, x: codec.has_outliers(x))
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda nbytes, _device, _ptr: nbytes)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda _ptr: None)
    return library


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
def test_scratch_is_counted_and_given_back():
    gc.collect()
    before = SCRATCH.in_use_bytes
    held = SCRATCH.allocate(1 << 20, types.SimpleNamespace(ptr=STREAM, device=0))
    assert (held.ptr, SCRATCH.in_use_bytes - before) == (1 << 20, 1 << 20)
    encoded(get_codec("nvcomp-lz4"), torch.zeros(100))
    assert SCRATCH.peak_bytes >= before + (1 << 20) + SCRATCH_BYTES
    del held
    gc.collect()
    assert SCRATCH.in_use_bytes == before


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
def test_streams_carry_a_checksum_and_are_decoded_on_the_host(monkeypatch):
    codec = get_codec("nvcomp-deflate")
    x = compressible("float32", 40_000)
    out, nbytes = encoded(codec, x)
    stream = Encoding(codec.name, TensorMeta("float32", (40_000,), (1,)), out[:nbytes]).to_bytes()
    again = Encoding.from_bytes(stream)
    monkeypatch.setattr(nvcomp, "on_gpu", lambda x: x.is_cuda)
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
    encoding = Encoding(codec.name, TensorMeta("float32", (10_000,), (1,)), out[:nbytes])
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
        Encoding.from_bytes(stream)
