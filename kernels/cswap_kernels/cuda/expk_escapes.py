"""``expk`` on CUDA: words whose exponent has no code; see expk.py.

A thread takes 32 words, of which a mask in ``tmp`` has a bit each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int32, uint8, uint16, uint32

from cswap_kernels.cuda.planes import whole_groups
from cswap_kernels.cuda.primitives import as_u16
from cswap_kernels.cuda.warps import block_exclusive

if TYPE_CHECKING:
    from cswap_kernels.cuda.expk_layout import Layout


@cuda.jit(device=True)
def cut_masks(masks, n):
    """Clear the bits of words from n to a multiple of 64: src may hold anything there.

    Ends with a syncthreads.
    """
    i = int32(int32(n >> int32(3)) + int32(cuda.threadIdx.x))
    if i < int32(whole_groups(n) >> int32(3)):
        inside = int32(max(int32(n - int32(i << int32(3))), int32(0)))
        kept = uint32(uint32(uint32(1) << uint32(inside)) - uint32(1))
        masks[i] = uint8(uint32(uint32(masks[i]) & kept))
    cuda.syncthreads()


@cuda.jit(device=True)
def next_escapes(masks, base, n, tmp):
    """(mask of this thread's 32 words, escapes before them and of all, from group base on)."""
    group, mask = int32(base + int32(cuda.threadIdx.x)), uint32(0)
    if group < int32(whole_groups(n) >> int32(5)):
        mask = uint32(masks[group])
    before, total = block_exclusive(int32(cuda.popc(mask)), tmp)
    return mask, before, total


@cuda.jit(device=True)
def lowest(mask):
    """Index of the lowest bit of a mask that is set."""
    return int32(int32(31) - int32(cuda.clz(uint32(mask & uint32(uint32(~mask) + uint32(1))))))


@cuda.jit(device=True)
def first_word(base, mask):
    """Index of the first word of this thread's mask, and the mask without it."""
    group = int32(base + int32(cuda.threadIdx.x))
    i = int32(int32(group << int32(5)) + lowest(mask))
    return i, uint32(mask & uint32(mask - uint32(1)))


def exponent_bytes_access(layout: Layout, narrow: Any) -> tuple[Any, Any]:
    """(put, get) of the exponent of a word as whole bytes.

    put(dst, at, word): write that of a word.
    get(src, at, word): the word with the exponent that was written.
    """
    mantissa_bits, field = layout.mantissa_bits, (1 << layout.exponent_bits) - 1
    others = ~(field << mantissa_bits) & ((1 << narrow.bitwidth) - 1)

    @cuda.jit(device=True)
    def put(dst, at, word):
        exponent = uint32(uint32(word) >> uint32(mantissa_bits))
        dst[at] = uint8(uint32(exponent & uint32(field)))

    @cuda.jit(device=True)
    def get(src, at, word):
        exponent = uint32(uint32(src[at]) & uint32(field))
        kept = uint32(uint32(word) & uint32(others))
        return narrow(uint32(kept | uint32(exponent << uint32(mantissa_bits))))

    return put, get


def escape_access(layout: Layout, narrow: Any) -> tuple[Any, Any]:
    """(put, get) of all escapes of a tile: positions (u16), then exponents (u8), in order.

    put(x, n, dst, at, escapes, tmp)
        Write them from byte ``at`` on.
    get(x, n, src, at, escapes, tmp) -> i32
        Put their exponents into words of x. 1 if positions or the count are wrong, else 0.
    """
    put_exponent, with_exponent = exponent_bytes_access(layout, narrow)

    @cuda.jit(device=True)
    def put(x, n, dst, at, escapes, tmp):
        positions, exponents = as_u16(dst), int32(at + int32(escapes << int32(1)))
        base = int32(0)
        while base < int32(whole_groups(n) >> int32(5)):
            mask, j, total = next_escapes(tmp, base, n, tmp)
            while mask != uint32(0):
                i, mask = first_word(base, mask)
                positions[int32(int32(at >> int32(1)) + j)] = uint16(i)
                put_exponent(dst, int32(exponents + j), x[i])
                j = int32(j + int32(1))
            at = int32(at + int32(total << int32(1)))
            exponents = int32(exponents + total)
            base = int32(base + int32(cuda.blockDim.x))

    @cuda.jit(device=True)
    def get(x, n, src, at, escapes, tmp):
        positions, exponents = as_u16(src), int32(at + int32(escapes << int32(1)))
        wrong, base, done = int32(0), int32(0), int32(0)
        while base < int32(whole_groups(n) >> int32(5)):
            mask, j, total = next_escapes(tmp, base, n, tmp)
            j = int32(j + done)
            while mask != uint32(0):
                i, mask = first_word(base, mask)
                good = j < escapes
                if good:
                    good = int32(positions[int32(int32(at >> int32(1)) + j)]) == i
                if good:
                    place = int32(exponents + j)
                    x[i] = with_exponent(src, place, x[i])
                else:
                    wrong = int32(1)
                j = int32(j + int32(1))
            done = int32(done + total)
            base = int32(base + int32(cuda.blockDim.x))
        return wrong if done == escapes else int32(1)

    return put, get
