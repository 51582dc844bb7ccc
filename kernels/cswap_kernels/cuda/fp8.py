"""``fp8`` and ``mxfp8`` on CUDA: formats of cswap_kernels/{fp8,mxfp8}.py, a warp per group."""

from __future__ import annotations

from numba import cuda, float32, int32, uint8, uint32

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.floats import (
    MAGNITUDE,
    any_raw,
    float_access,
    round_small,
    widen_small,
)
from cswap_kernels.cuda.primitives import advance, as_u32, bits_f32, f32_bits, signed, unsigned
from cswap_kernels.cuda.warps import (
    lane_id,
    n_warps,
    padded,
    warp_id,
    warp_max,
    warp_sum,
    zero_bytes,
)
from cswap_kernels.floats import E4M3_LEAST, E4M3_SHIFT, LIMIT
from cswap_kernels.fp8 import E4M3_MAX

LEAST_SCALE = 0x00800000
E_MAX = 8
"""Exponent of E4M3's largest number."""


@cuda.jit(device=True)
def to_e4m3(x):
    """The E4M3 code (u32 of 8 bits) nearest to a float32, ties to even, saturating."""
    u = f32_bits(x)
    code = round_small(uint32(u & uint32(MAGNITUDE)), uint32(E4M3_SHIFT), uint32(E4M3_LEAST))
    if code > uint32(E4M3_MAX):
        code = uint32(E4M3_MAX)
    return uint32(code | uint32(uint32(u >> uint32(24)) & uint32(0x80)))


@cuda.jit(device=True)
def from_e4m3(c):
    """The float32 of an E4M3 code (u32 of 8 bits); exact."""
    magnitude = uint32(c & uint32(0x7F))
    bits = f32_bits(widen_small(magnitude, uint32(E4M3_SHIFT), uint32(E4M3_LEAST)))
    if magnitude > uint32(E4M3_MAX):
        bits = uint32(0x7FC00000)
    return bits_f32(uint32(bits | uint32(uint32(c & uint32(0x80)) << uint32(24))))


@cuda.jit(device=True)
def e8m0(c):
    """The float32 of an E8M0 scale (u32 of 8 bits): 2**(c - 127), NaN for 255."""
    bits = uint32(c << uint32(23))
    if c == uint32(0):
        bits = uint32(0x00400000)  # 2**-127 is not a normal number
    if c == uint32(255):
        bits = uint32(0x7FC00000)
    return bits_f32(bits)


def fp8_tile(word, as_words):
    """(measure, write, decode) of ``fp8``, words of ``word`` bytes; contract: container.py."""
    load, store = float_access(word)

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        kind, lane = int32(a0), lane_id()
        n_groups = int32((n + int32(127)) >> int32(7))
        start = padded(int32(n_groups << int32(2)))
        zero_bytes(dst, int32(n_groups << int32(2)), start)
        scales, codes = as_u32(dst), advance(dst, start)
        top, exponents, n_nonzero = int32(0), int32(0), int32(0)
        group = warp_id()
        while group < n_groups:
            largest, counts = int32(0), int32(0)
            for k in range(4):
                i = int32(int32(group << int32(7)) + int32(int32(k) * int32(32)) + lane)
                if i < n:
                    magnitude = signed(uint32(f32_bits(load(x, i, kind)) & uint32(MAGNITUDE)))
                    largest = int32(max(largest, magnitude))
                    counts = int32(counts + int32(magnitude >> int32(23)))
                    if magnitude != int32(0):
                        counts = int32(counts + int32(1 << 20))
            largest, counts = warp_max(largest), warp_sum(counts)
            exponents = int32(exponents + int32(counts & int32(0xFFFFF)))
            n_nonzero = int32(n_nonzero + int32(counts >> int32(20)))
            top = int32(max(top, largest))
            if top < int32(LIMIT):
                bits = f32_bits(float32(bits_f32(unsigned(largest)) / float32(448.0)))
                if bits < uint32(LEAST_SCALE):
                    bits = uint32(LEAST_SCALE)
                if lane == int32(0):
                    scales[group] = bits
                scale = bits_f32(bits)
                for k in range(4):
                    i = int32(int32(group << int32(7)) + int32(int32(k) * int32(32)) + lane)
                    if i < n:
                        codes[i] = uint8(to_e4m3(float32(load(x, i, kind) / scale)))
            group = int32(group + n_warps())
        if any_raw(top, exponents, n_nonzero, tmp):
            return int32(-1)
        return int32(start + n)

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        start = padded(int32(int32((n + int32(127)) >> int32(7)) << int32(2)))
        if nbytes != int32(start + n):
            return int32(-1)
        scales, codes = as_u32(src), advance(src, start)
        i = int32(cuda.threadIdx.x)
        while i < n:
            scale = bits_f32(uint32(scales[int32(i >> int32(7))]))
            store(x, i, int32(a0), float32(from_e4m3(uint32(codes[i])) * scale))
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return *in_one_step(encode), decode


def mxfp8_tile(word, as_words):
    """(measure, write, decode) of ``mxfp8``, words of ``word`` bytes; contract: container.py."""
    load, store = float_access(word)

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        kind, lane = int32(a0), lane_id()
        n_groups = int32((n + int32(31)) >> int32(5))
        start = padded(n_groups)
        zero_bytes(dst, n_groups, start)
        codes = advance(dst, start)
        top, exponents, n_nonzero = int32(0), int32(0), int32(0)
        group = warp_id()
        while group < n_groups:
            i = int32(int32(group << int32(5)) + lane)
            value = float32(0.0)
            if i < n:
                value = load(x, i, kind)
            magnitude = signed(uint32(f32_bits(value) & uint32(MAGNITUDE)))
            counts = int32(magnitude >> int32(23))
            if magnitude != int32(0):
                counts = int32(counts + int32(1 << 20))
            largest, counts = warp_max(magnitude), warp_sum(counts)
            exponents = int32(exponents + int32(counts & int32(0xFFFFF)))
            n_nonzero = int32(n_nonzero + int32(counts >> int32(20)))
            top = int32(max(top, largest))
            if top < int32(LIMIT):
                scale = int32(max(int32(int32(largest >> int32(23)) - int32(E_MAX)), int32(0)))
                if lane == int32(0):
                    dst[group] = uint8(scale)
                inverse = bits_f32(unsigned(int32(int32(int32(254) - scale) << int32(23))))
                if i < n:
                    codes[i] = uint8(to_e4m3(float32(value * inverse)))
            group = int32(group + n_warps())
        if any_raw(top, exponents, n_nonzero, tmp):
            return int32(-1)
        return int32(start + n)

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        start = padded(int32((n + int32(31)) >> int32(5)))
        if nbytes != int32(start + n):
            return int32(-1)
        codes = advance(src, start)
        i = int32(cuda.threadIdx.x)
        while i < n:
            scale = e8m0(uint32(src[int32(i >> int32(5))]))
            store(x, i, int32(a0), float32(from_e4m3(uint32(codes[i])) * scale))
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return *in_one_step(encode), decode
