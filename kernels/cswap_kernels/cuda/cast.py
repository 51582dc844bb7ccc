"""``bf16`` and ``fp16`` on CUDA: the format of cswap_kernels/cast.py, four words per thread.

Codes are words of two bytes, read and written as the words of a tensor of that dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int32, uint32

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.fours import bits_of_four, four_access, largest_of, magnitudes
from cswap_kernels.cuda.primitives import as_u16
from cswap_kernels.cuda.zvc import zero_rest
from cswap_kernels.floats import BFLOAT16

if TYPE_CHECKING:
    from cswap_kernels.cuda.container import TileFunctions

HALF_LIMIT = 0x477FF000
"""Bits of 65520, from where on float16 is infinite."""

BFLOAT16_LIMIT = 0x7F7F8000
"""Bits from where on bfloat16 is infinite."""


def cast_tile(word: int, as_words: Any) -> TileFunctions:
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py."""
    load, store = four_access(word)
    load_codes, store_codes = four_access(2)

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        zero_rest(x, n)
        codes, top, i = as_u16(dst), uint32(0), int32(cuda.threadIdx.x)
        while int32(i << int32(2)) < n:
            a, b, c, d = load(x, i, int32(a0))
            top = uint32(max(top, largest_of(magnitudes(bits_of_four((a, b, c, d))))))
            store_codes(codes, i, int32(a1), a, b, c, d)
            i = int32(i + int32(cuda.blockDim.x))
        limit = uint32(BFLOAT16_LIMIT if int32(a1) == int32(BFLOAT16) else HALF_LIMIT)
        if cuda.syncthreads_or(int32(1) if top >= limit else int32(0)):
            return int32(-1)
        return int32(n << int32(1))

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        if nbytes != int32(n << int32(1)):
            return int32(-1)
        codes, i = as_u16(src), int32(cuda.threadIdx.x)
        while int32(i << int32(2)) < n:
            a, b, c, d = load_codes(codes, i, int32(a1))
            store(x, i, int32(a0), a, b, c, d)
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return *in_one_step(encode), decode
