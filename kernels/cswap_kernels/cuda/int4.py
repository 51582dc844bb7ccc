"""``int4`` on CUDA: the format of cswap_kernels/int4.py.

Decoded as all formats of groups (groups.py). Encoded by a warp per row of four groups, a word per
lane: the random numbers of a row come in that order, four to a lane.
"""

from __future__ import annotations

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.floats import MAGNITUDE, float_loader, is_raw, of_block, ordered, unordered
from cswap_kernels.cuda.fours import WHOLE, scaled
from cswap_kernels.cuda.groups import group_decoder
from cswap_kernels.cuda.primitives import (
    advance,
    as_u32,
    bits_f32,
    f32_bits,
    floor,
    rint,
    signed,
    unsigned,
)
from cswap_kernels.cuda.warps import (
    fill,
    lane_id,
    n_warps,
    padded,
    warp_id,
    warp_max,
    warp_min,
    warp_sum,
    zero_bytes,
)
from cswap_kernels.floats import LIMIT
from cswap_kernels.int4 import GROUP

LEAST_STEP = 0x0D800000
FLATTEST = 0x38800000
"""Bits of 2**-14: step / max |x| is no less, so that z fits 16 bits."""

TOP = 15 * 65536
LOWEST = -(1 << 31)
HIGHEST = (1 << 31) - 1


@cuda.jit(device=True)
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four random u32 of a counter and a key; see cswap_kernels/philox.py."""
    for _ in range(10):
        a = uint64(uint64(c0) * uint64(0xD2511F53))
        b = uint64(uint64(c2) * uint64(0xCD9E8D57))
        low_a, low_b = uint32(a & uint64(0xFFFFFFFF)), uint32(b & uint64(0xFFFFFFFF))
        c0 = uint32(uint32(uint32(b >> uint64(32)) ^ c1) ^ k0)
        c2 = uint32(uint32(uint32(a >> uint64(32)) ^ c3) ^ k1)
        c1, c3 = low_b, low_a
        k0 = uint32(uint64(uint64(k0) + uint64(0x9E3779B9)) & uint64(0xFFFFFFFF))
        k1 = uint32(uint64(uint64(k1) + uint64(0xBB67AE85)) & uint64(0xFFFFFFFF))
    return c0, c1, c2, c3


@cuda.jit(device=True)
def round_up(step):
    """A float32 rounded up to a bfloat16, and to the least step, as bits of a float32."""
    bits = f32_bits(step)
    if bits < uint32(LEAST_STEP):
        bits = uint32(LEAST_STEP)
    return uint32(uint32(bits + uint32(0xFFFF)) & uint32(0xFFFF0000))


@cuda.jit(device=True)
def grid_of(low, high, top):
    """(bits of the step as a float32, z as a float32) of a group."""
    spread = float32(high - low)
    least = float32(bits_f32(unsigned(top)) * bits_f32(uint32(FLATTEST)))
    bits = round_up(max(float32(spread / float32(15.0)), least))
    zero = floor(float32(low / bits_f32(bits)))
    if float32(float32(zero + float32(15.0)) * bits_f32(bits)) < high:
        bits = round_up(max(float32(spread / float32(14.0)), least))
        zero = floor(float32(low / bits_f32(bits)))
    return bits, zero


@cuda.jit(device=True)
def groups_of(n):
    """Groups of n words."""
    return int32((n + int32(31)) >> int32(5))


@cuda.jit(device=True)
def code_bytes(n):
    """Bytes of the codes of n words: a byte has those of two, so many words apart."""
    return int32(int32(int32(groups_of(n) + int32(1)) >> int32(1)) << int32(5))


@cuda.jit(device=True)
def quad_at(codes, i, n):
    """The quad of the i-th four codes."""
    quarter = int32(code_bytes(n) >> int32(2))
    both = uint32(codes[i if i < quarter else int32(i - quarter)])
    return uint32((both if i < quarter else uint32(both >> uint32(4))) & uint32(0x0F0F0F0F))


@cuda.jit(device=True)
def four(entry, quad):
    """The values of four codes."""
    step = bits_f32(uint32(entry << uint32(16)))
    zero = float32(int32(signed(entry) >> int32(16)))
    base = float32(bits_f32(uint32(WHOLE)) - zero)  # 2**23 - z, exact
    return scaled(quad, base, step)


make_decode = group_decoder(GROUP, 4, four, code_bytes, quad_at)


@cuda.jit(device=True)
def random_of_row(row, key, stream):
    """Four u32 for each lane, for the four groups of a row of the tensor.

    The 16 counters of a row give eight values 16 bits each: number g of the counter of lane % 16
    has those of group g, the low half for the lanes below 16.
    """
    k0, k1 = uint32(key & uint64(0xFFFFFFFF)), uint32(key >> uint64(32))
    c2, c3 = uint32(stream & uint64(0xFFFFFFFF)), uint32(stream >> uint64(32))
    counter = uint64(uint64(row) << uint64(4))
    counter = uint64(counter | uint64(uint32(lane_id() & int32(15))))
    c0, c1 = uint32(counter & uint64(0xFFFFFFFF)), uint32(counter >> uint64(32))
    return philox4x32(c0, c1, c2, c3, k0, k1)


@cuda.jit(device=True)
def random_of(four, g):
    """The 16 bits of this lane's word in group g of a row, from `random_of_row`."""
    r0, r1, r2, r3 = four
    random = r0 if g == 0 else r1 if g == 1 else r2 if g == 2 else r3
    return uint32(random >> uint32(lane_id() & int32(16)))


