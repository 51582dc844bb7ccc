"""The profiler on CUDA: the counts of cswap_kernels/profile.py, a warp per sampled piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int32, int64, types, uint32, uint64

from cswap_kernels.cuda.primitives import FULL, atomic_add, atomic_max, signed64, unsigned64
from cswap_kernels.cuda.warps import WORD_TYPES, lane_id, n_warps, warp_id, warp_sum
from cswap_kernels.profile import (
    AMAX,
    FOLLOWERS,
    INT_BITS,
    NON_FINITE,
    PIECES,
    REACHES,
    REPEATS,
    SPREAD,
    SPREAD_NONZERO,
    WORDS,
    ZERO_EXPONENT,
    ZEROS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

TOP_BIT = 1 << 63


def profile_signature(word: int) -> Any:
    """words, counts, n_words, pieces, words of a piece, step, layout (5): see `profile_kernel`."""
    i32, i64, u64 = types.int32, types.int64, types.uint64
    pointers = types.CPointer(WORD_TYPES[word]), types.CPointer(u64)
    return types.void(*pointers, i64, i32, i32, i64, i64, i64, u64, i64, i64)


@cuda.jit(device=True)
def warp_max64(value):
    """Largest i64 of the lanes, in every lane."""
    step = int32(16)
    while step > int32(0):
        value = int64(max(value, int64(cuda.shfl_xor_sync(FULL, value, step))))
        step = int32(step >> int32(1))
    return value


@cuda.jit(device=True)
def count(counts, which, value):
    """Add the lanes' findings to one of the counts."""
    total = warp_sum(value)
    if lane_id() == int32(0) and total != int32(0):
        atomic_add(counts, int32(which), uint64(uint32(total)))


@cuda.jit(device=True)
def word_at(x, start, i):
    """A word as i64."""
    return signed64(uint64(x[int64(start + int64(i))]))


@cuda.jit(device=True)
def count_values(x, start, n, counts):
    """Count zeros, repeats, and the words themselves."""
    zeros, repeats, i = int32(0), int32(0), lane_id()
    while i < n:
        own = x[int64(start + int64(i))]
        if own == 0:
            zeros = int32(zeros + int32(1))
        if i > int32(0) and own == x[int64(int64(start + int64(i)) - int64(1))]:
            repeats = int32(repeats + int32(1))
        i = int32(i + int32(32))
    count(counts, ZEROS, zeros)
    count(counts, REPEATS, repeats)
    if lane_id() == int32(0):
        atomic_add(counts, int32(WORDS), uint64(uint32(n)))
        atomic_add(counts, int32(FOLLOWERS), uint64(uint32(int32(n - int32(1)))))
        atomic_add(counts, int32(PIECES), uint64(1))


@cuda.jit(device=True)
def count_floats(x, start, n, counts, magnitude, mantissa_bits, largest, nan):
    """Count infinities, NaN and exponents of 0; note max |x|. The largest exponent.

    magnitude: a mask of the bits below the sign.
    """
    top, amax, others, small = int64(0), int64(0), int32(0), int32(0)
    i = lane_id()
    while i < n:
        own = word_at(x, start, i)
        bits = int64(own & magnitude)
        exponent = int64(bits >> mantissa_bits)
        top = int64(max(top, exponent))
        if bits <= largest and own != nan:
            amax = int64(max(amax, bits))
        else:
            others = int32(others + int32(1))
        if exponent == int64(0):
            small = int32(small + int32(1))
        i = int32(i + int32(32))
    top, amax = warp_max64(top), warp_max64(amax)
    if lane_id() == int32(0):
        atomic_max(counts, int32(AMAX), unsigned64(amax))
    count(counts, NON_FINITE, others)
    count(counts, ZERO_EXPONENT, small)
    return top


@cuda.jit(device=True)
def count_from(x, start, n, counts, magnitude, least, k):
    """Count words whose magnitude is ``least`` or more, and how many of these are not 0."""
    within, nonzero, i = int32(0), int32(0), lane_id()
    while i < n:
        own = word_at(x, start, i)
        if int64(own & magnitude) >= least:
            within = int32(within + int32(1))
            if own != int64(0):
                nonzero = int32(nonzero + int32(1))
        i = int32(i + int32(32))
    count(counts, SPREAD + k, within)
    count(counts, SPREAD_NONZERO + k, nonzero)


@cuda.jit(device=True)
def count_exponents(x, start, n, counts, exponent_bits, mantissa_bits, largest, nan):
    """The counts of `count_floats`, and words within each reach of the largest exponent."""
    one = int64(1)
    magnitude = int64(int64(one << int64(exponent_bits + mantissa_bits)) - one)
    top = count_floats(x, start, n, counts, magnitude, mantissa_bits, largest, nan)
    for k in range(4):
        reach = REACHES[k]
        least = int64(int64(int64(top - int64(reach)) + one) << mantissa_bits)
        count_from(x, start, n, counts, magnitude, least, k)


@cuda.jit(device=True)
def count_width(x, start, n, counts, flip):
    """Add the bits of (largest - smallest), of words with the bits of ``flip`` flipped."""
    # They are compared as signed numbers, with the top bit flipped once more.
    lane, top = lane_id(), uint64(TOP_BIT)
    first = signed64(uint64(uint64(uint64(x[start]) ^ flip) ^ top))
    low, high, i = first, first, lane
    while i < n:
        value = signed64(uint64(uint64(uint64(x[int64(start + int64(i))]) ^ flip) ^ top))
        low, high = int64(min(low, value)), int64(max(high, value))
        i = int32(i + int32(32))
    low, high = int64(~warp_max64(int64(~low))), warp_max64(high)
    width = uint64(unsigned64(high) - unsigned64(low))
    bits = int32(int32(64) - int32(cuda.clz(width)))
    if lane == int32(0) and bits != int32(0):
        atomic_add(counts, int32(INT_BITS), uint64(uint32(bits)))


@cuda.jit(device=True)
def start_of(piece, piece_words, step):
    """Index of the first word of a piece: somewhere in its step, the same in each run."""
    jitter = int64(int64(int64(piece) * int64(0x9E3779B1)) & int64(0x7FFFFFFF))
    room = int64(int64(step - int64(piece_words)) + int64(1))
    return int64(int64(int64(piece) * step) + int64(jitter % room))


def profile_kernel(word: int) -> Callable[..., None]:
    """The kernel that profiles words of ``word`` bytes.

    Args of the kernel: ``counts`` [17], zero, as `cswap_kernels.profile` names them; ``step`` words
    from piece to piece, max(words of a piece, n_words // pieces); then the layout's five numbers.
    """

    def profile(
        words,
        counts,
        n_words,
        pieces,
        piece_words,
        step,
        exponent_bits,
        mantissa_bits,
        flip,
        largest,
        nan,
    ):
        piece = int32(int32(int32(cuda.blockIdx.x) * n_warps()) + warp_id())
        while piece < pieces:
            start = start_of(piece, piece_words, step)
            if start < n_words:
                n = int32(min(int64(piece_words), int64(n_words - start)))
                count_values(words, start, n, counts)
                if exponent_bits > int64(0):
                    count_exponents(
                        words, start, n, counts, exponent_bits, mantissa_bits, largest, nan
                    )
                elif exponent_bits == int64(0):
                    count_width(words, start, n, counts, flip)
            piece = int32(piece + int32(int32(cuda.gridDim.x) * n_warps()))

    return profile
