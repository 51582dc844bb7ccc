"""Blocks of 4 values between memory and registers, for ``zfp`` on CUDA: as float32 or float64."""

from __future__ import annotations

from typing import Any, Final

from numba import cuda, int32, int64, uint16, uint32, uint64

from cswap_kernels.cuda.container import WORDS
from cswap_kernels.cuda.floats import float_to_bfloat16, float_to_half, half_to_float
from cswap_kernels.cuda.primitives import as_u64, bits_f32, f32_bits, load_global16, store_global16
from cswap_kernels.floats import BFLOAT16

_LOW: Final = 0xFFFFFFFF
_HALF_MAX: Final = 0x7BFF


def block_loader(word: int) -> Any:
    """The device function (words, block, n_words, aligned, kind) -> bits of 4 floats, as zfp's."""

    @cuda.jit(device=True)
    def widen(value, kind):
        if kind == int32(BFLOAT16):
            return uint32(value << uint32(16))
        return f32_bits(half_to_float(value))

    if word == 2:

        @cuda.jit(device=True)
        def load_whole(words, block, kind):
            four = uint64(as_u64(words)[block])
            low, high = uint32(four & uint64(_LOW)), uint32(four >> uint64(32))
            return (
                widen(uint32(low & uint32(0xFFFF)), kind),
                widen(uint32(low >> uint32(16)), kind),
                widen(uint32(high & uint32(0xFFFF)), kind),
                widen(uint32(high >> uint32(16)), kind),
            )

        @cuda.jit(device=True)
        def load_one(words, i, kind):
            return widen(uint32(words[i]), kind)

    elif word == 4:

        @cuda.jit(device=True)
        def load_whole(words, block, kind):
            return load_global16(words, block)

        @cuda.jit(device=True)
        def load_one(words, i, kind):
            return uint32(words[i])

    else:

        @cuda.jit(device=True)
        def join(low, high):
            return uint64(uint64(low) | uint64(uint64(high) << uint64(32)))

        @cuda.jit(device=True)
        def load_whole(words, block, kind):
            first = int64(block << int64(1))
            a, b, c, d = load_global16(words, first)
            e, f, g, h = load_global16(words, int64(first + int64(1)))
            return join(a, b), join(c, d), join(e, f), join(g, h)

        @cuda.jit(device=True)
        def load_one(words, i, kind):
            return uint64(words[i])

    @cuda.jit(device=True)
    def load(words, block, n_words, aligned, kind):
        first = int64(block << int64(2))
        left = int64(n_words - first)
        if aligned != int32(0) and left >= int64(4):
            return load_whole(words, block, kind)
        # A short last block: a; a, b; a, b, c become a, a, a, a; a, b, b, a; a, b, c, a.
        i1, i2, i3 = first, first, first
        if left > int64(1):
            i1 = int64(first + int64(1))
            i2 = i1
        if left > int64(2):
            i2 = int64(first + int64(2))
        if left > int64(3):
            i3 = int64(first + int64(3))
        return (
            load_one(words, first, kind),
            load_one(words, i1, kind),
            load_one(words, i2, kind),
            load_one(words, i3, kind),
        )

    return load


def block_storer(word: int) -> Any:
    """The inverse: (words, block, n_words, aligned, kind, bits of 4 floats)."""
    kind_of_word = WORDS[word][0]

    @cuda.jit(device=True)
    def narrow(bits, kind):
        if kind == int32(BFLOAT16):
            return float_to_bfloat16(bits_f32(bits))
        half = float_to_half(bits_f32(bits))
        if uint32(half & uint32(0x7FFF)) > uint32(_HALF_MAX):
            half = uint32(half - uint32(1))
        return half

    if word == 2:

        @cuda.jit(device=True)
        def convert(bits, kind):
            return uint16(narrow(bits, kind))

        @cuda.jit(device=True)
        def store_whole(words, block, kind, a, b, c, d):
            low = uint32(narrow(a, kind) | uint32(narrow(b, kind) << uint32(16)))
            high = uint32(narrow(c, kind) | uint32(narrow(d, kind) << uint32(16)))
            as_u64(words)[block] = uint64(uint64(low) | uint64(uint64(high) << uint64(32)))

    elif word == 4:

        @cuda.jit(device=True)
        def convert(bits, kind):
            return kind_of_word(bits)

        @cuda.jit(device=True)
        def store_whole(words, block, kind, a, b, c, d):
            store_global16(words, block, (a, b, c, d))

    else:

        @cuda.jit(device=True)
        def convert(bits, kind):
            return kind_of_word(bits)

        @cuda.jit(device=True)
        def pair(a, b):
            low = uint64(_LOW)
            return (
                uint32(a & low),
                uint32(a >> uint64(32)),
                uint32(b & low),
                uint32(b >> uint64(32)),
            )

        @cuda.jit(device=True)
        def store_whole(words, block, kind, a, b, c, d):
            first = int64(block << int64(1))
            store_global16(words, first, pair(a, b))
            store_global16(words, int64(first + int64(1)), pair(c, d))

    @cuda.jit(device=True)
    def store(words, block, n_words, aligned, kind, a, b, c, d):
        first = int64(block << int64(2))
        left = int64(n_words - first)
        if aligned != int32(0) and left >= int64(4):
            store_whole(words, block, kind, a, b, c, d)
            return
        words[first] = convert(a, kind)
        if left > int64(1):
            words[int64(first + int64(1))] = convert(b, kind)
        if left > int64(2):
            words[int64(first + int64(2))] = convert(c, kind)
        if left > int64(3):
            words[int64(first + int64(3))] = convert(d, kind)

    return store
