"""``int8`` on CUDA: the format of cswap_kernels/int8.py, a warp per group of 128 values."""

from __future__ import annotations

from numba import cuda, float32, int32, uint8, uint32

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.floats import MAGNITUDE, any_raw, float_access, ordered, unordered
from cswap_kernels.cuda.primitives import (
    advance,
    as_u32,
    bits_f32,
    f32_bits,
    rint,
    signed,
    unsigned,
)
from cswap_kernels.cuda.warps import (
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

LOG_GROUP = 7
LEAST_SCALE = 0x00800000


@cuda.jit(device=True)
def scale_of(lo, hi):
    """(bits of the scale, its reciprocal, zero point) of a group by its smallest and largest."""
    low = bits_f32(unordered(lo))
    spread = float32(bits_f32(unordered(hi)) - low)
    bits = f32_bits(float32(spread / float32(255.0)))
    if bits < uint32(LEAST_SCALE):
        bits = uint32(LEAST_SCALE)
    bits = uint32(uint32(bits + uint32(255)) & uint32(0xFFFFFF00))
    inverse = float32(float32(1.0) / bits_f32(bits))
    zero = int32(rint(float32(float32(-low) * inverse)))
    return bits, inverse, zero


def int8_tile(word, as_words):
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py."""
    load, store = float_access(word)

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        kind, lane = int32(a0), lane_id()
        n_groups = int32((n + int32(127)) >> int32(LOG_GROUP))
        start = padded(int32(n_groups << int32(2)))
        zero_bytes(dst, int32(n_groups << int32(2)), start)
        scales, codes = as_u32(dst), advance(dst, start)
        top, exponents, n_nonzero = int32(0), int32(0), int32(0)
        group = warp_id()
        while group < n_groups:
            lo, hi, counts = int32(0), int32(0), int32(0)
            for k in range(4):
                i = int32(int32(group << int32(LOG_GROUP)) + int32(int32(k) * int32(32)) + lane)
                if i < n:
                    bits = f32_bits(load(x, i, kind))
                    magnitude = signed(uint32(bits & uint32(MAGNITUDE)))
                    value = ordered(bits)
                    lo, hi = int32(min(lo, value)), int32(max(hi, value))
                    counts = int32(counts + int32(magnitude >> int32(23)))
                    if magnitude != int32(0):
                        counts = int32(counts + int32(1 << 20))
            lo, hi, counts = warp_min(lo), warp_max(hi), warp_sum(counts)
            exponents = int32(exponents + int32(counts & int32(0xFFFFF)))
            n_nonzero = int32(n_nonzero + int32(counts >> int32(20)))
            below = int32(~lo) if lo < int32(0) else lo
            top = int32(max(top, int32(max(hi, below))))
            if top < int32(LIMIT):
                scale, inverse, zero = scale_of(lo, hi)
                if lane == int32(0):
                    scales[group] = uint32(scale | unsigned(zero))
                for k in range(4):
                    i = int32(int32(group << int32(LOG_GROUP)) + int32(int32(k) * int32(32)) + lane)
                    if i < n:
                        given = load(x, i, kind)
                        steps = int32(rint(float32(given * inverse)))
                        if steps == int32(0):  # z is for 0 alone
                            steps = int32(int32(given > float32(0.0)) - int32(given < float32(0.0)))
                        q = int32(steps + zero)
                        codes[i] = uint8(int32(min(int32(max(q, int32(0))), int32(255))))
            group = int32(group + n_warps())
        if any_raw(top, exponents, n_nonzero, tmp):
            return int32(-1)
        return int32(start + n)

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        kind = int32(a0)
        start = padded(int32(int32((n + int32(127)) >> int32(LOG_GROUP)) << int32(2)))
        if nbytes != int32(start + n):
            return int32(-1)
        scales, codes = as_u32(src), advance(src, start)
        i = int32(cuda.threadIdx.x)
        while i < n:
            entry = uint32(scales[int32(i >> int32(LOG_GROUP))])
            zero = signed(uint32(entry & uint32(255)))
            q = int32(int32(codes[i]) - zero)
            scale = bits_f32(uint32(entry & uint32(0xFFFFFF00)))
            store(x, i, kind, float32(float32(q) * scale))
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return *in_one_step(encode), decode
