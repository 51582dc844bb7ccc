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
    LIMIT,
    bits_of,
    float_of,
    floats_of,
    floor,
    is_raw,
    is_raw_reference,
    merge,
    narrow_piece,
    ordered,
    pad_reference,
    padded,
    rint,
    widen_piece,
)
from cswap_kernels.jit import njit
from cswap_kernels.philox import ROW, fill_rows, random16_reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP: Final = 32
"""Values that share a step."""

_M = np.int32(0x7FFFFFFF)
_COUNT = np.int32(1 << 20)  # beyond any sum of the exponents of a group
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


# Inlined, and called with a constant n for the whole groups: then LLVM vectorises without a rest.
@njit(nogil=True, inline="always")
def _encode_groups(x, at, scales, codes, random, first_group, last_group, n):
    # Encode groups of n values each, one code per byte; x begins with value ``at``. Returns an
    # argument of `merge`.
    top = np.int32(0)
    exponents = np.int64(0)
    n_nonzero = np.int64(0)
    for group in range(first_group, last_group):
        first = np.uint64(GROUP * group)
        place = np.uint64(GROUP * group - at)
        lo = np.int32(0x7FFFFFFF)  # in the order of `ordered`
        hi = np.int32(-0x80000000)
        counts = np.int32(0)  # exponents, and _COUNT for each value that is not 0
        for i in range(np.uint64(n)):
            bits = bits_of(x[place + i])
            magnitude = np.int32(np.int32(bits) & _M)
            value = ordered(bits)
            lo = min(lo, value)
            hi = max(hi, value)
            counts = np.int32(counts + np.int32(magnitude >> np.int32(23)))
            counts = np.int32(counts + (_COUNT if magnitude != 0 else np.int32(0)))
        amax = max(np.int32(~hi) if hi < 0 else hi, np.int32(~lo) if lo < 0 else lo)
        top = max(top, amax)
        exponents += np.int64(counts & np.int32(_COUNT - np.int32(1)))
        n_nonzero += np.int64(counts >> np.int32(20))
        if top >= LIMIT:
            break
        low = float_of(np.uint32(ordered(np.uint32(lo))))
        high = float_of(np.uint32(ordered(np.uint32(hi))))
        bits, zero = _grid(low, high, amax)
        step = float_of(bits)
        scales[group] = np.uint32((bits >> np.uint32(16)) | np.uint32(np.int32(zero) << 16))
        base, inverse = zero * step, np.float32(65536) / step
        # the first code for values above 0
        least = np.int32(low >= np.float32(0) and zero == np.float32(0))
        for i in range(np.uint64(n)):
            # x = 0 gives a whole number of 65536ths for every rounding of the inverse.
            value = x[place + i]
            y = (value - base) * inverse
            q = np.int32(rint(min(max(y, np.float32(0)), _TOP)))
            q = np.int32(np.int32(q + np.int32(random[first + i])) >> np.int32(16))
            q = max(q, least) if value > np.float32(0) else q
            codes[first + i] = np.uint8(q)
    return top, exponents, n_nonzero


@njit(nogil=True, cache=True)
def _encode_piece(x, scales, codes, random, first, n):
    # Encode values [first, first + n), which are x[:n]. Returns an argument of `merge`.
    group, rest = first // GROUP, n % GROUP
    last = group + n // GROUP
    whole = _encode_groups(x, first, scales, codes, random, group, last, GROUP)
    end = last + (rest > 0)
    return merge(whole, _encode_groups(x, first, scales, codes, random, last, end, rest))


@njit(nogil=True, cache=True)
def int4_encode_cpu(words, dst, args, first):
    """Tile encoder; args[1:3] are seed and stream of `fill_rows`. See cswap_kernels/tiles.py."""
    n_groups = (words.size + GROUP - 1) // GROUP
    scales = dst[: 4 * n_groups].view(np.uint32)  # [n_groups]
    start = padded(4 * n_groups)
    dst[4 * n_groups : start] = 0
    half = (n_groups + 1) // 2 * GROUP
    codes = dst[start : start + 2 * half]  # one per byte, at first
    codes[words.size :] = 0
    random = np.empty((words.size + ROW - 1) // ROW * ROW, np.uint16)
    fill_rows(random, first // ROW, args[1], args[2])
    x = floats_of(words)
    total = (np.int32(0), np.int64(0), np.int64(0))
    for at in range(0, words.size, max(x.size, 1)):
        n = min(x.size, words.size - at)
        widen_piece(words, at, n, args[0], x)
        total = merge(total, _encode_piece(x, scales, codes, random, at, n))
    upper = codes[half:]
    for i in range(np.uint64(half)):
        codes[i] = np.uint8(codes[i] | np.uint8(upper[i] << np.uint8(4)))
    return np.int64(-1) if is_raw(total) else start + half


@njit(nogil=True, cache=True)
def _decode_piece(scales, codes, x, at, n):
    # Values [at, at + n) to x[:n].
    half = codes.size
    for group in range(at // GROUP, (at + n + GROUP - 1) // GROUP):
        step = float_of(np.uint32(scales[group] << np.uint32(16)))
        zero = np.int32(np.int32(scales[group]) >> np.int32(16))
        first = GROUP * group
        byte, shift = (first, 0) if first < half else (first - half, 4)
        place = np.uint64(first - at)
        for i in range(np.uint64(min(GROUP, at + n - first))):
            q = np.int32(codes[np.uint64(byte) + i] >> np.uint8(shift)) & np.int32(15)
            x[place + i] = np.float32(np.int32(q + zero)) * step


@njit(nogil=True, cache=True)
def int4_decode_cpu(src, words, args, first):
    """Tile decoder; see cswap_kernels/tiles.py."""
    n_groups = (words.size + GROUP - 1) // GROUP
    start = padded(4 * n_groups)
    if src.size != start + (n_groups + 1) // 2 * GROUP:
        return np.int64(-1)
    scales = src[: 4 * n_groups].view(np.uint32)  # [n_groups]
    codes = src[start:]  # [n]
    x = floats_of(words)
    for at in range(0, words.size, max(x.size, 1)):
        n = min(x.size, words.size - at)
        _decode_piece(scales, codes, x, at, n)
        narrow_piece(x, words, at, n, args[0])
    return np.int64(0)


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
