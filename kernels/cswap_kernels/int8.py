"""``int8``: groups of 128 values share a scale and a zero point. See docs/format/int8.md.

    x_hat = (q - z) * s        q: u8 per value; s: float32 whose low 8 bits are 0; z: u8
    s = (hi - lo) / 255, rounded up to 16 significant bits, with lo = min(x, 0), hi = max(x, 0)
    z = rint(-lo / s), q = rint(x / s) + z;  |x - x_hat| <= s / 2, with an exception

The exception: a nonzero value is not encoded as z, which decodes to 0. ReLU's backward pass tells
where its input was positive by where its output is not 0. It takes the code next to z on its own
side, if there is one: |x - x_hat| < s where |x| <= s / 2.

The zero point takes the place of the scale's low 8 bits. z = 0 is a group without negative values,
z = 255 one without positive, z = 128 a symmetric one: the same formula for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap_kernels.floats import bits_of, float_of, is_raw_reference, pad_reference, rint
from cswap_kernels.groups import counted, decode_groups, encode_groups
from cswap_kernels.jit import njit
from cswap_kernels.uncounted import inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP: Final = 128
"""Values that share a scale."""

_LEAST_SCALE = 0x00800000  # 2**-126: its reciprocal is finite


@inlined
def _measure(x, at, n):
    hi = np.int32(0)  # bits of the largest value, 0 counted in: negative ones are less, as i32
    lo = np.uint32(0)  # and of the smallest, if any is negative: as u32 above all that are not
    counts = np.int32(0)
    for i in range(np.uint64(n)):
        bits = bits_of(x[at + i])
        hi = max(hi, np.int32(bits))
        lo = max(lo, np.uint32(bits))
        counts = counted(counts, bits)
    return max(hi, np.int32(lo & np.uint32(0x7FFFFFFF))), counts, (hi, lo)


@inlined
def _encode(x, at, n, ends, entries, group, codes, first, random):
    hi, lo = ends
    low = float_of(lo) if np.int32(lo) < 0 else np.float32(0)
    spread = float_of(np.uint32(hi)) - low
    scale = max(bits_of(spread / np.float32(255)), np.uint32(_LEAST_SCALE))
    scale = np.uint32((scale + np.uint32(255)) & np.uint32(0xFFFFFF00))
    inverse = np.float32(1) / float_of(scale)
    zero = np.int32(rint(-low * inverse))
    entries[group] = np.uint32(scale | np.uint32(zero))
    # z is for 0 alone. It has no lower neighbour if it is 0; that above 255 is cut off.
    down = np.int32(-1) if zero > 0 else np.int32(0)
    for i in range(np.uint64(n)):
        value = x[at + i]
        k = np.int32(rint(value * inverse))
        k = max(k, np.int32(1)) if value > np.float32(0) else k
        k = min(k, down) if value < np.float32(0) else k
        codes[first + i] = np.uint8(min(np.uint32(np.int32(k) + zero), np.uint32(255)))


@inlined
def _decode(entries, group, codes, first, x, at, n):
    scale = float_of(np.uint32(entries[group] & np.uint32(0xFFFFFF00)))
    zero = np.int32(entries[group] & np.uint32(255))
    for i in range(np.uint64(n)):
        x[at + i] = np.float32(np.int32(np.int32(codes[first + i]) - zero)) * scale


@njit(nogil=True, cache=True)
def int8_encode_cpu(words, dst, args, first):
    """Tile encoder; see cswap_kernels/tiles.py."""
    return encode_groups(_measure, _encode, GROUP, np.uint32, words, dst, args[0], args)


@njit(nogil=True, cache=True)
def int8_decode_cpu(src, words, args, first):
    """Tile decoder; see cswap_kernels/tiles.py."""
    return decode_groups(_decode, GROUP, np.uint32, src, words.size, words, args[0])


def int8_encode_reference(x: NDArray[np.float32]) -> bytes | None:
    """Bytes of a tile x [n], already widened to float32; None if it is stored raw."""
    if is_raw_reference(x):
        return None
    groups = np.pad(x, (0, -x.size % GROUP)).reshape(-1, GROUP)
    lo, hi = groups.min(1, initial=0), groups.max(1, initial=0)
    scale = np.maximum((hi - lo) / np.float32(255), np.float32(2.0**-126))
    bits = (scale.view(np.uint32) + 255) & ~np.uint32(255)
    inverse = 1 / bits.view(np.float32)
    zero = np.rint(-lo * inverse)
    steps = np.rint(groups * inverse[:, None])
    steps = np.where(steps == 0, np.sign(groups), steps)
    codes = np.clip(steps + zero[:, None], 0, 255)
    scales: bytes = (bits | zero.astype(np.uint32)).tobytes()
    data: bytes = codes.astype(np.uint8).tobytes()[: x.size]
    return pad_reference(scales) + data


def int8_decode_reference(data: bytes, n: int) -> NDArray[np.float32]:
    """x_hat [n] of the bytes of a tile."""
    n_groups = -(-n // GROUP)
    words = np.frombuffer(data, np.uint32, n_groups)
    scale = np.repeat((words & ~np.uint32(255)).view(np.float32), GROUP)[:n]
    zero = np.repeat(words & 255, GROUP)[:n].astype(np.int32)
    codes = np.frombuffer(data, np.uint8, n, -(-4 * n_groups // 16) * 16)
    return (codes - zero).astype(np.float32) * scale
