"""``expk`` on CUDA, the last two steps: rows, codes and escapes are written; see expk.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int32, uint8, uint32

from cswap_kernels.cuda.expk_escapes import escape_access
from cswap_kernels.cuda.expk_layout import marks_of, sections
from cswap_kernels.cuda.planes import parts_bytes, whole_groups
from cswap_kernels.cuda.primitives import as_u8, as_u32
from cswap_kernels.cuda.quads import (
    FLAGS,
    above,
    every,
    full,
    gathered_flags,
    is_255,
    pair,
    put_fields,
)
from cswap_kernels.cuda.warps import padded

if TYPE_CHECKING:
    from cswap_kernels.cuda.expk_layout import Layout


@cuda.jit(device=True)
def put_header(dst, k, zero_code, high, escapes):
    """The first 16 bytes."""
    words, thread = as_u32(dst), int32(cuda.threadIdx.x)
    if thread == int32(0):
        first = int32(k | int32(int32(zero_code << int32(8)) | int32(high << int32(16))))
        words[int32(0)], words[int32(1)] = uint32(first), uint32(escapes)
        words[int32(2)], words[int32(3)] = uint32(0), uint32(0)


@cuda.jit(device=True)
def coding(k, zero_code):
    """(limit, escape, zero, flags) of `codes_of`."""
    escape = int32(int32(int32(1) << k) - int32(1))
    limit = int32(escape - zero_code)
    flags = uint32(FLAGS) if zero_code != int32(0) else uint32(0)
    return every(int32(int32(128) - limit)), every(escape), every(limit), flags


@cuda.jit(device=True)
def codes_of(quad, limit, escape, zero, flags):
    """(codes, flags of those that escape) of four distances.

    ``limit`` is that of `above` for the largest distance with a code; ``escape`` and ``zero`` are
    quads of the code to escape and of that of exponent 0; ``flags`` are FLAGS if that has one.
    """
    own = is_255(quad, flags)
    escapes = uint32(above(quad, limit) & uint32(~own))
    far, own = full(escapes), full(own)
    codes = uint32(uint32(quad & uint32(~far)) | uint32(escape & far))
    return uint32(uint32(codes & uint32(~own)) | uint32(zero & own)), escapes


def writer(layout: Layout, narrow: Any) -> Any:
    """`write` for one layout of words of the type ``narrow``; contract: container.py."""
    rows, rest_bits = layout.rows, layout.rest_bits
    _, distances, put_rest, _ = layout.functions
    put_escapes, _ = escape_access(layout, narrow)

    @cuda.jit(device=True)
    def put_eight(x, i, dst, masks, n, p):
        # Rows of eight words and their escapes; (codes, bits that are left), u64.
        top, marks, (limit, escape, zero, flags) = p
        a, b = distances(x, i, top, marks)
        a, far_a = codes_of(a, limit, escape, zero, flags)
        b, far_b = codes_of(b, limit, escape, zero, flags)
        masks[i] = uint8(gathered_flags(far_a, far_b))
        return pair(a, b), put_rest(x, i, dst, padded(n))

    @cuda.jit(device=True)
    def put_words(x, n, dst, masks, k, p):
        # Rows and codes of all words.
        rest_at, codes_at = sections(n, int32(rows), int32(rest_bits))
        quarter, i = int32(whole_groups(n) >> int32(5)), int32(cuda.threadIdx.x)
        while i < quarter:
            a, r = put_eight(x, i, dst, masks, n, p)
            b, s = put_eight(x, int32(i + quarter), dst, masks, n, p)
            c, t = put_eight(x, int32(i + int32(quarter << int32(1))), dst, masks, n, p)
            d, u = put_eight(x, int32(i + int32(quarter * int32(3))), dst, masks, n, p)
            put_fields(dst, rest_at, int32(rest_bits), quarter, i, r, s, t, u)
            put_fields(dst, codes_at, k, quarter, i, a, b, c, d)
            i = int32(i + int32(cuda.blockDim.x))

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        k, zero_code, high, escapes = state
        put_header(dst, k, zero_code, high, escapes)
        put_words(x, n, dst, as_u8(tmp), k, (every(high), marks_of(high), coding(k, zero_code)))
        if escapes != int32(0):
            cuda.syncthreads()
            _, codes_at = sections(n, int32(rows), int32(rest_bits))
            put_escapes(x, n, dst, int32(codes_at + parts_bytes(n, k)), escapes, tmp)

    return write
