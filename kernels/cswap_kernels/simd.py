"""Masks, compress, expand and spread for groups of 64 words, in vector instructions.

With AVX-512 the primitives are a few instructions per 64 bytes. Without it, they are the loops of
words.py. Both give the same bytes, except that `compress` may write further bytes behind the packed
words. The terms are those of words.py. The functions do not check their arguments.

Note [one decision per target]: the features of the compilation target, not of the host, decide
whether AVX-512 is used. The target's features are part of the key of Numba's disk cache. So
NUMBA_CPU_NAME, NUMBA_CPU_FEATURES and a cache shared by unequal machines are safe. Numba's cache
does not detect a change of this file: after a change, touch the kernels that import it.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cswap_kernels.words import (
    GROUP,
    I64,
    compress_loop,
    emit_load,
    emit_pointer,
    emit_store,
    expand_loop,
    lanes_loop,
    spread_loop,
    word_of,
)

OVERSHOOT: Final = 64
"""Bytes that `compress` and `compress_lanes` may write behind the packed bytes."""

_I32 = ir.IntType(32)
_BIT = ir.IntType(1)
_BYTES64 = ir.VectorType(ir.IntType(8), 64)

# Word sizes to the features that compress and expand need; `spread` needs _SHUFFLE as well.
_COMPRESS: Final = {1: "avx512vbmi2", 2: "avx512vbmi2", 4: "avx512f", 8: "avx512f"}
_SHUFFLE: Final = ("avx512bw", "avx512vbmi")


def _has(context: Any, *features: str) -> bool:
    # Note [one decision per target].
    return set(context.codegen().magic_tuple()[2].split(",")).issuperset(f"+{f}" for f in features)


def _call(builder: Any, name: str, returns: Any, args: list[Any]) -> Any:
    fnty = ir.FunctionType(returns, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), args)


def _part(builder: Any, mask: Any, part: int, lanes: int) -> Any:
    # Bits [part * lanes, (part + 1) * lanes) of a u64, as an integer of ``lanes`` bits.
    moved = builder.lshr(mask, ir.Constant(I64, part * lanes))
    return builder.trunc(moved, ir.IntType(lanes)) if lanes < 64 else moved


def _loop(context: Any, builder: Any, loop: Any, signature: Any, args: Any, place: int) -> Any:
    # Call a loop with the group's arguments, and with 64 lanes as the argument at ``place``.
    types_of = [*signature.args[:place], types.int64, *signature.args[place:]]
    values = [*args[:place], ir.Constant(I64, GROUP), *args[place:]]
    function = signature.return_type(*types_of)
    return context.compile_internal(builder, loop.py_func, function, values)


def _bytes_of_bits(builder: Any, mask: Any, word: int) -> Any:
    # Bytes of the selected words: number of bits in the mask, times bytes per word.
    count = builder.ctpop(mask)
    count = builder.zext(count, I64) if count.type.width < 64 else count
    return builder.mul(count, ir.Constant(I64, word))


# Whole groups in LLVM's IR.


def _differ(context: Any, builder: Any, words: Any, args: Any, other: Any) -> Any:
    # Mask of the 64 words at args[1] that differ from the 64 at ``other``, or from 0 if None.
    word = word_of(words)
    vector = ir.VectorType(ir.IntType(8 * word), GROUP)
    x = emit_load(builder, emit_pointer(context, builder, words, args[0], args[1], vector), word)
    y = ir.Constant(vector, None)
    if other is not None:
        y = emit_load(builder, emit_pointer(context, builder, words, args[0], other, vector), word)
    return builder.bitcast(builder.icmp_unsigned("!=", x, y), I64)


@intrinsic
def nonzero_mask(typing: Any, words: Any, i: Any) -> Any:
    """Mask of the 64 words at i that are not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _differ(context, builder, words, args, None)

    return types.uint64(words, types.int64), generate


