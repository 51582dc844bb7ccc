"""A fake of nvCOMP's library and of its streams, for machines that have neither it nor a GPU.

It encodes with Deflate, in nvCOMP's container, whatever it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import struct
import sys
import types
import zlib
from typing import TYPE_CHECKING, Any

import torch

from cswap.codecs import nvcomp, nvcomp_library, nvcomp_size, registry
from cswap.codecs.nvcomp_container import MAGIC, TABLE_ENTRY
from cswap.codecs.nvcomp_library import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        raw = b"".join(zlib.decompress(segment, -15) for segment in segments_of(payload))
        out[:] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self.log.append("decode")


class FakeLibrary(types.ModuleType):
    __version__ = "6.0.0"

    def __init__(self):
        super().__init__("nvidia.nvcomp")
        self.__spec__ = importlib.machinery.ModuleSpec("nvidia.nvcomp", None)
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


def segments_of(payload):
    """What `container` was given."""
    n_chunks, _, begin = struct.unpack_from("<QQI", payload, 24)
    numbers = struct.unpack_from(f"<{2 * n_chunks}Q", payload, begin - TABLE_ENTRY * n_chunks)
    starts, lengths = numbers[:n_chunks], numbers[n_chunks:]
    return [payload[begin + at :][:n] for at, n in zip(starts, lengths, strict=True)]


@contextlib.contextmanager
def forgotten(monkeypatch: Any) -> Iterator[None]:
    """What is found out and made about nvCOMP in this context holds for it alone."""
    made = {name: c for name, c in registry._made.items() if not name.startswith("nvcomp")}
    monkeypatch.setattr(registry, "_made", made)
    monkeypatch.setattr(nvcomp_library, "_coders", nvcomp_library._Coders())
    caches = (
        *(nvcomp_library.is_installed, nvcomp_library.missing),
        *(nvcomp_library.library, nvcomp_library._refusal),
    )
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def installed(monkeypatch: Any) -> FakeLibrary:
    """The fake, found by import; tensors of the host count as a GPU's, and all streams as one."""
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvcomp, "running_on", _here)
    monkeypatch.setattr(nvcomp_size, "copy_now", lambda out, source: out.copy_(source))
    monkeypatch.setattr(nvcomp, "on_gpu", lambda _x: True)
    monkeypatch.setattr(nvcomp.NvcompCodec, "_outliers", lambda codec, x: codec.has_outliers(x))
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda nbytes, _device, _ptr: nbytes)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda _ptr: None)
    return library


@contextlib.contextmanager
def _here(_stream: Any, _device: Any) -> Iterator[FakeStream]:
    yield FakeStream()
