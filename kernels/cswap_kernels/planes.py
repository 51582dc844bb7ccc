"""Bit planes: a field of a few bits per word, spread over byte rows. See docs/format/bitpack.md.

A *part* of 4 or 2 bits of m words (m a multiple of 64) takes q = m * bits / 8 bytes: byte j holds
the bits of words j, j + q, j + 2 q, ... from its low end up. Neighbours in memory stay neighbours,
so packing is a plain vector loop. A part of 1 bit holds word i in bit i % 8 of byte i / 8, which is
the result of a vector comparison. A field of b bits consists of its whole bytes, then of the parts
4, 2, 1 that add up to b % 8. Each starts at a multiple of 16 bytes.

Note [narrow shifts]: Numba computes with 64 bits for all word sizes. LLVM narrows an operation if
it can prove that the result is the same. It can do this for & and | with a cast around them, but
not for a shift by an amount that is unknown at compile time. Such a loop over 16-bit words took
four times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cswap_kernels.jit import njit
from cswap_kernels.words import (
    I64,
    emit_load,
    emit_pointer,
    emit_store,
    load_mask,
    padded,
    store_mask,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


_BYTES64 = ir.VectorType(ir.IntType(8), 64)


def _splat(builder: Any, byte: Any) -> Any:
    # 64 times the same byte.
    single = builder.insert_element(ir.Constant(_BYTES64, ir.Undefined), byte, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
    return builder.shuffle_vector(single, ir.Constant(_BYTES64, ir.Undefined), zeros)


def _sixty_four(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    # Return the pointer to the 64 bytes of args[0] (u8 array) at args[1], and their value.
    pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1], _BYTES64)
    return pointer, emit_load(builder, pointer, 1)


@intrinsic
def mask_test(typing: Any, c: Any, i: Any, bit: Any) -> Any:
    """Mask (u64) of the bytes c[i:i+64] that have ``bit`` set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, values = _sixty_four(context, builder, signature, args)
        both = builder.and_(values, _splat(builder, args[2]))
        hit = builder.icmp_unsigned("!=", both, ir.Constant(_BYTES64, [0] * 64))
        return builder.bitcast(hit, I64)

    return types.uint64(c, types.int64, types.uint8), generate


@intrinsic
def mask_above(typing: Any, c: Any, i: Any, limit: Any) -> Any:
    """Mask (u64) of the bytes c[i:i+64] that are above ``limit``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, values = _sixty_four(context, builder, signature, args)
        hit = builder.icmp_unsigned(">", values, _splat(builder, args[2]))
        return builder.bitcast(hit, I64)

    return types.uint64(c, types.int64, types.uint8), generate


@intrinsic
def mask_or(typing: Any, c: Any, i: Any, mask: Any, bit: Any) -> Any:
    """Set ``bit`` in the bytes c[i:i+64] that the mask selects."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, values = _sixty_four(context, builder, signature, args)
        chosen = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), 64))
        bits = builder.and_(builder.sext(chosen, _BYTES64), _splat(builder, args[3]))
        emit_store(builder, builder.or_(values, bits), pointer, 1)
        return context.get_dummy_value()

    return types.void(c, types.int64, types.uint64, types.uint8), generate


@intrinsic
def mask_put(typing: Any, c: Any, i: Any, mask: Any) -> Any:
    """Set the bytes c[i:i+64] to 1 where the mask has a bit, else to 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1], _BYTES64)
        chosen = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), 64))
        emit_store(builder, builder.zext(chosen, _BYTES64), pointer, 1)
        return context.get_dummy_value()

    return types.void(c, types.int64, types.uint64), generate


@intrinsic
def shr(typing: Any, word: Any, by: Any) -> Any:
    """``word >> by`` in the word's own width. See Note [narrow shifts]."""
    return word(word, word), lambda _c, builder, _s, args: builder.lshr(*args)


@intrinsic
def shl(typing: Any, word: Any, by: Any) -> Any:
    """``word << by`` in the word's own width. See Note [narrow shifts]."""
    return word(word, word), lambda _c, builder, _s, args: builder.shl(*args)


