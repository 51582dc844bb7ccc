"""``mxfp8``: OCP Microscaling MXFP8, E4M3 elements. See docs/format/mxfp8.md.

    x_hat = e4m3(c) * 2**(e - 127)      c: u8 per value; e: u8 (E8M0) per group of 32
    e = 127 + floor(log2(max |x|)) - 8, at least 0; c = E4M3 nearest to x / 2**(e - 127)

8 is the exponent of E4M3's largest number, 448 = 1.75 * 2**8. Quotients beyond 448 saturate.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 6.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap_kernels.floats import float_of, is_raw_reference, pad_reference
from cswap_kernels.fp8 import e4m3_table, from_e4m3, measure, to_e4m3, to_e4m3_reference
from cswap_kernels.groups import decode_groups, encode_groups
from cswap_kernels.jit import njit
from cswap_kernels.uncounted import inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP: Final = 32
"""Values that share a scale: the specification's k."""

E_MAX: Final = 8
"""Exponent of E4M3's largest number."""


@njit(nogil=True, cache=True)
def e8m0(code):
    """The float32 of an E8M0 scale (u8): 2**(code - 127), NaN for 255."""
    c = np.uint32(code)
    bits = np.uint32(c << np.uint32(23))
    bits = np.uint32(0x00400000) if c == 0 else bits  # 2**-127 is not a normal number
    bits = np.uint32(0x7FC00000) if c == 255 else np.uint32(bits)
    return float_of(np.uint32(bits))


@inlined
def _encode(x, at, n, top, entries, group, codes, first, random):
    scale = max(np.int32(top >> np.uint32(23)) - np.int32(E_MAX), np.int32(0))
    entries[group] = np.uint8(scale)
    inverse = float_of(np.uint32(np.uint32(254 - scale) << np.uint32(23)))
    for i in range(np.uint64(n)):
        codes[first + i] = to_e4m3(x[at + i] * inverse)


@inlined
def _decode(entries, group, codes, first, x, at, n):
    scale = e8m0(entries[group])
    for i in range(np.uint64(n)):
        x[at + i] = from_e4m3(codes[first + i]) * scale


@njit(nogil=True, cache=True)
def mxfp8_encode_cpu(words, dst, args, first):
    """Tile encoder; see cswap_kernels/tiles.py."""
    return encode_groups(measure, _encode, GROUP, np.uint8, words, dst, args[0], args)


@njit(nogil=True, cache=True)
def mxfp8_decode_cpu(src, words, args, first):
    """Tile decoder; see cswap_kernels/tiles.py."""
    return decode_groups(_decode, GROUP, np.uint8, src, words.size, words, args[0])


def mxfp8_encode_reference(x: NDArray[np.float32]) -> bytes | None:
    """Bytes of a tile x [n], already widened to float32; None if it is stored raw."""
    if is_raw_reference(x):
        return None
    groups = np.pad(x, (0, -x.size % GROUP)).reshape(-1, GROUP)
    amax = np.abs(groups).max(1, initial=0)
    scale = np.maximum((amax.view(np.uint32) >> 23).astype(np.int32) - E_MAX, 0)
    quotients = np.ldexp(groups, 127 - scale[:, None]).astype(np.float32)
    codes = to_e4m3_reference(quotients)
    return pad_reference(scale.astype(np.uint8).tobytes()) + codes.tobytes()[: x.size]


def mxfp8_decode_reference(data: bytes, n: int) -> NDArray[np.float32]:
    """x_hat [n] of the bytes of a tile."""
    n_groups = -(-n // GROUP)
    scale = np.frombuffer(data, np.uint8, n_groups).astype(np.int32)
    factor = np.where(scale == 255, np.nan, 2.0 ** (scale - 127.0)).astype(np.float32)
    codes = np.frombuffer(data, np.uint8, n, -(-n_groups // 16) * 16)
    return e4m3_table()[codes] * np.repeat(factor, GROUP)[:n]
