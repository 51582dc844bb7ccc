"""Shared by the formats of groups on CUDA: all but one group; see cswap_kernels/groups.py.

measure: four words per thread: numbers by which to encode a group, to tmp; is the tile stored raw?
write: entries, and four codes per thread

A warp has 128 words at a time: one group of them, or four of 32. A format contributes its words per
group, the bytes of an entry, and device functions:

    see(bits, sizes, i, numbers) -> i32
        Of the i-th four words' bits, with sign and without, as u32: the bits of their max |x|, or
        of groups of 128 that of the warp's words. May write a u64 for each group.
    prepare(numbers, n, dst) -> whether `other` is to be called in the place of `quad`
        May turn each group's number into others, and write entries. Ends with a syncthreads if so.
    quad(four, i, numbers, dst, n) -> u32
        The codes of the i-th four float32. May write entries.
    four(entry, quad) -> four float32
        The inverse. Nothing is known of the entry (u32) and the codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from numba import cuda, float32, int32, uint32

from cswap_kernels.cuda.floats import is_raw, of_block
from cswap_kernels.cuda.fours import bits_of_four, exponents_of, four_access, magnitudes
from cswap_kernels.cuda.primitives import advance, as_u8, as_u32, as_u64, signed
from cswap_kernels.cuda.warps import block_sum, padded, warp_max, warp_sum, zero_bytes
from cswap_kernels.cuda.zvc import zero_rest

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap_kernels.cuda.container import MakeTile, TileFunctions

NUMBERS: Final = 128
"""Where numbers of the groups begin in tmp, a u64 for each of up to 64; behind `THREES`."""


@cuda.jit(device=True)
def groups_of(n):
    """Groups of 128 that have n words."""
    return int32((n + int32(127)) >> int32(7))


@cuda.jit(device=True)
def _none(numbers, n, dst):
    return False


@cuda.jit(device=True)
def _byte_per_word(n):
    return n


@cuda.jit(device=True)
def _own_quad(codes, i, n):
    return uint32(codes[i])


def entry_bytes(size: int, entry: int) -> Any:
    """A device function: bytes of the entries, of ``entry`` bytes, of n words."""
    log, up = size.bit_length() - 1, entry.bit_length() - 1

    @cuda.jit(device=True)
    def nbytes(n):
        return int32(int32((n + int32(size - 1)) >> int32(log)) << int32(up))

    return nbytes


def group_decoder(
    size: int, entry: int, four: Any, code_bytes: Any = _byte_per_word, quad_at: Any = _own_quad
) -> Callable[[int], Any]:
    """The maker, by the bytes of a word, of a format's ``decode``; contract: container.py.

    Args:
        size: words per group, 32 or 128.
        entry: bytes of a group's entry, 1 or 4.
        four: see above.
        code_bytes: device function: bytes of the codes of n words. Default: n.
        quad_at: device function (codes as u32, i, n): codes of the i-th four. Default: codes[i].
    """
    end, per_group = entry_bytes(size, entry), size.bit_length() - 3
    as_entries = {1: as_u8, 4: as_u32}[entry]

    def make(word: int) -> Any:
        _, store = four_access(word)

        @cuda.jit(device=True)
        def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
            start = padded(end(n))
            if nbytes != int32(start + code_bytes(n)):
                return int32(-1)
            entries, codes = as_entries(src), as_u32(advance(src, start))
            i = int32(cuda.threadIdx.x)
            while int32(i << int32(2)) < n:
                entry = uint32(entries[int32(i >> int32(per_group))])
                a, b, c, d = four(entry, quad_at(codes, i, n))
                store(x, i, int32(a0), a, b, c, d)
                i = int32(i + int32(cuda.blockDim.x))
            cuda.syncthreads()
            return int32(0)

        return decode

    return make


def _putter(load: Any, quad: Any) -> Any:
    @cuda.jit(device=True)
    def put(x, n, kind, numbers, dst, codes):
        i, end = int32(cuda.threadIdx.x), int32(groups_of(n) << int32(5))
        while i < end:
            codes[i] = quad(load(x, i, kind), i, numbers, dst, n)
            i = int32(i + int32(cuda.blockDim.x))

    return put


def group_tile(
    size: int, entry: int, see: Any, quad: Any, four: Any, prepare: Any = _none, other: Any = None
) -> MakeTile:
    """The maker of (measure, write, decode); arguments: see `group_decoder` and above."""
    end, make_decode = entry_bytes(size, entry), group_decoder(size, entry, four)

    def make(word: int, as_words: Any) -> TileFunctions:
        load, _ = four_access(word)
        put, put_otherwise = _putter(load, quad), _putter(load, other or quad)

        @cuda.jit(device=True)
        def stays_raw(x, n, kind, top, exponents, tmp):
            top, exponents, _ = of_block(top, exponents, int32(0), tmp)
            if not is_raw(top, exponents, n):  # whatever the number of zeros
                return False
            count, i = int32(0), int32(cuda.threadIdx.x)
            while int32(i << int32(2)) < n:
                for value in load(x, i, kind):
                    count = int32(count + int32(value != float32(0.0)))
                i = int32(i + int32(cuda.blockDim.x))
            return is_raw(top, exponents, block_sum(count, tmp))

        @cuda.jit(device=True)
        def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
            zero_rest(x, n)
            numbers = as_u64(advance(tmp, NUMBERS))
            top, exponents, i, fours = (
                int32(0),
                uint32(0),
                int32(cuda.threadIdx.x),
                int32(groups_of(n) << int32(5)),
            )
            while i < fours:
                bits = bits_of_four(load(x, i, int32(a0)))
                sizes = magnitudes(bits)
                exponents = uint32(exponents + exponents_of(sizes))
                top = int32(max(top, see(bits, sizes, i, numbers)))
                i = int32(i + int32(cuda.blockDim.x))
            if size < 128:
                top = warp_max(top)
            raw = stays_raw(x, n, int32(a0), top, warp_sum(signed(exponents)), tmp)
            return int32(-1) if raw else int32(padded(end(n)) + n), (int32(0),)

        @cuda.jit(device=True)
        def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
            numbers, start = as_u64(advance(tmp, NUMBERS)), padded(end(n))
            zero_bytes(dst, end(n), start)
            codes = as_u32(advance(dst, start))
            if prepare(numbers, n, dst):
                put_otherwise(x, n, int32(a0), numbers, dst, codes)
            else:
                put(x, n, int32(a0), numbers, dst, codes)
            if n & int32(127):  # codes were written behind the end
                cuda.syncthreads()

        return measure, write, make_decode(word)

    return make
