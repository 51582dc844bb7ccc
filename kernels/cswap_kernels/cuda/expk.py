"""``expk`` on CUDA: the format of cswap_kernels/expk.py, a thread per four times eight words.

The words of a tile are seen in quarters, as the parts of docs/format/bitpack.md lay out fields of
a few bits: a thread takes the i-th eight words of each quarter, and writes whole bytes. Words
behind the tile's last one are made such that all their bits in the encoding are zero.

    1. the largest exponent;  2. how many words each choice of k and zero code would escape;
    3. rows and codes, and a bit in tmp for every word that escapes;  4. those words, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int32, uint8, uint16, uint32, uint64

from cswap_kernels.cuda.expk_words import LAYOUTS, NO_CODE
from cswap_kernels.cuda.planes import parts_bytes, whole_groups
from cswap_kernels.cuda.primitives import FULL, as_u8, as_u16, as_u32, unsigned
from cswap_kernels.cuda.quads import (
    FLAGS,
    above,
    count_flags,
    every,
    full,
    gathered_flags,
    get_fields,
    halves,
    is_255,
    pair,
    put_fields,
    sum_of,
)
from cswap_kernels.cuda.warps import WORD_TYPES, block_exclusive, block_max, block_sums, padded
from cswap_kernels.cuda.zvc import zero_rest
from cswap_kernels.expk import HEADER, NEAR

if TYPE_CHECKING:
    from cswap_kernels.cuda.container import TileFunctions
    from cswap_kernels.cuda.expk_words import Layout


@cuda.jit(device=True)
def fixed_bytes(n, mantissa_bits, k):
    """Bytes of an encoding without its escapes."""
    fields = int32(mantissa_bits + int32(1))
    rows = int32(int32(fields >> int32(3)) * padded(n))
    rest = parts_bytes(n, int32(fields & int32(7)))
    return int32(int32(HEADER) + int32(rows + int32(rest + parts_bytes(n, k))))


@cuda.jit(device=True)
def choose(n, mantissa_bits, escape_bytes, forced, zeros, over5, over6, over13, over14):
    """The cheapest of (k, zero code): k, zero code, escapes, bytes."""
    k, zero_code, escapes, nbytes = int32(0), int32(0), int32(0), int32(0x7FFFFFFF)
    for option in range(4):
        own = int32(option & 1)
        bits = int32(3) if option < 2 else int32(4)
        plain, coded = (over6, over5) if option < 2 else (over14, over13)
        count = int32(coded - zeros) if own != int32(0) else plain
        total = int32(fixed_bytes(n, mantissa_bits, bits) + int32(count * escape_bytes))
        allowed = forced == int32(0) or forced == bits
        if own != int32(0) and zeros == int32(0):
            allowed = False
        if allowed and total < nbytes:
            k, zero_code, escapes, nbytes = bits, own, count, total
    return k, zero_code, escapes, nbytes


@cuda.jit(device=True)
def both_sums(a, b):
    """The sums of two quads of counts in one i32; added over a block, each is up to 8192."""
    return int32(sum_of(a) | int32(sum_of(b) << int32(16)))


@cuda.jit(device=True)
def parted(both):
    """The two numbers of `both_sums`."""
    return int32(both & int32(0xFFFF)), int32(both >> int32(16))


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


@cuda.jit(device=True)
def put_header(dst, k, zero_code, high, escapes):
    """The first 16 bytes."""
    words, thread = as_u32(dst), int32(cuda.threadIdx.x)
    if thread == int32(0):
        first = int32(k | int32(int32(zero_code << int32(8)) | int32(high << int32(16))))
        words[int32(0)], words[int32(1)] = uint32(first), uint32(escapes)
        words[int32(2)], words[int32(3)] = uint32(0), uint32(0)


@cuda.jit(device=True)
def next_escapes(masks, base, n, tmp):
    """(mask of this thread's 32 words, escapes before them and of all, from group base on)."""
    group, mask = int32(base + int32(cuda.threadIdx.x)), uint32(0)
    if group < int32(whole_groups(n) >> int32(5)):
        mask = uint32(masks[group])
    before, total = block_exclusive(int32(cuda.popc(mask)), tmp)
    return mask, before, total


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
def lowest(mask):
    """Index of the lowest bit of a mask that is set."""
    return int32(int32(31) - int32(cuda.clz(uint32(mask & uint32(uint32(~mask) + uint32(1))))))


def _tile(layout: Layout, narrow: Any) -> TileFunctions:
    # (measure, write, decode) for one layout of words of the type ``narrow``.
    mantissa_bits, rest_bits, wide = layout.mantissa_bits, layout.rest_bits, layout.wide
    field = (1 << layout.exponent_bits) - 1
    exponent_bytes, rows = 2 if wide else 1, layout.rows
    peak, distances, put_rest, join = layout.functions
    of_words = uint64 if narrow is uint64 else uint32  # is computed with
    others = ~(field << mantissa_bits) & ((1 << narrow.bitwidth) - 1)

    @cuda.jit(device=True)
    def spread_out(value):
        # As `distances` and `join` take it.
        return int32(value) if wide else every(value)

    @cuda.jit(device=True)
    def marks_of(high):
        # FULL if exponent 0 is told from the others, else 0. Quads take it as a number, where a
        # comparison would cost an instruction for each; wide exponents as a condition.
        if wide:
            return uint32(FULL) if high > int32(NEAR) else uint32(0)
        return unsigned(int32(int32(int32(NEAR) - high) >> int32(31)))

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        zero_rest(x, n)
        eights, step = int32(whole_groups(n) >> int32(3)), int32(cuda.blockDim.x)
        high, i = int32(0), int32(cuda.threadIdx.x)
        while i < eights:
            high = int32(max(high, peak(x, i)))
            i = int32(i + step)
        high = block_max(high, tmp)
        if n & int32(63):
            i = int32(n + int32(cuda.threadIdx.x))
            while i < whole_groups(n):
                x[i] = narrow(of_words(of_words(high) << of_words(mantissa_bits)))
                i = int32(i + step)
            cuda.syncthreads()
        top, marks = spread_out(high), marks_of(high)
        over5, over6, over13, over14 = uint32(0), uint32(0), uint32(0), uint32(0)
        zeros, i = uint32(0), int32(cuda.threadIdx.x)
        while i < eights:
            a, b = distances(x, i, top, marks)
            over5 = count_flags(above(b, every(122)), count_flags(above(a, every(122)), over5))
            over6 = count_flags(above(b, every(121)), count_flags(above(a, every(121)), over6))
            over13 = count_flags(above(b, every(114)), count_flags(above(a, every(114)), over13))
            over14 = count_flags(above(b, every(113)), count_flags(above(a, every(113)), over14))
            a, b = is_255(a, uint32(FLAGS)), is_255(b, uint32(FLAGS))
            zeros = count_flags(b, count_flags(a, zeros))
            i = int32(i + step)
        low, high_ones, n_zeros = block_sums(
            both_sums(over5, over6), both_sums(over13, over14), sum_of(zeros), tmp
        )
        (five, six), (thirteen, fourteen) = parted(low), parted(high_ones)
        k, zero_code, escapes, nbytes = choose(
            n,
            int32(mantissa_bits),
            int32(2 + exponent_bytes),
            int32(a2),
            n_zeros,
            five,
            six,
            thirteen,
            fourteen,
        )
        return nbytes, (k, zero_code, high, escapes)

    @cuda.jit(device=True)
    def put_eight(x, i, dst, masks, n, p):
        # Rows of eight words and their escapes; (codes, bits that are left), u64.
        top, marks, limit, escape, zero, flags = p
        a, b = distances(x, i, top, marks)
        a, far_a = codes_of(a, limit, escape, zero, flags)
        b, far_b = codes_of(b, limit, escape, zero, flags)
        masks[i] = uint8(gathered_flags(far_a, far_b))
        return pair(a, b), put_rest(x, i, dst, padded(n))

    @cuda.jit(device=True)
    def put_escapes(x, n, dst, at, escapes, tmp):
        # Positions (u16), then exponents (u8, or u16), in order.
        positions, exponents = as_u16(dst), int32(at + int32(escapes << int32(1)))
        base = int32(0)
        while base < int32(whole_groups(n) >> int32(5)):
            mask, j, total = next_escapes(tmp, base, n, tmp)
            while mask != uint32(0):
                i = int32(int32(int32(base + int32(cuda.threadIdx.x)) << int32(5)) + lowest(mask))
                mask = uint32(mask & uint32(mask - uint32(1)))
                positions[int32(int32(at >> int32(1)) + j)] = uint16(i)
                exponent = of_words(of_words(x[i]) >> of_words(mantissa_bits))
                exponent = uint32(of_words(exponent & of_words(field)))
                place = int32(exponents + int32(j * int32(exponent_bytes)))
                dst[place] = uint8(uint32(exponent & uint32(255)))
                if wide:
                    dst[int32(place + int32(1))] = uint8(uint32(exponent >> uint32(8)))
                j = int32(j + int32(1))
            at = int32(at + int32(total << int32(1)))
            exponents = int32(exponents + int32(total * int32(exponent_bytes)))
            base = int32(base + int32(cuda.blockDim.x))

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        k, zero_code, high, escapes = state
        put_header(dst, k, zero_code, high, escapes)
        escape = int32(int32(int32(1) << k) - int32(1))
        limit = int32(escape - zero_code)
        p = (
            spread_out(high),
            marks_of(high),
            every(int32(int32(128) - limit)),
            every(escape),
            every(limit),
            uint32(FLAGS) if zero_code != int32(0) else uint32(0),
        )
        masks, row = as_u8(tmp), padded(n)
        rest_at = int32(int32(HEADER) + int32(int32(rows) * row))
        codes_at = int32(rest_at + parts_bytes(n, int32(rest_bits)))
        quarter, i = int32(whole_groups(n) >> int32(5)), int32(cuda.threadIdx.x)
        while i < quarter:
            a, r = put_eight(x, i, dst, masks, n, p)
            b, s = put_eight(x, int32(i + quarter), dst, masks, n, p)
            c, t = put_eight(x, int32(i + int32(quarter << int32(1))), dst, masks, n, p)
            d, u = put_eight(x, int32(i + int32(quarter * int32(3))), dst, masks, n, p)
            put_fields(dst, rest_at, int32(rest_bits), quarter, i, r, s, t, u)
            put_fields(dst, codes_at, k, quarter, i, a, b, c, d)
            i = int32(i + int32(cuda.blockDim.x))
        if escapes != int32(0):
            cuda.syncthreads()
            put_escapes(x, n, dst, int32(codes_at + parts_bytes(n, k)), escapes, tmp)

    @cuda.jit(device=True)
    def get_eight(src, i, codes, rest, n, masks, x, p):
        # Eight words but for the exponents that escaped, and which these are.
        top, zero, escape = p
        a, b = halves(codes)
        a, b = (
            uint32(uint32(a + escape) & uint32(FLAGS)),
            uint32(uint32(b + escape) & uint32(FLAGS)),
        )
        masks[i] = uint8(gathered_flags(a, b))
        row = padded(n)
        j = int32(min(i, int32(int32(row >> int32(3)) - int32(1))))  # behind a row is no other
        join(src, row, j, codes, rest, top, zero, x, i)

    @cuda.jit(device=True)
    def get_escapes(x, n, src, at, escapes, tmp):
        # Put in the exponents of escaped words: whether positions or count are wrong.
        positions, exponents = as_u16(src), int32(at + int32(escapes << int32(1)))
        wrong, base, done = int32(0), int32(0), int32(0)
        while base < int32(whole_groups(n) >> int32(5)):
            mask, j, total = next_escapes(tmp, base, n, tmp)
            j = int32(j + done)
            while mask != uint32(0):
                i = int32(int32(int32(base + int32(cuda.threadIdx.x)) << int32(5)) + lowest(mask))
                mask = uint32(mask & uint32(mask - uint32(1)))
                good = j < escapes
                if good:
                    good = int32(positions[int32(int32(at >> int32(1)) + j)]) == i
                if good:
                    place = int32(exponents + int32(j * int32(exponent_bytes)))
                    exponent = uint32(src[place])
                    if wide:
                        upper = uint32(src[int32(place + int32(1))])
                        exponent = uint32(exponent | uint32(upper << uint32(8)))
                    exponent = of_words(uint32(exponent & uint32(field)))
                    kept = of_words(of_words(x[i]) & of_words(others))
                    x[i] = narrow(of_words(kept | of_words(exponent << of_words(mantissa_bits))))
                else:
                    wrong = int32(1)
                j = int32(j + int32(1))
            done = int32(done + total)
            base = int32(base + int32(cuda.blockDim.x))
        return wrong if done == escapes else int32(1)

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        if nbytes < int32(HEADER):
            return int32(-1)
        head, escapes = uint32(as_u32(src)[int32(0)]), uint32(as_u32(src)[int32(1)])
        k, zero_code = int32(head & uint32(255)), int32(uint32(head >> uint32(8)) & uint32(255))
        high = int32(head >> uint32(16))
        if k < int32(3) or k > int32(4) or zero_code > int32(1) or escapes > uint32(n):
            return int32(-1)
        escapes, row = int32(escapes), padded(n)
        rest_at = int32(int32(HEADER) + int32(int32(rows) * row))
        codes_at = int32(rest_at + parts_bytes(n, int32(rest_bits)))
        at = int32(codes_at + parts_bytes(n, k))
        if high > int32(field) or nbytes != int32(at + int32(escapes * int32(2 + exponent_bytes))):
            return int32(-1)
        escape = int32(int32(int32(1) << k) - int32(1))
        zero = int32(escape - int32(1)) if zero_code != int32(0) else int32(NO_CODE)
        zero_quad = uint32(zero) if wide else every(zero)
        p = spread_out(high), zero_quad, every(int32(int32(128) - escape))
        quarter, i = int32(whole_groups(n) >> int32(5)), int32(cuda.threadIdx.x)
        masks = as_u8(tmp)
        while i < quarter:
            a, b, c, d = get_fields(src, codes_at, k, quarter, i)
            r, s, t, u = get_fields(src, rest_at, int32(rest_bits), quarter, i)
            get_eight(src, i, a, r, n, masks, x, p)
            get_eight(src, int32(i + quarter), b, s, n, masks, x, p)
            get_eight(src, int32(i + int32(quarter << int32(1))), c, t, n, masks, x, p)
            get_eight(src, int32(i + int32(quarter * int32(3))), d, u, n, masks, x, p)
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        if n & int32(63):
            cut_masks(masks, n)
        if cuda.syncthreads_or(get_escapes(x, n, src, at, escapes, tmp)):
            return int32(-1)
        return int32(0)

    return measure, write, decode


def _either(first: Layout, second: Layout, narrow: Any) -> TileFunctions:
    # The functions of the layout whose mantissa has a1 bits.
    measure_first, write_first, decode_first = _tile(first, narrow)
    measure_second, write_second, decode_second = _tile(second, narrow)
    bits = first.mantissa_bits

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        if int32(a1) == int32(bits):
            return measure_first(x, n, dst, tmp, a0, a1, a2, a3, first)
        return measure_second(x, n, dst, tmp, a0, a1, a2, a3, first)

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        if int32(a1) == int32(bits):
            write_first(x, n, dst, tmp, state, a0, a1, a2, a3, first)
        else:
            write_second(x, n, dst, tmp, state, a0, a1, a2, a3, first)

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        if int32(a1) == int32(bits):
            return decode_first(src, nbytes, x, n, tmp, a0, a1, a2, a3, first)
        return decode_second(src, nbytes, x, n, tmp, a0, a1, a2, a3, first)

    return measure, write, decode


def expk_tile(word: int, as_words: Any) -> TileFunctions:
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py.

    a0..a2: exponent bits, mantissa bits, k or 0 for the cheaper.
    """
    layouts, narrow = LAYOUTS[word], WORD_TYPES[word]
    if len(layouts) == 1:
        return _tile(layouts[0], narrow)
    return _either(layouts[0], layouts[1], narrow)
