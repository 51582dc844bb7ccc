"""``zvc+X`` on CUDA: the format of cswap_kernels/zvc_plus.py, around X's device tile functions.

X leaves the words that it encodes as they are, and writes at most raw bytes + SLACK / 2.
Survivors are packed into the place of their encoding first: the encoding is written in `measure`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int32, uint8

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.primitives import advance, as_u32
from cswap_kernels.cuda.warps import WORD_TYPES, fill
from cswap_kernels.cuda.zvc import mask_bytes, pack, read_mask, unpack, write_mask
from cswap_kernels.zvc_plus import MASK, VERBATIM

if TYPE_CHECKING:
    from cswap_kernels.cuda.container import MakeTile, TileFunctions


@cuda.jit(device=True)
def copy_words(source, target, count):
    """Copy words within shared memory. Ends with a syncthreads."""
    i = int32(cuda.threadIdx.x)
    while i < count:
        target[i] = source[i]
        i = int32(i + int32(cuda.blockDim.x))
    cuda.syncthreads()


@cuda.jit(device=True)
def put_flags(dst, at, flags):
    """Write the last byte of a segment. Ends with a syncthreads."""
    if int32(cuda.threadIdx.x) == int32(0):
        dst[at] = uint8(flags)
    cuda.syncthreads()


def zvc_plus(make_inner: MakeTile) -> MakeTile:
    """The maker of ``zvc+X`` by the maker of X."""

    def make(word: int, as_words: Any) -> TileFunctions:
        inner_measure, inner_write, inner_decode = make_inner(word, as_words)
        zero = WORD_TYPES[word](0)

        @cuda.jit(device=True)
        def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
            masks, raw_bytes = as_u32(dst), int32(n * int32(word))
            before, count = write_mask(x, n, masks, tmp)
            if count == int32(0):
                return int32(0)
            # All words survive: no bitmask. One call of X serves both cases, for it is inlined.
            start = int32(0) if count == n else mask_bytes(n)
            if count < n:
                packed = as_words(advance(dst, start))
                pack(x, n, masks, packed, before)
                cuda.syncthreads()
                copy_words(packed, x, count)
            encoded = advance(dst, start)
            nbytes, state = inner_measure(x, count, encoded, tmp, a0, a1, a2, a3, first)
            flags, whole = int32(MASK) if count < n else int32(0), int32(count * int32(word))
            if int32(0) <= nbytes < whole:
                inner_write(x, count, encoded, tmp, state, a0, a1, a2, a3, first)
            else:
                if count == n:
                    return int32(-1)
                cuda.syncthreads()
                copy_words(x, as_words(encoded), count)
                nbytes, flags = whole, int32(int32(MASK) | int32(VERBATIM))
            end = int32(start + nbytes)
            if int32(end + int32(1)) >= raw_bytes:
                return int32(-1)
            put_flags(dst, end, flags)
            return int32(end + int32(1))

        @cuda.jit(device=True)
        def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
            if nbytes == int32(0):
                fill(x, n, 0)
                return int32(0)
            body = int32(nbytes - int32(1))
            flags, masked = int32(src[body]), int32(src[body]) != int32(0)
            if masked and int32(flags & int32(-3)) != int32(MASK):
                return int32(-1)
            start = mask_bytes(n) if masked else int32(0)
            if body < start:
                return int32(-1)
            before, count = int32(0), n
            if masked:
                before, count = read_mask(as_u32(src), n, tmp)
                if count <= int32(0) or count == n:
                    return int32(-1)
            rest, encoded = int32(body - start), advance(src, start)
            if int32(flags & int32(VERBATIM)) != int32(0):
                if rest != int32(count * int32(word)):
                    return int32(-1)
            else:
                done = inner_decode(encoded, rest, x, count, tmp, a0, a1, a2, a3, first)
                if done != int32(0):
                    return int32(-1)
                if masked:
                    copy_words(x, as_words(encoded), count)
            if masked:
                unpack(as_u32(src), as_words(encoded), before, x, n, zero)
            cuda.syncthreads()
            return int32(0)

        return *in_one_step(encode), decode

    return make
