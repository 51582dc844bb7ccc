"""``bitpack`` on CUDA: the format of cswap_kernels/bitpack.py."""

from __future__ import annotations

from numba import cuda, int32, int64, uint8, uint16, uint32, uint64

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.planes import get_parts, parts_bytes, parts_writer
from cswap_kernels.cuda.primitives import as_u64, signed64, unsigned64
from cswap_kernels.cuda.warps import lane_id, n_warps, padded, warp_id, zero_bytes

HEADER = 16
TOP = 1 << 63


@cuda.jit(device=True)
def block_range(low, high, tmp):
    """(smallest low, largest high) of two u64 of every thread. Ends with a syncthreads."""
    low, high = signed64(uint64(low ^ uint64(TOP))), signed64(uint64(high ^ uint64(TOP)))
    step = int32(16)
    while step > int32(0):
        low = int64(min(low, int64(cuda.shfl_xor_sync(0xFFFFFFFF, low, step))))
        high = int64(max(high, int64(cuda.shfl_xor_sync(0xFFFFFFFF, high, step))))
        step = int32(step >> int32(1))
    memory = as_u64(tmp)
    if lane_id() == int32(0):
        memory[warp_id()] = unsigned64(low)
        memory[int32(warp_id() + int32(32))] = unsigned64(high)
    cuda.syncthreads()
    for k in range(n_warps()):
        low = int64(min(low, signed64(memory[int32(k)])))
        high = int64(max(high, signed64(memory[int32(int32(k) + int32(32))])))
    cuda.syncthreads()
    return uint64(unsigned64(low) ^ uint64(TOP)), uint64(unsigned64(high) ^ uint64(TOP))


@cuda.jit(device=True)
def encoded_bytes(n, width):
    """Bytes of an encoding of n words by ``width`` bits."""
    rows = int32(int32(width >> int32(3)) * padded(n))
    return int32(int32(int32(HEADER) + rows) + parts_bytes(n, int32(width & int32(7))))


def bitpack_tile(word, as_words):
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py."""
    wide = uint64 if word == 8 else uint32  # what is computed with
    narrow = {1: uint8, 2: uint16, 4: uint32, 8: uint64}[word]
    word_mask = (1 << 8 * word) - 1

    @cuda.jit(device=True)
    def field(x, i, n, p):
        # The top bits of word i's distance: p is (flip, smallest, shift).
        if i >= n:
            return uint32(0)
        distance = wide(wide(wide(x[i]) ^ p[0]) - p[1])
        return uint32(wide(distance >> p[2]) & wide(255))

    put_parts = parts_writer(field)

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        flip = wide(a0 & uint64(word_mask))
        thread, step = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        low = wide(wide(x[int32(0)]) ^ flip)
        high, i = low, thread
        while i < n:
            value = wide(wide(x[i]) ^ flip)
            low, high = min(low, value), max(high, value)
            i = int32(i + step)
        lowest, highest = block_range(uint64(low), uint64(high), tmp)
        width = int32(int32(64) - int32(cuda.clz(uint64(highest - lowest))))
        nbytes = encoded_bytes(n, width)
        if nbytes >= int32(n * int32(word)):
            return int32(-1)
        zero_bytes(dst, int32(0), int32(8))
        cuda.syncthreads()
        if thread == int32(0):
            dst[int32(0)] = uint8(width)
        if thread < int32(8):
            byte = uint64(lowest >> uint64(int32(thread << int32(3))))
            dst[int32(int32(8) + thread)] = uint8(byte & uint64(255))
        low, at, shift = wide(lowest), int32(HEADER), int32(0)
        while shift < int32(width & int32(-8)):
            i = thread
            while i < n:
                dst[int32(at + i)] = uint8(field(x, i, n, (flip, low, wide(shift))))
                i = int32(i + step)
            zero_bytes(dst, int32(at + n), int32(at + padded(n)))
            at, shift = int32(at + padded(n)), int32(shift + int32(8))
        put_parts(x, n, (flip, low, wide(shift)), int32(width & int32(7)), dst, at)
        cuda.syncthreads()
        return nbytes

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        width = int32(src[int32(0)])
        if nbytes < int32(HEADER) or width > int32(8 * word):
            return int32(-1)
        if nbytes != encoded_bytes(n, width):
            return int32(-1)
        flip = wide(a0 & uint64(word_mask))
        low = wide(as_u64(src)[int32(1)] & uint64(word_mask))
        bits, i = int32(width & int32(7)), int32(cuda.threadIdx.x)
        while i < n:
            value, at, shift = wide(0), int32(HEADER), int32(0)
            while shift < int32(width & int32(-8)):
                value = wide(value | wide(wide(src[int32(at + i)]) << wide(shift)))
                at, shift = int32(at + padded(n)), int32(shift + int32(8))
            if bits != int32(0):
                value = wide(value | wide(wide(get_parts(src, at, bits, i, n)) << wide(shift)))
            x[i] = narrow(wide(wide(wide(value + low) ^ flip) & wide(word_mask)))
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return *in_one_step(encode), decode
