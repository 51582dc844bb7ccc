"""``int4``: groups of 32 values share a step and an offset. See docs/format/int4.md.

    x_hat = (q + z) * s        q: 4 bits per value; s: bfloat16, z: i16 per group
    s = (hi - lo) / 15 or / 14, rounded up to a bfloat16; z = floor(lo / s)
    q = floor(x / s - z + u), u uniform in [0, 1), so that x_hat is x on average;  |x - x_hat| <= s

0 is a multiple of s, so it stays 0. In a group without negative values no other value becomes 0:
ReLU's backward pass tells where its input was positive by where its output is not 0. Such a value
becomes s instead of 0, and so is too large on average. In other groups, which are no ReLU's output,
that bias would cost more than it gains.

A group that does not reach from one multiple of s to the 15th after it (lo = 0 does) needs the
larger s, to have room for where its grid begins. (q + z) * s has no more than 24 significant bits:
decoding is exact in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap_kernels.floats import (
    bits_of,
    float_of,
    floor,
    is_raw_reference,
    ordered,
    pad_reference,
    rint,
)
from cswap_kernels.groups import counted, decode_groups, encode_groups
from cswap_kernels.jit import njit
from cswap_kernels.philox import ROW, fill_rows, random16_reference
from cswap_kernels.uncounted import inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP: Final = 32
"""Values that share a step."""

_LEAST_STEP = 0x0D800000  # 2**-100: 65536 / step stays finite
_FLATTEST = np.float32(2.0**-14)  # step / max |x| is no less: z fits 16 bits
_TOP = np.float32(15 * 65536)


@njit(nogil=True, cache=True)
def _round_up(step):
    # To a bfloat16, as bits of a float32.
    bits = max(bits_of(step), np.uint32(_LEAST_STEP))
    return np.uint32((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000))


@njit(nogil=True, cache=True)
def _grid(low, high, top):
    # Bits of the step as a float32, and z as a float32.
    spread = high - low
    least = float_of(np.uint32(top)) * _FLATTEST
    bits = _round_up(max(spread / np.float32(15), least))
    step = float_of(bits)
    zero = floor(low / step)
    if (zero + np.float32(15)) * step < high:
        bits = _round_up(max(spread / np.float32(14), least))
        zero = floor(low / float_of(bits))
    return bits, zero


@inlined
def _measure(x, at, n):
    lo, hi = np.int32(0x7FFFFFFF), np.int32(-0x80000000)  # in the order of `ordered`
    counts = np.int32(0)
    for i in range(np.uint64(n)):
        bits = bits_of(x[at + i])
        value = ordered(bits)
        lo = min(lo, value)
        hi = max(hi, value)
        counts = counted(counts, bits)
    top = max(np.int32(~hi) if hi < 0 else hi, np.int32(~lo) if lo < 0 else lo)
    return top, counts, (lo, hi, top)


@inlined
def _encode(x, at, n, ends, entries, group, codes, first, random):
    lo, hi, top = ends
    low = float_of(np.uint32(ordered(np.uint32(lo))))
    high = float_of(np.uint32(ordered(np.uint32(hi))))
    bits, zero = _grid(low, high, top)
    step = float_of(bits)
    entries[group] = np.uint32((bits >> np.uint32(16)) | np.uint32(np.int32(zero) << 16))
    base, inverse = zero * step, np.float32(65536) / step
    # the first code for values above 0
    above = np.int32(low >= np.float32(0) and zero == np.float32(0))
    for i in range(np.uint64(n)):
        # x = 0 gives a whole number of 65536ths for every rounding of the inverse.
        value = x[at + i]
        y = (value - base) * inverse
        q = np.int32(rint(min(max(y, np.float32(0)), _TOP)))
        q = np.int32(np.int32(q + np.int32(random[first + i])) >> np.int32(16))
        q = max(q, above) if value > np.float32(0) else q
        codes[first + i] = np.uint8(q)


@inlined
def _decode(entries, group, codes, first, x, at, n):
    step = float_of(np.uint32(entries[group] << np.uint32(16)))
    zero = np.int32(np.int32(entries[group]) >> np.int32(16))
    byte, shift = (first, 0) if first < codes.size else (first - np.uint64(codes.size), 4)
    # n is no more, but a constant: LLVM would unroll so short a loop before it could vectorise it.
    for i in range(np.uint64(min(n, codes.size))):
        q = np.int32(np.uint32(codes[byte + i]) >> np.uint32(shift)) & np.int32(15)
        x[at + i] = np.float32(np.int32(q + zero)) * step


@njit(nogil=True, cache=True)
def _code_bytes(n):
    # Of n words: two codes per byte, of words half a tile apart.
    return ((n + GROUP - 1) // GROUP + 1) // 2 * GROUP


@njit(nogil=True, cache=True)
def int4_encode_cpu(words, dst, args, first):
    """Tile encoder; args[1:3] are seed and stream of `fill_rows`. See cswap_kernels/tiles.py."""
    random = np.empty((words.size + ROW - 1) // ROW * ROW, np.uint16)
    fill_rows(random, first // ROW, args[1], args[2])
    end = encode_groups(_measure, _encode, GROUP, np.uint32, words, dst, args[0], random)
    if end < 0:
        return end
    start, half = end - words.size, _code_bytes(words.size)
    dst[end : start + 2 * half] = 0
    codes, upper = dst[start:], dst[start + half :]
    for i in range(np.uint64(half)):
        codes[i] = np.uint8(codes[i] | np.uint8(upper[i] << np.uint8(4)))
    return start + half


@njit(nogil=True, cache=True)
def int4_decode_cpu(src, words, args, first):
    """Tile decoder; see cswap_kernels/tiles.py."""
    code_bytes = _code_bytes(words.size)
    return decode_groups(_decode, GROUP, np.uint32, src, code_bytes, words, args[0])


def int4_encode_reference(
    x: NDArray[np.float32], seed: int, stream: int, first: int
) -> bytes | None:
    """Bytes of a tile x [n], already widened to float32; None if it is stored raw."""
    if is_raw_reference(x):
        return None
    groups = np.pad(x, (0, -x.size % GROUP), mode="edge" if x.size else "empty")
    groups = groups.reshape(-1, GROUP)
    random = random16_reference(first + np.arange(groups.size), seed, stream)
    codes = np.zeros((groups.shape[0] + 1) // 2 * 2 * GROUP, np.uint32)
    scales = []
    for g, (group, u) in enumerate(zip(groups, random.reshape(-1, GROUP), strict=True)):
        lo, hi, least = group.min(), group.max(), np.abs(group).max() * _FLATTEST
        for intervals in (15, 14):
            step = np.maximum(max((hi - lo) / np.float32(intervals), least), np.float32(2.0**-100))
            step = (((step.view(np.uint32) + 0xFFFF) >> 16) << 16).view(np.float32)
            zero = np.floor(lo / step)
            if (zero + 15) * step >= hi:
                break
        y = np.clip((group - zero * step) * (np.float32(65536) / step), 0, 15 * 65536)
        q = (np.rint(y).astype(np.int64) + u) >> 16
        if lo >= 0 and zero == 0:
            q = np.where(group > 0, np.maximum(q, 1), q)
        codes[GROUP * g : GROUP * (g + 1)] = q
        scales.append(step.view(np.uint32) >> 16 | np.int32(zero).view(np.uint32) << 16)
    codes[x.size :] = 0
    low, high = codes.reshape(2, -1)
    packed = (low | high << 4).astype(np.uint8)
    return pad_reference(np.array(scales, np.uint32).tobytes()) + packed.tobytes()


def int4_decode_reference(data: bytes, n: int) -> NDArray[np.float32]:
    """x_hat [n] of the bytes of a tile."""
    n_groups = -(-n // GROUP)
    words = np.frombuffer(data, np.uint32, n_groups)
    packed = np.frombuffer(data, np.uint8, offset=-(-4 * n_groups // 16) * 16)
    codes = np.concatenate((packed & 15, packed >> 4))[:n].astype(np.int32)
    step = np.repeat((words << 16).view(np.float32), GROUP)[:n]
    zero = np.repeat(words.view(np.int32) >> 16, GROUP)[:n]
    return (codes + zero).astype(np.float32) * step