@cuda.jit(device=True)
def magnitude_of(value):
    """Bits of |x| of a float32, from `ordered` ones."""
    return int32(~value) if value < int32(0) else value


@cuda.jit(device=True)
def put_scale(scales, group, low, high, amax):
    """Write a group's step and z: (low, z, z times step, 65536 / step). amax: bits of max |x|."""
    step_bits, zero = grid_of(low, high, amax)
    if lane_id() == int32(0):
        upper = uint32(unsigned(int32(zero)) << uint32(16))
        scales[group] = uint32(uint32(step_bits >> uint32(16)) | upper)
    step = bits_f32(step_bits)
    return low, zero, float32(zero * step), float32(float32(65536.0) / step)


@cuda.jit(device=True)
def code_of(value, grid, random):
    """The code (u8) of a value in a group of which `put_scale` gave ``grid``, rounded at random."""
    low, zero, base, inverse = grid
    y = float32(float32(value - base) * inverse)
    y = float32(min(float32(max(y, float32(0.0))), float32(TOP)))
    q = int32(int32(rint(y)) + signed(uint32(random & uint32(0xFFFF))))
    q = int32(q >> int32(16))
    if low >= float32(0.0) and zero == float32(0.0) and value > float32(0.0):
        q = int32(max(q, int32(1)))
    return uint8(q)


@cuda.jit(device=True)
def pack(codes, half):
    """Two codes per byte, of words ``half`` apart, from one per byte. Ends with a syncthreads."""
    i = int32(cuda.threadIdx.x)
    while i < half:
        upper = uint32(uint32(codes[int32(i + half)]) << uint32(4))
        codes[i] = uint8(uint32(uint32(codes[i]) | upper))
        i = int32(i + int32(cuda.blockDim.x))
    cuda.syncthreads()


def int4_tile(word, as_words):
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py.

    a1, a2: seed and stream of the random numbers.
    """
    load = float_loader(word)

    @cuda.jit(device=True)
    def put_row(x, n, row, scales, codes, kind, random, found):
        # Scales and codes of a row's groups, unless values are too large; `found`, carried on.
        (top, exponents, n_nonzero), n_groups = found, groups_of(n)
        for g in range(4):
            group = int32(int32(row << int32(2)) + int32(g))
            i = int32(int32(group << int32(5)) + lane_id())
            value, low, high, counts = float32(0.0), int32(HIGHEST), int32(LOWEST), int32(0)
            if i < n:
                value = load(x, i, kind)
                low = high = ordered(f32_bits(value))
                magnitude = signed(uint32(f32_bits(value) & uint32(MAGNITUDE)))
                counts = int32(magnitude >> int32(23))  # and 1 << 20 unless 0, summed up at once
                counts = int32(counts + (int32(1 << 20) if magnitude != int32(0) else int32(0)))
            low, high, counts = warp_min(low), warp_max(high), warp_sum(counts)
            exponents = int32(exponents + int32(counts & int32(0xFFFFF)))
            n_nonzero = int32(n_nonzero + int32(counts >> int32(20)))
            amax = int32(0)
            if group < n_groups:
                amax = int32(max(magnitude_of(high), magnitude_of(low)))
            top = int32(max(top, amax))
            if group < n_groups and top < int32(LIMIT):
                low, high = bits_f32(unordered(low)), bits_f32(unordered(high))
                grid, own = put_scale(scales, group, low, high, amax), random_of(random, g)
                if i < n:
                    codes[i] = code_of(value, grid, own)
        return top, exponents, n_nonzero

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        n_groups, half = groups_of(n), code_bytes(n)
        start = padded(int32(n_groups << int32(2)))
        zero_bytes(dst, int32(n_groups << int32(2)), start)
        scales, codes = as_u32(dst), advance(dst, start)  # one code per byte, at first
        fill(advance(codes, n), int32(int32(half << int32(1)) - n), 0)
        found, row = (int32(0), int32(0), int32(0)), warp_id()
        while int32(row << int32(2)) < n_groups:
            random = random_of_row(int64(int64(first >> int64(7)) + int64(row)), a1, a2)
            found = put_row(x, n, row, scales, codes, int32(a0), random, found)
            row = int32(row + n_warps())
        top, exponents, n_nonzero = of_block(found[0], found[1], found[2], tmp)
        if is_raw(top, exponents, n_nonzero):
            return int32(-1)
        pack(codes, half)
        return int32(start + half)

    return *in_one_step(encode), make_decode(word)
