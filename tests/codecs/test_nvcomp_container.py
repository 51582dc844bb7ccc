"""The head of the containers that nvCOMP writes."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from cswap.codecs.nvcomp_container import HEADER_BYTES, check_header
from cswap.errors import CorruptEncodingError
from tests.codecs.nvcomp_stand_in import container

PAGE = Path(__file__).resolve().parents[2] / "docs" / "format" / "nvcomp.md"
CHUNK = 1 << 16
RAW = bytes(range(8)) * 8 + bytes(4032) + b"cswap" * 20
N_RAW = CHUNK + 100
PAYLOAD = container([bytes(37), bytes(15)], N_RAW)


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


def test_the_worked_example_is_laid_out_as_the_containers_of_these_tests():
    lz4 = pytest.importorskip("lz4.block")
    written = example()
    segments = (written[104:141], written[144:159])
    assert [lz4.decompress(s, uncompressed_size=4096) for s in segments] == [RAW[:4096], RAW[4096:]]
    made = bytearray(container(segments, 4196, 4096))
    made[52] = 1  # a flag
    assert bytes(made) == written


def check(payload):
    check_header(payload[:HEADER_BYTES], len(payload), N_RAW)


@pytest.mark.parametrize(
    ("at", "kind", "value", "message"),
    [
        (0, "I", 0, "begins with 0x00000000, not with nvCOMP 6's 0x52911327"),
        (8, "Q", 1 << 40, "do not add up"),
        (16, "Q", N_RAW + 1, f"claims {N_RAW + 1} raw bytes, {N_RAW} expected"),
        (24, "Q", 3, "do not add up"),
        (24, "Q", 1 << 60, "do not add up"),
        (32, "Q", 0, "do not add up"),
        (32, "Q", CHUNK // 2, "do not add up"),
        (32, "Q", CHUNK + 50, "in chunks of 65586 bytes, 65536 expected"),
        (40, "I", 60, "do not add up"),
        (40, "I", 1 << 31, "do not add up"),
    ],
)
def test_damaged_headers_are_refused(at, kind, value, message):
    check(PAYLOAD)
    damaged = bytearray(PAYLOAD)
    struct.pack_into("<" + kind, damaged, at, value)
    with pytest.raises(CorruptEncodingError, match=re.escape(message)):
        check(bytes(damaged))


def test_truncated_containers_are_refused():
    for nbytes in range(len(PAYLOAD)):
        with pytest.raises(CorruptEncodingError, match=r"its header alone|do not add up"):
            check(PAYLOAD[:nbytes])