@intrinsic
def lowest_bit(typing: Any, mask: Any) -> Any:
    """Position of the lowest bit that is set; 64 if none is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@njit(nogil=True, cache=True)
def whole_groups(n):
    """The next multiple of 64: the required length of an array of fields of n words."""
    return (n + 63) & ~63


@njit(nogil=True, cache=True)
def parts_bytes(n, bits):
    """Bytes of the parts of a field of ``bits`` (0 to 7) bits of n words."""
    m = whole_groups(n)
    total = 0
    for width in (4, 2, 1):
        if bits & width:
            total += padded(m * width // 8)
    return total


@njit(nogil=True, cache=True)
def _put_twos(c, shift, row):
    # The part of 2 bits, eight bytes at a time: vectors of bytes cannot be shifted.
    q = row.size
    two = np.uint64(0x0303030303030303)
    for j in range(q):
        row[j] = (
            (shr(c[j], shift) & two)
            | ((shr(c[j + q], shift) & two) << np.uint64(2))
            | ((shr(c[j + 2 * q], shift) & two) << np.uint64(4))
            | ((shr(c[j + 3 * q], shift) & two) << np.uint64(6))
        )


@njit(nogil=True, cache=True)
def _get_twos(row, shift, c):
    # Inverse of _put_twos: set these bits of c, which are 0.
    q = row.size
    two = np.uint64(0x0303030303030303)
    first, second, third, fourth = c[:q], c[q : 2 * q], c[2 * q : 3 * q], c[3 * q :]
    for j in range(q):
        bits = row[j]
        first[j] |= shl(bits & two, shift)
        second[j] |= shl((bits >> np.uint64(2)) & two, shift)
        third[j] |= shl((bits >> np.uint64(4)) & two, shift)
        fourth[j] |= shl((bits >> np.uint64(6)) & two, shift)


@njit(nogil=True, cache=True)
def put_parts(c, bits, dst, at):
    """Pack the low ``bits`` (0 to 7) bits of c [m] u8, zero behind n; return the byte behind."""
    m = c.size
    shift = np.uint8(0)
    if bits & 4:
        q = m // 2
        row = dst[at : at + q]
        for j in range(q):
            row[j] = (c[j] & np.uint8(15)) | (c[j + q] << np.uint8(4))
        at = _pad(dst, at, q)
        shift = np.uint8(4)
    if bits & 2:
        q = m // 4
        _put_twos(c.view(np.uint64), np.uint64(shift), dst[at : at + q].view(np.uint64))
        at = _pad(dst, at, q)
        shift += np.uint8(2)
    if bits & 1:
        bit = np.uint8(1) << shift
        for i in range(0, m, 64):
            store_mask(dst, at + (i >> 3), mask_test(c, i, bit))
        at = _pad(dst, at, m // 8)
    return at


@njit(nogil=True, cache=True)
def get_parts(src, at, bits, c):
    """Inverse of `put_parts`: write c [m] u8; return the byte behind."""
    m = c.size
    shift = np.uint8(0)
    if bits & 4 == 0:
        c[:] = 0
    else:
        q = m // 2
        row = src[at : at + q]
        for j in range(q):
            c[j] = row[j] & np.uint8(15)
            c[j + q] = row[j] >> np.uint8(4)
        at += padded(q)
        shift = np.uint8(4)
    if bits & 2:
        q = m // 4
        _get_twos(src[at : at + q].view(np.uint64), np.uint64(shift), c.view(np.uint64))
        at += padded(q)
        shift += np.uint8(2)
    if bits & 1:
        bit = np.uint8(1) << shift
        for i in range(0, m, 64):
            mask_or(c, i, load_mask(src, at + (i >> 3)), bit)
        at += padded(m // 8)
    return at


@njit(nogil=True, cache=True)
def _pad(dst, at, q):
    # Zero the bytes up to the next multiple of 16; return its position.
    end = at + padded(q)
    for i in range(at + q, end):
        dst[i] = 0
    return end


def put_parts_reference(c: NDArray[np.uint8], bits: int) -> bytes:
    """The bytes that `put_parts` writes for the fields c [n], computed word by word."""
    m = -(-c.size // 64) * 64
    fields = [*c.tolist(), *[0] * (m - c.size)]
    out, shift = b"", 0
    for width in (4, 2, 1):
        if bits & width:
            q = m * width // 8
            row = bytearray(-(-q // 16) * 16)
            for i, field in enumerate(fields):
                j, up = (i // 8, i % 8) if width == 1 else (i % q, i // q * width)
                row[j] |= (field >> shift & (1 << width) - 1) << up
            out, shift = out + bytes(row), shift + width
    return out


def get_parts_reference(stream: bytes, at: int, bits: int, n: int) -> tuple[list[int], int]:
    """Inverse of `put_parts_reference` from byte ``at`` on: fields [n], and the byte behind."""
    m, c, shift = -(-n // 64) * 64, [0] * n, 0
    for width in (4, 2, 1):
        if bits & width:
            q = m * width // 8
            for i in range(n):
                j, up = (i // 8, i % 8) if width == 1 else (i % q, i // q * width)
                c[i] |= (stream[at + j] >> up & (1 << width) - 1) << shift
            at, shift = at + -(-q // 16) * 16, shift + width
    return c, at
