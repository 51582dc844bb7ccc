"""``expk`` on CUDA: the format of cswap_kernels/expk.py."""

from __future__ import annotations

from numba import cuda, int32, uint8, uint16, uint32, uint64

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.planes import get_parts, parts_bytes, parts_writer
from cswap_kernels.cuda.primitives import as_u16
from cswap_kernels.cuda.warps import (
    ballot,
    before_lane,
    block_exclusive,
    block_max,
    block_sum,
    lane_id,
    padded,
    zero_bytes,
)
from cswap_kernels.cuda.zvc import groups_of_warp
from cswap_kernels.expk import FAR, HEADER, NEAR, ZERO


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


def expk_tile(word, as_words):
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py.

    a0..a2: exponent bits, mantissa bits, k or 0 for the cheaper.
    """
    wide = uint64 if word == 8 else uint32  # what is computed with
    narrow = {2: uint16, 4: uint32, 8: uint64}[word]

    @cuda.jit(device=True)
    def exponent_of(x, i, shift, field):
        return int32(wide(wide(wide(x[i]) >> wide(shift)) & wide(field)))

    @cuda.jit(device=True)
    def distance(x, i, high, shift, field):
        # How far the exponent lies below the largest, at most FAR; ZERO for exponent 0, unless the
        # largest is so small that 0 is near it.
        exponent = exponent_of(x, i, shift, field)
        if exponent == int32(0):
            return int32(ZERO) if high > int32(NEAR) else high
        return int32(min(int32(high - exponent), int32(FAR)))

    @cuda.jit(device=True)
    def code_field(x, i, n, p):
        # p: high, mantissa bits, exponent field, k, zero code
        if i >= n:
            return uint32(0)
        c = distance(x, i, p[0], p[1], p[2])
        escape = int32(int32(int32(1) << p[3]) - int32(1))
        limit = int32(escape - p[4])
        if c == int32(ZERO):
            return uint32(limit) if p[4] != int32(0) else uint32(escape)
        return uint32(c) if c < limit else uint32(escape)

    @cuda.jit(device=True)
    def rest_field(x, i, n, p):
        # Sign and mantissa as one number, from bit p[2] on; p: exponent bits, mantissa bits, shift
        if i >= n:
            return uint32(0)
        w, one = wide(x[i]), wide(1)
        low = wide(wide(one << wide(p[1])) - one)
        sign = wide(wide(w >> wide(p[0])) & wide(one << wide(p[1])))
        return uint32(wide(wide(wide(w & low) | sign) >> wide(p[2])) & wide(255))

    put_codes, put_rest = parts_writer(code_field), parts_writer(rest_field)

    @cuda.jit(device=True)
    def put_escapes(x, n, p, dst, at, count, wide_exponents, tmp):
        # Positions (u16), then exponents (u8, or u16), in order; this warp's from its own offset.
        first, last = groups_of_warp(n)
        lane, escape = lane_id(), uint32(uint32(uint32(1) << uint32(p[3])) - uint32(1))
        found = int32(0)
        for group in range(first, last):
            i = int32(int32(int32(group) << int32(5)) + lane)
            mask = ballot(i < n and code_field(x, i, n, p) == escape)
            found = int32(found + int32(cuda.popc(mask)))
        before, _ = block_exclusive(found if lane == int32(0) else int32(0), tmp)
        slot = int32(cuda.shfl_sync(0xFFFFFFFF, before, 0))
        positions = as_u16(dst)
        at_positions = int32(at >> int32(1))
        at_exponents = int32(at + int32(count << int32(1)))
        for group in range(first, last):
            i = int32(int32(int32(group) << int32(5)) + lane)
            mine = i < n and code_field(x, i, n, p) == escape
            mask = ballot(mine)
            if mine:
                j = int32(slot + before_lane(mask))
                positions[int32(at_positions + j)] = uint16(i)
                exponent = uint32(exponent_of(x, i, p[1], p[2]))
                if wide_exponents:
                    place = int32(at_exponents + int32(j << int32(1)))
                    dst[place] = uint8(exponent & uint32(255))
                    dst[int32(place + int32(1))] = uint8(exponent >> uint32(8))
                else:
                    dst[int32(at_exponents + j)] = uint8(exponent)
            slot = int32(slot + int32(cuda.popc(mask)))

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        exponent_bits, mantissa_bits = int32(a0), int32(a1)
        field = int32(int32(int32(1) << exponent_bits) - int32(1))
        thread, step = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        high, i = int32(0), thread
        while i < n:
            high = int32(max(high, exponent_of(x, i, mantissa_bits, field)))
            i = int32(i + step)
        high = block_max(high, tmp)
        low_counts, high_counts, zeros, i = int32(0), int32(0), int32(0), thread
        while i < n:  # two counts of up to 8192 in each
            c = distance(x, i, high, mantissa_bits, field)
            low_counts = int32(low_counts + int32(c > int32(5)))
            low_counts = int32(low_counts + int32(int32(c > int32(6)) << int32(16)))
            high_counts = int32(high_counts + int32(c > int32(13)))
            high_counts = int32(high_counts + int32(int32(c > int32(14)) << int32(16)))
            zeros = int32(zeros + int32(c == int32(ZERO)))
            i = int32(i + step)
        low_counts, high_counts = block_sum(low_counts, tmp), block_sum(high_counts, tmp)
        zeros = block_sum(zeros, tmp)
        wide_exponents = exponent_bits > int32(8)
        k, zero_code, escapes, nbytes = choose(
            n,
            mantissa_bits,
            int32(4) if wide_exponents else int32(3),
            int32(a2),
            zeros,
            int32(low_counts & int32(0xFFFF)),
            int32(low_counts >> int32(16)),
            int32(high_counts & int32(0xFFFF)),
            int32(high_counts >> int32(16)),
        )
        if nbytes >= int32(n * int32(word)):
            return int32(-1)
        zero_bytes(dst, int32(8), int32(HEADER))
        if thread == int32(0):
            dst[int32(0)], dst[int32(1)] = uint8(k), uint8(zero_code)
            dst[int32(2)], dst[int32(3)] = uint8(high & int32(255)), uint8(high >> int32(8))
            dst[int32(4)] = uint8(escapes & int32(255))
            dst[int32(5)] = uint8(int32(escapes >> int32(8)) & int32(255))
            dst[int32(6)], dst[int32(7)] = uint8(0), uint8(0)
        fields, at, shift = int32(mantissa_bits + int32(1)), int32(HEADER), int32(0)
        while shift < int32(fields & int32(-8)):
            i = thread
            while i < n:
                byte = rest_field(x, i, n, (exponent_bits, mantissa_bits, shift))
                dst[int32(at + i)] = uint8(byte)
                i = int32(i + step)
            zero_bytes(dst, int32(at + n), int32(at + padded(n)))
            at, shift = int32(at + padded(n)), int32(shift + int32(8))
        over = int32(fields & int32(7))
        at = put_rest(x, n, (exponent_bits, mantissa_bits, shift), over, dst, at)
        p = (high, mantissa_bits, field, k, zero_code)
        at = put_codes(x, n, p, k, dst, at)
        put_escapes(x, n, p, dst, at, escapes, wide_exponents, tmp)
        cuda.syncthreads()
        return nbytes

    @cuda.jit(device=True)
    def get_rest(src, i, n, mantissa_bits):
        fields, at, shift = int32(mantissa_bits + int32(1)), int32(HEADER), int32(0)
        value = wide(0)
        while shift < int32(fields & int32(-8)):
            value = wide(value | wide(wide(src[int32(at + i)]) << wide(shift)))
            at, shift = int32(at + padded(n)), int32(shift + int32(8))
        over = int32(fields & int32(7))
        if over != int32(0):
            bits = wide(get_parts(src, at, over, i, n))
            value = wide(value | wide(bits << wide(shift)))
        return value

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        if nbytes < int32(HEADER):
            return int32(-1)
        exponent_bits, mantissa_bits = int32(a0), int32(a1)
        wide_exponents = exponent_bits > int32(8)
        k, zero_code = int32(src[int32(0)]), int32(src[int32(1)])
        high = int32(int32(src[int32(2)]) | int32(int32(src[int32(3)]) << int32(8)))
        escapes = int32(int32(src[int32(4)]) | int32(int32(src[int32(5)]) << int32(8)))
        beyond = int32(int32(src[int32(6)]) | int32(src[int32(7)]))
        if k < int32(3) or k > int32(4) or zero_code > int32(1) or beyond != int32(0):
            return int32(-1)
        if int32(high >> exponent_bits) != int32(0):
            return int32(-1)
        fixed = fixed_bytes(n, mantissa_bits, k)
        each = int32(4) if wide_exponents else int32(3)
        if nbytes != int32(fixed + int32(escapes * each)):
            return int32(-1)
        codes_at = int32(fixed - parts_bytes(n, k))
        escape = int32(int32(int32(1) << k) - int32(1))
        zero = int32(escape - int32(1)) if zero_code != int32(0) else int32(ZERO)
        one, shift = wide(1), wide(mantissa_bits)
        field = wide(wide(one << wide(exponent_bits)) - one)
        low = wide(wide(one << shift) - one)
        thread, step = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        coded, i = int32(0), thread
        while i < n:
            code = int32(get_parts(src, codes_at, k, i, n))
            coded = int32(coded + int32(code == escape))
            rest = get_rest(src, i, n, mantissa_bits)
            exponent = wide(0)
            if code != zero:
                exponent = wide(wide(wide(high) - wide(code)) & field)
            sign = wide(wide(rest & wide(one << shift)) << wide(exponent_bits))
            x[i] = narrow(wide(wide(wide(rest & low) | sign) | wide(exponent << shift)))
            i = int32(i + step)
        coded = block_sum(coded, tmp)
        if coded != escapes:
            return int32(-1)
        positions, wrong, j = as_u16(src), int32(0), thread
        at_positions = int32(fixed >> int32(1))
        at_exponents = int32(fixed + int32(escapes << int32(1)))
        while j < escapes:
            i, before = int32(positions[int32(at_positions + j)]), int32(-1)
            if j > int32(0):
                before = int32(positions[int32(int32(at_positions + j) - int32(1))])
            good = before < i and i < n
            if good:
                good = int32(get_parts(src, codes_at, k, i, n)) == escape
            if not good:
                wrong = int32(1)
            else:
                exponent = wide(src[int32(at_exponents + j)])
                if wide_exponents:
                    place = int32(at_exponents + int32(j << int32(1)))
                    upper = wide(wide(src[int32(place + int32(1))]) << wide(8))
                    exponent = wide(wide(src[place]) | upper)
                kept = wide(wide(x[i]) & wide(~wide(field << shift)))
                x[i] = narrow(wide(kept | wide(wide(exponent & field) << shift)))
            j = int32(j + step)
        if cuda.syncthreads_or(wrong):
            return int32(-1)
        return int32(0)

    return *in_one_step(encode), decode
