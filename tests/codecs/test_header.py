"""The stream: its bytes are those of docs/format.md, and nothing else is ever accepted."""

from __future__ import annotations

import re
import struct
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cswap.codecs import registry
from cswap.codecs.base import Encoding
from cswap.codecs.registry import get_codec
from cswap.errors import ConfigError, CorruptEncodingError, UnsupportedError
from cswap.schema.tensor import TensorMeta
from cswap.testing import TensorSpec, specs
from cswap.testing.buffers import bits

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMAT = (DOCS / "format.md").read_text("utf-8")


def example(name: str) -> bytes:
    """The bytes of an example in docs/format.md, checked against the positions written there."""
    block = re.search(rf"<!-- example: {name} -->\n```\n(.*?)```", FORMAT, re.DOTALL)
    assert block is not None
    found = b""
    for line in block[1].splitlines():
        at, digits = re.match(r" *(\d+)  ((?:[0-9a-f]{2}(?: |$))+)", line).groups()  # type: ignore[union-attr]
        assert int(at) == len(found), line
        found += bytes.fromhex(digits)
    return found


def forged(stream: bytes, *changes: tuple[int, str, int]) -> bytes:
    """A stream with numbers (position, struct format, value) changed, and a right checksum."""
    data = bytearray(stream)
    for at, kind, value in changes:
        struct.pack_into("<" + kind, data, at, value)
    struct.pack_into("<I", data, 4, zlib.crc32(data[8:]))
    return bytes(data)


STREAM = example("stream")


def test_worked_example_of_the_stream():
    x = torch.tensor([[1.0, -2.0], [0.0, 0.5]]).t()
    encoding = Encoding.from_bytes(STREAM)
    assert get_codec("raw").encode(x).to_bytes() == STREAM
    assert (encoding.codec, encoding.meta) == ("raw", TensorMeta("float32", (2, 2), (1, 2)))
    assert torch.equal(get_codec("raw").decode(encoding), x)


def test_worked_example_of_the_tile_container():
    x = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    assert bytes(get_codec("zvc").encode(x).payload.tolist()) == example("tiles")


@pytest.mark.parametrize(
    ("name", "x"),
    [("lz4", torch.zeros(64, dtype=torch.int32)), ("lz4 raw", torch.arange(5, dtype=torch.uint8))],
)
def test_worked_examples_of_lz4(name, x):
    pytest.importorskip("lz4")
    codec = get_codec("lz4")
    payload = torch.frombuffer(bytearray(example(name)), dtype=torch.uint8)
    encoding = Encoding("lz4", codec.encode(x).meta, payload)
    assert torch.equal(codec.decode(encoding), x)


def test_every_codec_has_its_row_and_page():
    rows = re.findall(r"^\| (`.*?) \| .*? \| \[.*?\]\((.*?)\) \|$", FORMAT, re.MULTILINE)
    named = {name for names, _ in rows for name in re.findall(r"`(.*?)`", names)}
    assert named == {*registry._BUILT_IN, *registry.NVCOMP, *registry.COMPOSITES}
    pages = [page for _, page in rows if not page.startswith("#")]
    assert [page for page in pages if not (DOCS / page).is_file()] == []


@given(spec=specs(max_numel=500))
def test_layout_and_payload_come_back(spec: TensorSpec):
    x = spec.build()
    encoding = get_codec("raw").encode(x)
    stream = encoding.to_bytes()
    again = Encoding.from_bytes(stream)
    assert (again.codec, again.meta) == ("raw", encoding.meta)
    assert torch.equal(again.payload, encoding.payload)
    assert again.payload.data_ptr() % 16 == 0
    assert (len(stream) - encoding.nbytes) % 16 == 0
    assert torch.equal(bits(get_codec("raw").decode(again)), bits(x))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_is_read_and_copied(kind):
    data = bytearray(STREAM)
    encoding = Encoding.from_bytes(kind(data))
    data[80:] = bytes(16)
    assert bytes(encoding.payload.tolist()) == STREAM[80:]


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes):
    for stream in (data, STREAM[:24] + data, STREAM + data + b"\0"):
        with pytest.raises(CorruptEncodingError):
            Encoding.from_bytes(stream)


# Made up, with a right checksum.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(8, "H", 2)], "version 2: this cswap reads version 1"),
        ([(8, "H", 0)], "version 0"),
        ([(10, "H", 96)], "do not add up"),
        ([(10, "H", 64)], "do not add up"),
        ([(10, "H", 96), (16, "Q", 0)], "do not add up"),
        ([(16, "Q", 15)], "do not add up"),
        ([(16, "Q", 2**64 - 80)], "do not add up"),
        ([(12, "B", 65)], "do not add up"),
        ([(12, "B", 3)], "do not add up"),
        ([(13, "B", 0)], "do not add up"),
        ([(13, "B", 13)], "unknown, or not padded"),
        ([(14, "B", 6)], "dtype 'float3'"),
        ([(14, "B", 0)], "do not add up"),
        ([(13, "B", 0), (14, "B", 10)], "dtype 'rawfloat32'"),
        ([(15, "B", 1)], "do not add up"),
        ([(64, "B", 54)], "dtype 'float62'"),
        ([(79, "B", 1)], "not padded with zeros"),
        ([(56, "B", 0xFF)], "no such codec"),
        ([(24, "Q", 2**63)], "beyond any memory"),
        ([(24, "Q", 2**32), (32, "Q", 2**32)], "beyond any memory"),
        ([(24, "Q", 0), (32, "Q", 2**63)], "beyond any memory"),
        ([(40, "Q", 2**64 - 1)], "beyond any memory"),
        ([(24, "Q", 1), (40, "Q", 2**63)], "beyond any memory"),
        ([(40, "Q", 2**40)], "claims gaps of"),
        ([(40, "Q", 2**26)], "claims gaps of 268435468 bytes"),
    ],
)
def test_forged_headers_are_refused(changes, message):
    with pytest.raises(CorruptEncodingError, match=re.escape(message)):
        Encoding.from_bytes(forged(STREAM, *changes))


