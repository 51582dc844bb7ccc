"""``fp8``: E4M3 elements, groups of 128 share a float32 scale. See docs/format/fp8.md.

    x_hat = e4m3(c) * s        c: u8 per value; s: float32, max |x| / 448
    c = E4M3 nearest to x / s, ties to even;  |x - x_hat| <= 2**-4 |x| + 2**-10 s

E4M3 is OCP's E4M3 (torch.float8_e4m3fn): no infinities, largest number 448.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap_kernels.floats import (
    E4M3_LEAST,
    E4M3_SHIFT,
    bits_of,
    float_of,
    is_raw_reference,
    pad_reference,
    round_small,
    widen_small,
)
from cswap_kernels.groups import counted, decode_groups, encode_groups
from cswap_kernels.jit import njit
from cswap_kernels.uncounted import inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP: Final = 128
"""Values that share a scale."""

E4M3_MAX: Final = 0x7E
"""Code of 448; the one above it is NaN."""

_M = np.uint32(0x7FFFFFFF)
_LEAST_SCALE = 0x00800000  # 2**-126, the smallest normal number


@njit(nogil=True, cache=True)
def to_e4m3(x):
    """The E4M3 code (u8) nearest to a float32, ties to even, saturating; not for NaN."""
    u = bits_of(x)
    code = round_small(np.uint32(u & _M), E4M3_SHIFT, E4M3_LEAST)
    code = min(np.uint32(code), np.uint32(E4M3_MAX))
    return np.uint8(code | np.uint32((u >> np.uint32(24)) & np.uint32(0x80)))


@njit(nogil=True, cache=True)
def from_e4m3(code):
    """The float32 of an E4M3 code (u8); exact."""
    c = np.uint32(code)
    magnitude = np.uint32(c & np.uint32(0x7F))
    bits = bits_of(widen_small(magnitude, E4M3_SHIFT, E4M3_LEAST))
    bits = np.uint32(0x7FC00000) if magnitude > np.uint32(E4M3_MAX) else np.uint32(bits)
    return float_of(np.uint32(bits | np.uint32((c & np.uint32(0x80)) << np.uint32(24))))


@inlined
def measure(x, at, n):
    """See cswap_kernels/groups.py: as a group's ends, the bits of max |x|."""
    top, counts = np.uint32(0), np.int32(0)
    for i in range(np.uint64(n)):
        bits = bits_of(x[at + i])
        top = max(top, np.uint32(bits & _M))
        counts = counted(counts, bits)
    return top, counts, top


@inlined
def _encode(x, at, n, top, entries, group, codes, first, random):
    bits = max(bits_of(float_of(top) / np.float32(448)), np.uint32(_LEAST_SCALE))
    entries[group] = bits
    scale = float_of(bits)
    for i in range(np.uint64(n)):
        codes[first + i] = to_e4m3(x[at + i] / scale)


@inlined
def _decode(entries, group, codes, first, x, at, n):
    scale = float_of(np.uint32(entries[group]))
    for i in range(np.uint64(n)):
        x[at + i] = from_e4m3(codes[first + i]) * scale


@njit(nogil=True, cache=True)
def fp8_encode_cpu(words, dst, args, first):
    """Tile encoder; see cswap_kernels/tiles.py."""
    return encode_groups(measure, _encode, GROUP, np.uint32, words, dst, args[0], args)


@njit(nogil=True, cache=True)
def fp8_decode_cpu(src, words, args, first):
    """Tile decoder; see cswap_kernels/tiles.py."""
    return decode_groups(_decode, GROUP, np.uint32, src, words.size, words, args[0])


def e4m3_table() -> NDArray[np.float32]:
    """[256] f32: the value of every E4M3 code."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    value[code & 127 == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


def to_e4m3_reference(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The E4M3 codes nearest to x, ties to even, saturating."""
    values = e4m3_table()[: E4M3_MAX + 1].astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2  # exact in double
    magnitude = np.abs(x).astype(np.float64)
    below = np.searchsorted(middles, magnitude, side="left")  # a tie belongs to the lower code
    above = np.searchsorted(middles, magnitude, side="right")  # a tie belongs to the upper code
    code = np.where(below % 2 == 0, below, above)
    signed: NDArray[np.uint8] = (code | np.signbit(x) * 128).astype(np.uint8)
    return signed


def fp8_encode_reference(x: NDArray[np.float32]) -> bytes | None:
    """Bytes of a tile x [n], already widened to float32; None if it is stored raw."""
    if is_raw_reference(x):
        return None
    groups = np.pad(x, (0, -x.size % GROUP)).reshape(-1, GROUP)
    scale = np.abs(groups).max(1, initial=0) / np.float32(448)
    scale = np.maximum(scale, np.float32(2.0**-126))
    codes = to_e4m3_reference(groups / scale[:, None])
    return pad_reference(scale.tobytes()) + codes.tobytes()[: x.size]


def fp8_decode_reference(data: bytes, n: int) -> NDArray[np.float32]:
    """x_hat [n] of the bytes of a tile."""
    n_groups = -(-n // GROUP)
    scale = np.repeat(np.frombuffer(data, np.float32, n_groups), GROUP)[:n]
    codes = np.frombuffer(data, np.uint8, n, -(-4 * n_groups // 16) * 16)
    return e4m3_table()[codes] * scale
