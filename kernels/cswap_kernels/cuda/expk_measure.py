"""``expk`` on CUDA, the first two steps: which codes make the smallest encoding; see expk.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from numba import cuda, int32, uint32

from cswap_kernels.cuda.expk_layout import marks_of
from cswap_kernels.cuda.planes import fill_behind, parts_bytes, whole_groups
from cswap_kernels.cuda.quads import FLAGS, above, count_flags, every, is_255, sum_of
from cswap_kernels.cuda.warps import block_max, block_sums, padded
from cswap_kernels.cuda.zvc import zero_rest
from cswap_kernels.expk import HEADER

if TYPE_CHECKING:
    from cswap_kernels.cuda.expk_layout import Layout


ESCAPE_BYTES: Final = 3
"""u16 position, u8 exponent."""


@cuda.jit(device=True)
def fixed_bytes(n, mantissa_bits, k):
    """Bytes of an encoding without its escapes."""
    fields = int32(mantissa_bits + int32(1))
    rows = int32(int32(fields >> int32(3)) * padded(n))
    rest = parts_bytes(n, int32(fields & int32(7)))
    return int32(int32(HEADER) + int32(rows + int32(rest + parts_bytes(n, k))))


@cuda.jit(device=True)
def choose(n, mantissa_bits, escape_bytes, forced, counts):
    """The cheapest of (k, zero code): k, zero code, escapes, bytes. counts: of `sums`."""
    zeros, over5, over6, over13, over14 = counts
    k, zero_code, escapes, nbytes = int32(0), int32(0), int32(0), int32(0x7FFFFFFF)
    for option in range(4):
        own = int32(option & 1)
        bits = int32(3) if option < 2 else int32(4)
        plain, coded = (over6, over5) if option < 2 else (over14, over13)
        count = int32(coded - zeros) if own != int32(0) else plain
        total = int32(fixed_bytes(n, mantissa_bits, bits) + int32(count * escape_bytes))
        allowed = forced == int32(0) or forced == bits
        if own != int32(0) and zeros == int32(0):
            allowed = False
        if allowed and total < nbytes:
            k, zero_code, escapes, nbytes = bits, own, count, total
    return k, zero_code, escapes, nbytes


@cuda.jit(device=True)
def count_above(a, b, limit, counts):
    """`count_flags` of the bytes of two quads above a number; limit: 127 minus that number."""
    return count_flags(above(b, every(limit)), count_flags(above(a, every(limit)), counts))


@cuda.jit(device=True)
def both_sums(a, b):
    """The sums of two quads of counts in one i32; added over a block, each is up to 8192."""
    return int32(sum_of(a) | int32(sum_of(b) << int32(16)))


@cuda.jit(device=True)
def parted(both):
    """The two numbers of `both_sums`."""
    return int32(both & int32(0xFFFF)), int32(both >> int32(16))


@cuda.jit(device=True)
def sums(counts, tmp):
    """Five numbers over the block from five quads of counts of each thread."""
    zeros, over5, over6, over13, over14 = counts
    low, high, n_zeros = block_sums(
        both_sums(over5, over6), both_sums(over13, over14), sum_of(zeros), tmp
    )
    (five, six), (thirteen, fourteen) = parted(low), parted(high)
    return n_zeros, five, six, thirteen, fourteen


def measurer(layout: Layout, narrow: Any) -> Any:
    """`measure` for one layout of words of the type ``narrow``; contract: container.py."""
    mantissa_bits = layout.mantissa_bits
    peak, distances, _, _ = layout.functions

    @cuda.jit(device=True)
    def highest(x, n, tmp):
        # The largest exponent of the tile.
        high, i = int32(0), int32(cuda.threadIdx.x)
        while i < int32(whole_groups(n) >> int32(3)):
            high = int32(max(high, peak(x, i)))
            i = int32(i + int32(cuda.blockDim.x))
        return block_max(high, tmp)

    @cuda.jit(device=True)
    def count(x, n, high):
        # This thread's words of exponent 0, and those more than 5, 6, 13 and 14 below the largest.
        top, marks = every(high), marks_of(high)
        over5, over6, over13, over14 = uint32(0), uint32(0), uint32(0), uint32(0)
        zeros, i = uint32(0), int32(cuda.threadIdx.x)
        while i < int32(whole_groups(n) >> int32(3)):
            a, b = distances(x, i, top, marks)
            over5, over6 = count_above(a, b, 122, over5), count_above(a, b, 121, over6)
            over13, over14 = count_above(a, b, 114, over13), count_above(a, b, 113, over14)
            a, b = is_255(a, uint32(FLAGS)), is_255(b, uint32(FLAGS))
            zeros = count_flags(b, count_flags(a, zeros))
            i = int32(i + int32(cuda.blockDim.x))
        return zeros, over5, over6, over13, over14

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        zero_rest(x, n)
        high = highest(x, n, tmp)
        fill_behind(x, n, narrow(uint32(uint32(high) << uint32(mantissa_bits))))
        counts = sums(count(x, n, high), tmp)
        k, zero_code, escapes, nbytes = choose(
            n, int32(mantissa_bits), int32(ESCAPE_BYTES), int32(a2), counts
        )
        return nbytes, (k, zero_code, high, escapes)

    return measure