@pytest.mark.parametrize(("numel", "claim"), [(3, "claims 20 raw bytes"), (2**40, "can reach")])
def test_forged_claims_are_refused_when_they_are_decoded(numel, claim):
    encoding = Encoding.from_bytes(forged(STREAM, (24, "Q", numel)))
    with pytest.raises(CorruptEncodingError, match=claim):
        get_codec("raw").decode(encoding)


def test_a_stream_of_an_unknown_codec_is_read_and_found_by_nobody():
    encoding = Encoding.from_bytes(forged(STREAM, (56, "B", 0x78)))
    with pytest.raises(ConfigError, match=r"Did you mean 'raw'\?"):
        get_codec(encoding.codec)


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [
        ((2, 2), (1, 2)),
        ((4, 1), (1, 2**62)),  # a stride that is never taken
        ((3, 2), (1, 1)),  # overlapping windows over 4 elements
        ((2**40, 4), (0, 1)),  # expanded: takes no memory
        ((0, 2**62), (1, 1)),
        ((2, 2), (1, 1000)),  # gaps
    ],
)
def test_forged_layouts_stay_inside_their_memory(sizes, strides):
    changes = [(24, "Q", sizes[0]), (32, "Q", sizes[1]), (40, "Q", strides[0])]
    encoding = Encoding.from_bytes(forged(STREAM, *changes, (48, "Q", strides[1])))
    assert (encoding.meta.sizes, encoding.meta.strides) == (sizes, strides)
    try:
        x = get_codec("raw").decode(encoding)
    except CorruptEncodingError:
        assert 0 in sizes or encoding.raw_nbytes != 16
        return
    storage_numel = x.untyped_storage().nbytes() // x.itemsize
    assert (tuple(x.shape), x.stride()) == (sizes, strides)
    assert x.storage_offset() + encoding.meta.span <= storage_numel


def test_missing_package_is_not_called_corrupt(monkeypatch):
    stream = forged(STREAM[:56] + b"lz4" + STREAM[59:])
    monkeypatch.delitem(registry._made, "lz4", raising=False)
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(ConfigError, match=r'pip install "\.\[host\]"'):
        get_codec(Encoding.from_bytes(stream).codec)


def test_gaps_beyond_what_a_reader_trusts_are_not_written():
    x = torch.empty(2**28 + 1, dtype=torch.uint8)[:: 2**28]  # never touched but at both ends
    encoding = get_codec("raw").encode(x)
    with pytest.raises(UnsupportedError, match=r"Encode tensor\.contiguous\(\) instead"):
        encoding.to_bytes()
    x_hat = get_codec("raw").decode(encoding)
    assert (x_hat.stride(), bits(x_hat).tolist()) == (x.stride(), bits(x).tolist())


@pytest.mark.parametrize(("row", "span"), [(1, 256 << 20), (40_000, 4096 * 80_000)])
def test_gaps_as_large_as_a_reader_trusts_are_written_and_read(row, span):
    memory = torch.empty(span + 1, dtype=torch.uint8)  # never touched but at both ends
    encoding = get_codec("raw").encode(memory.as_strided((2, row), (span - row, 1)))
    assert Encoding.from_bytes(encoding.to_bytes()).meta == encoding.meta
    encoding = get_codec("raw").encode(memory.as_strided((2, row), (span - row + 1, 1)))
    with pytest.raises(UnsupportedError, match=f"span {span + 1} bytes"):
        encoding.to_bytes()


def test_as_many_dimensions_as_pytorch_has_are_read():
    x = torch.arange(4.0).view(*[1] * 63, 4)
    assert torch.equal(
        get_codec("raw").decode(Encoding.from_bytes(get_codec("raw").encode(x).to_bytes())), x
    )


def test_codec_name_that_no_header_holds_is_refused():
    encoding = Encoding.from_bytes(STREAM)
    with pytest.raises(UnsupportedError, match="its name is too long for a stream"):
        Encoding("x" * 256, encoding.meta, encoding.payload).to_bytes()


def test_zstd_allocates_nothing_that_only_the_frame_claims():
    zstandard = pytest.importorskip("zstandard")
    codec = get_codec("zstd")
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4000))
    wide = struct.pack("<IBBQ", 0xFD2FB528, 0xC0, 0xA0, 2**50)  # content of 2**50, window of 1 GiB
    for frame, message in ((bomb, "claims 67108864 bytes"), (silent, "claims"), (wide, "claims")):
        payload = struct.pack("<I", len(frame)) + frame
        encoding = Encoding(
            "zstd",
            TensorMeta("float32", (1000,), (1,)),
            torch.frombuffer(bytearray(payload), dtype=torch.uint8),
        )
        with pytest.raises(CorruptEncodingError, match=message):
            codec.decode(encoding)
