"""``bf16`` and ``fp16`` on CUDA: the format of cswap_kernels/cast.py."""

from __future__ import annotations

from numba import cuda, int32, uint16, uint32

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.floats import (
    MAGNITUDE,
    float_access,
    float_to_bfloat16,
    float_to_half,
    half_to_float,
)
from cswap_kernels.cuda.primitives import as_u16, bits_f32, f32_bits
from cswap_kernels.floats import BFLOAT16

HALF_LIMIT = 0x477FF000
"""Bits of 65520, from where on float16 is infinite."""

BFLOAT16_LIMIT = 0x7F7F8000
"""Bits from where on bfloat16 is infinite."""


def cast_tile(word, as_words):
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py."""
    load, store = float_access(word)

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        codes, to_bfloat16 = as_u16(dst), int32(a1) == int32(BFLOAT16)
        limit = uint32(BFLOAT16_LIMIT) if to_bfloat16 else uint32(HALF_LIMIT)
        too_large = int32(0)
        i = int32(cuda.threadIdx.x)
        while i < n:
            value = load(x, i, int32(a0))
            if uint32(f32_bits(value) & uint32(MAGNITUDE)) >= limit:
                too_large = int32(1)
            code = float_to_bfloat16(value) if to_bfloat16 else float_to_half(value)
            codes[i] = uint16(code & uint32(0xFFFF))
            i = int32(i + int32(cuda.blockDim.x))
        if cuda.syncthreads_or(too_large):
            return int32(-1)
        return int32(n << int32(1))

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        if nbytes != int32(n << int32(1)):
            return int32(-1)
        codes, of_bfloat16 = as_u16(src), int32(a1) == int32(BFLOAT16)
        i = int32(cuda.threadIdx.x)
        while i < n:
            code = uint32(codes[i])
            if of_bfloat16:
                value = bits_f32(uint32(code << uint32(16)))
            else:
                value = half_to_float(code)
            store(x, i, int32(a0), value)
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return *in_one_step(encode), decode