@intrinsic
def change_mask(typing: Any, words: Any, i: Any) -> Any:
    """Mask of the 64 words at i > 0 that differ from the word before them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        before = builder.sub(args[1], ir.Constant(I64, 1))
        return _differ(context, builder, words, args, before)

    return types.uint64(words, types.int64), generate


@intrinsic
def compress(typing: Any, words: Any, i: Any, mask: Any, dst: Any, at: Any) -> Any:
    """Pack the words that the mask selects, of the 64 at i, into dst at byte ``at``.

    Returns the byte behind them. Writes up to OVERSHOOT bytes behind that.
    """
    signature = types.int64(words, types.int64, types.uint64, dst, types.int64)
    word = word_of(words)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _has(context, _COMPRESS[word]):
            return _loop(context, builder, compress_loop, signature, args, 2)
        lanes = 64 // word
        vector = ir.VectorType(ir.IntType(8 * word), lanes)
        name = f"llvm.x86.avx512.mask.compress.v{lanes}i{8 * word}"
        at = args[4]
        for part in range(word):
            i = builder.add(args[1], ir.Constant(I64, part * lanes))
            x = emit_load(builder, emit_pointer(context, builder, words, args[0], i, vector), word)
            bits = _part(builder, args[2], part, lanes)
            chosen = builder.bitcast(bits, ir.VectorType(_BIT, lanes))
            packed = _call(builder, name, vector, [x, ir.Constant(vector, None), chosen])
            # Store a whole vector: a store of only the packed words takes 10 times as long on Zen.
            emit_store(builder, packed, emit_pointer(context, builder, dst, args[3], at, vector), 1)
            at = builder.add(at, _bytes_of_bits(builder, bits, word))
        return at

    return signature, generate


@intrinsic
def expand(typing: Any, src: Any, at: Any, mask: Any, words: Any, i: Any) -> Any:
    """Inverse of `compress`: words that the mask does not select become zero.

    Reads only the bytes of the selected words. If no word is selected, src must hold one word.
    """
    signature = types.int64(src, types.int64, types.uint64, words, types.int64)
    word = word_of(words)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _has(context, _COMPRESS[word]):
            return _loop(context, builder, expand_loop, signature, args, 5)
        lanes = 64 // word
        element = ir.IntType(8 * word)
        vector = ir.VectorType(element, lanes)
        name = f"llvm.masked.expandload.v{lanes}i{8 * word}"
        at = args[1]
        for part in range(word):
            bits = _part(builder, args[2], part, lanes)
            chosen = builder.bitcast(bits, ir.VectorType(_BIT, lanes))
            pointer = emit_pointer(context, builder, src, args[0], at, element)
            x = _call(builder, name, vector, [pointer, chosen, ir.Constant(vector, None)])
            i = builder.add(args[4], ir.Constant(I64, part * lanes))
            emit_store(builder, x, emit_pointer(context, builder, words, args[3], i, vector), word)
            at = builder.add(at, _bytes_of_bits(builder, bits, word))
        return at

    return signature, generate


def _ranks(builder: Any, mask: Any) -> Any:
    # <64 x i8>: for each lane, the number of mask bits up to and including its own.
    bytes8 = ir.VectorType(ir.IntType(8), 8)
    spread_to_lanes = ir.Constant(ir.VectorType(_I32, 64), [j // 8 for j in range(64)])

    def lanes_of(value: Any) -> Any:
        narrow = builder.bitcast(value, bytes8)
        return builder.shuffle_vector(narrow, ir.Constant(bytes8, ir.Undefined), spread_to_lanes)

    ones = ir.Constant(I64, 0x0101010101010101)
    counts = _call(builder, "llvm.ctpop.v8i8", bytes8, [builder.bitcast(mask, bytes8)])
    # The product with ones sums each byte and all bytes below it. The shift leaves the sum of the
    # bytes strictly below.
    below = builder.shl(builder.mul(builder.bitcast(counts, I64), ones), ir.Constant(I64, 8))
    up_to = ir.Constant(_BYTES64, [(2 << j % 8) - 1 for j in range(64)])
    within = _call(builder, "llvm.ctpop.v64i8", _BYTES64, [builder.and_(lanes_of(mask), up_to)])
    return builder.add(within, lanes_of(below))


@intrinsic
def spread(typing: Any, src: Any, at: Any, mask: Any, words: Any, i: Any) -> Any:
    """Like `expand`, but words that the mask does not select repeat the preceding word.

    ``at`` is the position of the value of the word before i. The function returns the position of
    the last word's value. ``at`` may lie before src's first value only if bit 0 of the mask is set.
    """
    signature = types.int64(src, types.int64, types.uint64, words, types.int64)
    word = word_of(words)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _has(context, *_SHUFFLE):
            return _loop(context, builder, spread_loop, signature, args, 5)
        ranks = _ranks(builder, args[2])
        for part in range(word):
            _spread_part(context, builder, (src, words), args, ranks, part)
        return builder.add(args[1], _bytes_of_bits(builder, args[2], word))

    return signature, generate


def _spread_part(context: Any, builder: Any, arrays: Any, args: Any, ranks: Any, part: int) -> None:
    src, words = arrays
    word = word_of(words)
    lanes = 64 // word
    element = ir.IntType(8 * word)
    vector, lane = ir.VectorType(element, lanes), ir.VectorType(_I32, lanes)
    own = ir.Constant(lane, list(range(part * lanes, (part + 1) * lanes)))
    ranks = builder.shuffle_vector(ranks, ir.Constant(_BYTES64, ir.Undefined), own)
    first = builder.extract_element(ranks, ir.Constant(_I32, 0))
    last = builder.extract_element(ranks, ir.Constant(_I32, lanes - 1))
    # The values of this part begin with the first lane's. The code must not read more values than
    # there are, because src may end behind them.
    count = builder.zext(builder.sub(last, first), ir.IntType(128))
    one = ir.Constant(count.type, 1)
    bits = builder.sub(builder.shl(one, builder.add(count, one)), one)
    bits = builder.trunc(bits, ir.IntType(lanes))
    skip = builder.mul(builder.zext(first, I64), ir.Constant(I64, word))
    pointer = emit_pointer(context, builder, src, args[0], builder.add(args[1], skip), element)
    values = _call(
        builder,
        f"llvm.masked.expandload.v{lanes}i{8 * word}",
        vector,
        [pointer, builder.bitcast(bits, ir.VectorType(_BIT, lanes)), ir.Constant(vector, None)],
    )
    splat = builder.shuffle_vector(
        ranks, ir.Constant(ranks.type, ir.Undefined), ir.Constant(lane, None)
    )
    places = builder.sub(ranks, splat)
    places = builder.zext(places, vector) if word > 1 else places
    name = f"llvm.x86.avx512.permvar.{'qhsd'[word.bit_length() - 1]}i.512"
    x = _call(builder, name, vector, [values, places])
    i = builder.add(args[4], ir.Constant(I64, part * lanes))
    emit_store(builder, x, emit_pointer(context, builder, words, args[3], i, vector), word)


@intrinsic
def compress_lanes(typing: Any, mask: Any, start: Any, dst: Any, at: Any) -> Any:
    """Pack ``start`` + j as a byte, for every bit j of the mask, into dst at byte ``at``.

    Returns the byte behind them. Writes up to OVERSHOOT bytes behind that.
    """
    signature = types.int64(types.uint64, types.int64, dst, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _has(context, _COMPRESS[1]):
            return context.compile_internal(builder, lanes_loop.py_func, signature, args)
        numbers = ir.Constant(_BYTES64, list(range(64)))
        first = builder.insert_element(
            ir.Constant(_BYTES64, ir.Undefined),
            builder.trunc(args[1], ir.IntType(8)),
            ir.Constant(_I32, 0),
        )
        zeros = ir.Constant(ir.VectorType(_I32, 64), None)
        numbers = builder.add(numbers, builder.shuffle_vector(first, first, zeros))
        chosen = builder.bitcast(args[0], ir.VectorType(_BIT, 64))
        name = "llvm.x86.avx512.mask.compress.v64i8"
        packed = _call(builder, name, _BYTES64, [numbers, ir.Constant(_BYTES64, None), chosen])
        emit_store(
            builder, packed, emit_pointer(context, builder, dst, args[2], args[3], _BYTES64), 1
        )
        return builder.add(args[3], builder.ctpop(args[0]))

    return signature, generate
