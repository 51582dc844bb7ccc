"""``expk`` on CUDA: words from an encoding, which may be hostile; see expk.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int32, uint8, uint32

from cswap_kernels.cuda.expk_escapes import cut_masks, escape_access
from cswap_kernels.cuda.expk_layout import NO_CODE, sections
from cswap_kernels.cuda.planes import parts_bytes, whole_groups
from cswap_kernels.cuda.primitives import as_u8, as_u32
from cswap_kernels.cuda.quads import FLAGS, every, gathered_flags, get_fields, halves
from cswap_kernels.cuda.warps import padded
from cswap_kernels.expk import HEADER

if TYPE_CHECKING:
    from cswap_kernels.cuda.expk_layout import Layout


@cuda.jit(device=True)
def get_header(src):
    """k, zero code, largest exponent (i32), and escapes (u32): all as they stand there."""
    head, escapes = uint32(as_u32(src)[int32(0)]), uint32(as_u32(src)[int32(1)])
    k, zero_code = int32(head & uint32(255)), int32(uint32(head >> uint32(8)) & uint32(255))
    return k, zero_code, int32(head >> uint32(16)), escapes


def decoder(layout: Layout, narrow: Any) -> Any:
    """`decode` for one layout of words of the type ``narrow``; contract: container.py."""
    rows, rest_bits, field = layout.rows, layout.rest_bits, (1 << layout.exponent_bits) - 1
    _, _, _, join = layout.functions
    _, get_escapes = escape_access(layout, narrow)

    @cuda.jit(device=True)
    def get_eight(src, i, codes, rest, n, masks, x, p):
        # Eight words but for the exponents that escaped, and which these are.
        top, zero, escape = p
        a, b = halves(codes)
        a = uint32(uint32(a + escape) & uint32(FLAGS))
        b = uint32(uint32(b + escape) & uint32(FLAGS))
        masks[i] = uint8(gathered_flags(a, b))
        row = padded(n)
        j = int32(min(i, int32(int32(row >> int32(3)) - int32(1))))  # behind a row is no other
        join(src, row, j, codes, rest, top, zero, x, i)

    @cuda.jit(device=True)
    def coding(k, zero_code, high):
        # (the largest exponent, the code of exponent 0, to find the code to escape) of `get_eight`.
        escape = int32(int32(int32(1) << k) - int32(1))
        zero = int32(escape - int32(1)) if zero_code != int32(0) else int32(NO_CODE)
        return every(high), every(zero), every(int32(int32(128) - escape))

    @cuda.jit(device=True)
    def get_words(src, x, n, masks, k, p):
        # All words but for the exponents that escaped. Ends with a syncthreads.
        rest_at, codes_at = sections(n, int32(rows), int32(rest_bits))
        quarter, i = int32(whole_groups(n) >> int32(5)), int32(cuda.threadIdx.x)
        while i < quarter:
            a, b, c, d = get_fields(src, codes_at, k, quarter, i)
            r, s, t, u = get_fields(src, rest_at, int32(rest_bits), quarter, i)
            get_eight(src, i, a, r, n, masks, x, p)
            get_eight(src, int32(i + quarter), b, s, n, masks, x, p)
            get_eight(src, int32(i + int32(quarter << int32(1))), c, t, n, masks, x, p)
            get_eight(src, int32(i + int32(quarter * int32(3))), d, u, n, masks, x, p)
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        if nbytes < int32(HEADER):
            return int32(-1)
        k, zero_code, high, count = get_header(src)
        if k < int32(3) or k > int32(4) or zero_code > int32(1) or count > uint32(n):
            return int32(-1)
        escapes = int32(count)
        _, codes_at = sections(n, int32(rows), int32(rest_bits))
        at = int32(codes_at + parts_bytes(n, k))
        if high > int32(field) or nbytes != int32(at + int32(escapes * int32(3))):
            return int32(-1)
        masks = as_u8(tmp)
        get_words(src, x, n, masks, k, coding(k, zero_code, high))
        if n & int32(63):
            cut_masks(masks, n)
        if cuda.syncthreads_or(get_escapes(x, n, src, at, escapes, tmp)):
            return int32(-1)
        return int32(0)

    return decode
