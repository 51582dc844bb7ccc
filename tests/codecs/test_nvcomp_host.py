"""What nvCOMP encoded on a GPU, decoded on the host."""

from __future__ import annotations

import random
import re
import struct
import sys
import zlib
from pathlib import Path

import pytest

from cswap.codecs.nvcomp_host import chunk_decoder, decode_on_host
from cswap.errors import ConfigError, CorruptEncodingError
from tests.codecs.nvcomp_stand_in import container

PAGE = Path(__file__).resolve().parents[2] / "docs" / "format" / "nvcomp.md"
CHUNK = 1 << 16
RAW = bytes(range(8)) * 8 + bytes(4032) + b"cswap" * 20
PACKAGES = {
    "nvcomp-lz4": "lz4.block",
    "nvcomp-zstd": "zstandard",
    "nvcomp-snappy": "cramjam",
    "nvcomp-deflate": "zlib",
}


def example():
    """The container of docs/format/nvcomp.md, which nvCOMP wrote."""
    block = re.search(
        r"<!-- example: nvcomp -->\n```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )
    assert block is not None
    found = b""
    for line in block[1].splitlines():
        at, digits = re.match(r" *(\d+)  ((?:[0-9a-f]{2}(?: |$))+)", line).groups()  # type: ignore[union-attr]
        assert int(at) == len(found), line
        found += bytes.fromhex(digits)
    return found


def raw_stream(name, raw):
    """A chunk as nvCOMP's RAW streams are, by the package that knows the algorithm."""
    package = pytest.importorskip(PACKAGES[name])
    if name == "nvcomp-lz4":
        return package.compress(raw, store_size=False)
    if name == "nvcomp-zstd":
        return package.ZstdCompressor().compress(raw)
    if name == "nvcomp-snappy":
        return bytes(package.snappy.compress_raw(raw))
    stream = zlib.compressobj(6, zlib.DEFLATED, -15)
    return stream.compress(raw) + stream.flush()


def contents(nbytes):
    return bytes(random.Random(nbytes).choices(b"aaaaaabc\0", k=nbytes))


def test_worked_example():
    pytest.importorskip("lz4")
    assert decode_on_host("nvcomp-lz4", example(), 4196) == RAW


def test_the_worked_example_is_laid_out_as_the_containers_of_these_tests():
    lz4 = pytest.importorskip("lz4.block")
    written = example()
    segments = (written[104:141], written[144:159])
    assert [lz4.decompress(s, uncompressed_size=4096) for s in segments] == [RAW[:4096], RAW[4096:]]
    made = bytearray(container(segments, 4196, 4096))
    made[52] = 1  # a flag
    assert bytes(made) == written


@pytest.mark.parametrize("name", PACKAGES)
def test_a_raw_stream_is_one_chunk(name):
    for nbytes in (1, 1000, CHUNK):
        raw = contents(nbytes)
        stream = memoryview(raw_stream(name, raw))
        assert chunk_decoder(name)(stream, nbytes) == raw


@pytest.mark.parametrize("nbytes", [1000, CHUNK, CHUNK + 1, 3 * CHUNK + 777])
@pytest.mark.parametrize("name", PACKAGES)
def test_containers(name, nbytes):
    raw = contents(nbytes)
    segments = [raw_stream(name, raw[i : i + CHUNK]) for i in range(0, nbytes, CHUNK)]
    payload = container(segments, nbytes)
    for given in (payload, bytearray(payload), memoryview(payload)):
        assert decode_on_host(name, given, nbytes) == raw


@pytest.mark.parametrize("name", PACKAGES)
def test_as_long_as_raw_is_raw(name):
    pytest.importorskip(PACKAGES[name])
    assert decode_on_host(name, RAW, len(RAW)) == RAW
    assert decode_on_host(name, b"", 0) == b""


@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("name", PACKAGES)
def test_a_chunk_of_another_length_is_refused(name, wrong):
    raw = contents(2000)
    payload = container([raw_stream(name, raw[: 2000 + wrong] + b"x" * max(wrong, 0))], 2000)
    with pytest.raises(CorruptEncodingError, match=f"codec '{name}': "):
        decode_on_host(name, payload, 2000)


@pytest.mark.parametrize("name", PACKAGES)
def test_damaged_chunks_are_refused_or_of_the_right_length(name):
    raw = contents(5000)
    payload = container([raw_stream(name, raw)], 5000)
    refused = 0
    for at in range(88, min(len(payload), 400)):
        damaged = bytearray(payload)
        damaged[at] ^= 0xFF
        try:
            assert len(decode_on_host(name, damaged, 5000)) == 5000
        except CorruptEncodingError:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    ("at", "kind", "value", "message"),
    [
        (0, "I", 0, "begins with 0x00000000, not with nvCOMP 6's 0x52911327"),
        (8, "Q", 1 << 40, "do not add up"),
        (16, "Q", 4197, "claims 4197 raw bytes, 4196 expected"),
        (24, "Q", 3, "do not add up"),
        (24, "Q", 1 << 60, "do not add up"),
        (32, "Q", 0, "do not add up"),
        (32, "Q", 2048, "do not add up"),
        (40, "I", 60, "do not add up"),
        (40, "I", 1 << 31, "do not add up"),
        (80, "Q", 8, "chunk 1 of 15 bytes begins at 8; the one before ends at 37, the last at 56"),
        (80, "Q", 1 << 63, "chunk 1 of 15 bytes begins at 9223372036854775808"),
        (88, "Q", 41, "chunk 1 of 15 bytes begins at 40; the one before ends at 41"),
        (96, "Q", 17, "chunk 1 of 17 bytes begins at 40"),
    ],
)
def test_damaged_containers_are_refused(at, kind, value, message):
    pytest.importorskip("lz4")
    damaged = bytearray(example())
    struct.pack_into("<" + kind, damaged, at, value)
    with pytest.raises(CorruptEncodingError, match=re.escape(message)):
        decode_on_host("nvcomp-lz4", damaged, 4196)


def test_truncated_containers_are_refused():
    pytest.importorskip("lz4")
    for nbytes in range(len(example())):
        with pytest.raises(CorruptEncodingError, match=r"its header alone|do not add up"):
            decode_on_host("nvcomp-lz4", example()[:nbytes], 4196)


@pytest.mark.parametrize("name", ["nvcomp-ans", "nvcomp-gdeflate", "nvcomp-cascaded", "zvc"])
def test_what_only_nvcomp_decodes_is_refused(name):
    with pytest.raises(
        ConfigError, match=rf"codec='{name}': cannot be decoded on the host\. Known: nvcomp-lz4, "
    ):
        decode_on_host(name, b"", 1)


@pytest.mark.parametrize("name", sorted(set(PACKAGES) - {"nvcomp-deflate"}))
def test_a_missing_package_is_named_with_its_remedy(name, monkeypatch):
    package = PACKAGES[name].partition(".")[0]
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(
        ConfigError, match=rf"needs the package '{package}' .*pip install {package}"
    ):
        decode_on_host(name, b"", 1)
