"""Words, bytes and masks in memory: access without wrap-around, and loops over groups of words.

A *mask* is a u64 whose bit j belongs to word j of a group of 64 words. simd.py uses these loops if
there is no AVX-512. Positions in bytes are called ``at``, positions in words ``i``. The functions
check nothing; the callers do.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cswap_kernels.jit import njit

GROUP: Final = 64
"""Words in a group: the bits of a mask."""

AHEAD: Final = 2048
"""Bytes that a decoder should `prefetch` ahead of its reads. By measurement, 1024 is too few."""

FAR: Final = 8192
"""The same for an encoder's first pass over a tile, which is faster than memory."""

I64: Final = ir.IntType(64)
_I32 = ir.IntType(32)


def word_of(array: Any) -> int:
    """Bytes of a word of a Numba array type."""
    return int(array.dtype.bitwidth) // 8


def emit_pointer(context: Any, builder: Any, array: Any, value: Any, index: Any, to: Any) -> Any:
    """Address of element ``index`` of an array, as a pointer to the LLVM type ``to``."""
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


def emit_load(builder: Any, pointer: Any, align: int) -> Any:
    """Load from an address that is a multiple of ``align``."""
    loaded = builder.load(pointer)
    loaded.align = align
    return loaded


def emit_store(builder: Any, value: Any, pointer: Any, align: int) -> None:
    """Store to an address that is a multiple of ``align``."""
    builder.store(value, pointer).align = align


# Words and masks, one at a time.


@intrinsic
def word_bytes(typing: Any, words: Any) -> Any:
    """Bytes of a word, known when compiling (``words.itemsize`` is not)."""
    return types.int64(words), lambda _c, _b, s, _a: ir.Constant(I64, word_of(s.args[0]))


@intrinsic
def popcount(typing: Any, mask: Any) -> Any:
    """Number of bits that are set."""
    return types.int64(types.uint64), lambda _c, builder, _s, args: builder.ctpop(args[0])


@intrinsic
def get(typing: Any, words: Any, i: Any) -> Any:
    """``words[i]`` without wrap-around."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = ir.IntType(8 * word_of(words))
        return emit_load(
            builder,
            emit_pointer(context, builder, words, args[0], args[1], element),
            word_of(words),
        )

    return words.dtype(words, types.int64), generate


@intrinsic
def put(typing: Any, words: Any, i: Any, value: Any) -> Any:
    """``words[i] = value`` without wrap-around."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = ir.IntType(8 * word_of(words))
        pointer = emit_pointer(context, builder, words, args[0], args[1], element)
        emit_store(builder, args[2], pointer, word_of(words))
        return context.get_dummy_value()

    return types.void(words, types.int64, words.dtype), generate


@intrinsic
def load(typing: Any, words: Any, src: Any, at: Any) -> Any:
    """The word of ``words``' type in ``src`` at byte ``at``, aligned or not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = ir.IntType(8 * word_of(words))
        return emit_load(builder, emit_pointer(context, builder, src, args[1], args[2], element), 1)

    return words.dtype(words, src, types.int64), generate


@intrinsic
def store(typing: Any, words: Any, dst: Any, at: Any, value: Any) -> Any:
    """Store a word of ``words``' type in ``dst`` at byte ``at``, aligned or not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = ir.IntType(8 * word_of(words))
        emit_store(
            builder, args[3], emit_pointer(context, builder, dst, args[1], args[2], element), 1
        )
        return context.get_dummy_value()

    return types.void(words, dst, types.int64, words.dtype), generate


@intrinsic
def load_mask(typing: Any, src: Any, at: Any) -> Any:
    """The u64 in ``src`` at byte ``at``, aligned or not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, emit_pointer(context, builder, src, args[0], args[1], I64), 1)

    return types.uint64(src, types.int64), generate


@intrinsic
def store_mask(typing: Any, dst: Any, at: Any, mask: Any) -> Any:
    """Store a u64 in ``dst`` at byte ``at``, aligned or not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_store(builder, args[2], emit_pointer(context, builder, dst, args[0], args[1], I64), 1)
        return context.get_dummy_value()

    return types.void(dst, types.int64, types.uint64), generate


