"""``bitpack`` on CUDA: the format of cswap_kernels/bitpack.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int32, uint32, uint64

from cswap_kernels.cuda.bitpack_words import WORDS
from cswap_kernels.cuda.planes import fill_behind, parts_bytes, whole_groups
from cswap_kernels.cuda.primitives import as_u64
from cswap_kernels.cuda.quads import get_fields, halves, pair, put_fields
from cswap_kernels.cuda.warps import WORD_TYPES, lane_id, n_warps, padded, warp_id, warp_max_u32

if TYPE_CHECKING:
    from cswap_kernels.cuda.container import TileFunctions

HEADER = 16


@cuda.jit(device=True)
def warp_max_u64(value):
    """Largest u64 of the lanes, in every lane."""
    low, high = halves(value)
    top = warp_max_u32(high)
    return pair(warp_max_u32(low if high == top else uint32(0)), top)


@cuda.jit(device=True)
def block_range(low, high, tmp):
    """(smallest low, largest high) of two u64 of every thread. Ends with a syncthreads."""
    low, high = warp_max_u64(uint64(~low)), warp_max_u64(high)
    memory, lane = as_u64(tmp), lane_id()
    if lane == int32(0):
        memory[warp_id()], memory[int32(warp_id() + int32(32))] = low, high
    cuda.syncthreads()
    low = high = uint64(0)
    if lane < n_warps():
        low, high = uint64(memory[lane]), uint64(memory[int32(lane + int32(32))])
    low, high = warp_max_u64(low), warp_max_u64(high)
    cuda.syncthreads()
    return uint64(~low), high


@cuda.jit(device=True)
def encoded_bytes(n, width):
    """Bytes of an encoding of n words by ``width`` bits."""
    rows = int32(int32(width >> int32(3)) * padded(n))
    return int32(int32(int32(HEADER) + rows) + parts_bytes(n, int32(width & int32(7))))


@cuda.jit(device=True)
def put_header(dst, width, lowest):
    """The first 16 bytes."""
    if int32(cuda.threadIdx.x) == int32(0):
        eights = as_u64(dst)
        eights[int32(0)], eights[int32(1)] = uint64(width), lowest


def bitpack_tile(word: int, as_words: Any) -> TileFunctions:
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py.

    A thread takes the i-th eight words of each quarter, as docs/format/bitpack.md lays out parts.
    Words behind the tile's last one are as the smallest: their distance is 0.
    """
    wide = uint64 if word == 8 else uint32  # is compared with
    narrow = WORD_TYPES[word]
    sign = 1 << 8 * word - 1
    words, put, join = WORDS[word]

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        flip = wide(a0 & uint64(sign))
        fill_behind(x, n, x[int32(0)])
        low = wide(wide(x[int32(0)]) ^ flip)
        high, i = low, int32(cuda.threadIdx.x)
        while i < int32(whole_groups(n) >> int32(3)):
            for word_ in words(x, i):
                value = wide(word_ ^ flip)
                low, high = min(low, value), max(high, value)
            i = int32(i + int32(cuda.blockDim.x))
        lowest, highest = block_range(uint64(low), uint64(high), tmp)
        width = int32(int32(64) - int32(cuda.clz(uint64(highest - lowest))))
        nbytes = encoded_bytes(n, width)
        raw = nbytes >= int32(n * int32(word))
        return int32(-1) if raw else nbytes, (lowest, width)

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        lowest, width = state
        put_header(dst, width, lowest)
        low = uint64(lowest ^ uint64(a0 & uint64(sign)))  # the smallest word itself
        fill_behind(x, n, narrow(low))
        eights, row, rows = as_u64(dst), int32(padded(n) >> int32(3)), int32(width >> int32(3))
        bits, quarter = int32(width & int32(7)), int32(whole_groups(n) >> int32(5))
        rest_at, i = int32(int32(HEADER) + int32(rows * padded(n))), int32(cuda.threadIdx.x)
        while i < quarter:
            b, c = int32(i + quarter), int32(i + int32(quarter << int32(1)))
            d, at = int32(c + quarter), int32(HEADER >> 3)
            r = put(x, i, low, (eights, int32(at + i), row, rows, i < row))
            s = put(x, b, low, (eights, int32(at + b), row, rows, b < row))
            t = put(x, c, low, (eights, int32(at + c), row, rows, c < row))
            u = put(x, d, low, (eights, int32(at + d), row, rows, d < row))
            put_fields(dst, rest_at, bits, quarter, i, r, s, t, u)
            i = int32(i + int32(cuda.blockDim.x))

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        width = int32(src[int32(0)])
        if nbytes < int32(HEADER) or width > int32(8 * word):
            return int32(-1)
        if nbytes != encoded_bytes(n, width):
            return int32(-1)
        eights, row, rows = as_u64(src), int32(padded(n) >> int32(3)), int32(width >> int32(3))
        low = uint64(uint64(eights[int32(1)]) ^ uint64(a0 & uint64(sign)))
        bits, quarter = int32(width & int32(7)), int32(whole_groups(n) >> int32(5))
        rest_at, i = int32(int32(HEADER) + int32(rows * padded(n))), int32(cuda.threadIdx.x)
        last, at = int32(row - int32(1)), int32(HEADER >> 3)
        while i < quarter:
            a, b, c, d = get_fields(src, rest_at, bits, quarter, i)
            for rest, j in (
                (a, i),
                (b, int32(i + quarter)),
                (c, int32(i + int32(quarter << int32(1)))),
                (d, int32(i + int32(quarter * int32(3)))),
            ):
                own = int32(at + int32(min(j, last)))  # behind a row is no other
                join(x, j, low, (eights, own, row, rows, True), rest)
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return measure, write, decode