@intrinsic
def copy_bytes(typing: Any, target: Any, source: Any) -> Any:
    """Copy an array to the start of another that does not overlap: 4 times as fast as slices."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, of = (
            context.make_array(array)(context, builder, value)
            for array, value in zip(signature.args, args, strict=True)
        )
        nbytes = builder.mul(of.nitems, ir.Constant(I64, word_of(source)))
        cgutils.raw_memcpy(builder, to.data, of.data, nbytes, 1)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def prefetch(typing: Any, words: Any, data: Any, i: Any) -> Any:
    """Prefetch the bytes of 64 words from element i of ``data`` on into the cache.

    The hardware's prefetcher does not help code that is slower than memory on average but reads in
    bursts. Every address is allowed: behind the tile is the next tile, or no memory, which does no
    harm.
    """
    line = ir.IntType(8).as_pointer()

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [line, _I32, _I32, _I32]
        fnty = ir.FunctionType(ir.VoidType(), kinds)
        function = builder.module.declare_intrinsic("llvm.prefetch", [line], fnty)
        pointer = emit_pointer(context, builder, data, args[1], args[2], ir.IntType(8))
        to_read, keep, is_data = (ir.Constant(_I32, k) for k in (0, 3, 1))
        for part in range(word_of(words)):
            there = builder.gep(pointer, [ir.Constant(I64, 64 * part)])
            builder.call(function, [there, to_read, keep, is_data])
        return context.get_dummy_value()

    return types.void(words, data, types.int64), generate


@njit(nogil=True, cache=True)
def padded(nbytes):
    """The next multiple of 16."""
    return (np.int64(nbytes) + 15) & ~np.int64(15)


# Loops: for targets without AVX-512, and for the last group of a tile, which may be shorter.


@njit(nogil=True, cache=True)
def nonzero_loop(words, i, lanes):
    """Mask of the words that are not zero, of ``lanes`` words at i."""
    mask = np.uint64(0)
    for j in range(lanes):
        mask |= np.uint64(get(words, i + j) != 0) << np.uint64(j)
    return mask


@njit(nogil=True, cache=True)
def change_loop(words, i, lanes):
    """Mask of the words that differ from the preceding word; word 0 always does."""
    mask = np.uint64(i == 0)
    for j in range(i == 0, lanes):
        mask |= np.uint64(get(words, i + j) != get(words, i + j - 1)) << np.uint64(j)
    return mask


@njit(nogil=True, cache=True)
def compress_loop(words, i, lanes, mask, dst, at):
    """See `compress`."""
    for j in range(lanes):
        store(words, dst, at, get(words, i + j))
        at += word_bytes(words) * _bit(mask, j)
    return at


@njit(nogil=True, cache=True)
def expand_loop(src, at, mask, words, i, lanes):
    """See `expand`."""
    last = src.size - word_bytes(words)
    for j in range(lanes):
        bit = _bit(mask, j)
        put(words, i + j, load(words, src, min(at, last)) * words.dtype.type(bit))
        at += word_bytes(words) * bit
    return at


@njit(nogil=True, cache=True)
def spread_loop(src, at, mask, words, i, lanes):
    """See `spread`."""
    for j in range(lanes):
        at += word_bytes(words) * _bit(mask, j)
        put(words, i + j, load(words, src, at))
    return at


@njit(nogil=True, cache=True)
def lanes_loop(mask, start, dst, at):
    """See `compress_lanes`."""
    for j in range(GROUP):
        put(dst, at, np.uint8(start + j))
        at += _bit(mask, j)
    return at


@njit(nogil=True, cache=True)
def _bit(mask, j):
    return np.int64((mask >> np.uint64(j)) & np.uint64(1))
