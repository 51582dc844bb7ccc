"""``csr`` on CUDA: the format of cswap_kernels/csr.py."""

from __future__ import annotations

from numba import cuda, int32, uint8, uint16, uint32

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.primitives import advance, as_u16, as_u32
from cswap_kernels.cuda.warps import (
    before_lane,
    fill,
    lane_id,
    n_warps,
    padded,
    warp_id,
    zero_bytes,
)
from cswap_kernels.cuda.zvc import groups_of_warp, pack, write_mask

LOG_ROW = 8
"""A row has 256 words: a column is a byte."""


@cuda.jit(device=True)
def columns_at(n):
    """Byte of the first column, behind a u16 for each row."""
    rows = int32((n + int32(255)) >> int32(LOG_ROW))
    return padded(int32(rows << int32(1)))


@cuda.jit(device=True)
def write_columns(masks, n, dst, start, at):
    """Row ends at the start of dst, columns from byte ``start`` on; this warp's from ``at`` on."""
    lane, ends = lane_id(), as_u16(dst)
    at = int32(cuda.shfl_sync(0xFFFFFFFF, at, 0))
    first, last = groups_of_warp(n)
    n_groups = int32((n + int32(31)) >> int32(5))
    for group in range(first, last):
        mask = uint32(masks[int32(group)])
        if (mask >> uint32(lane)) & uint32(1):
            column = int32(int32(int32(int32(group) << int32(5)) + lane) & int32(255))
            dst[int32(int32(start + at) + before_lane(mask))] = uint8(column)
        at = int32(at + int32(cuda.popc(mask)))
        ends_row = int32(int32(group) & int32(7)) == int32(7)
        if lane == int32(0) and (ends_row or int32(group) == int32(n_groups - int32(1))):
            ends[int32(int32(group) >> int32(3))] = uint16(at)


def csr_tile(word, as_words):
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py."""

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        raw_bytes = int32(n * int32(word))
        masks = as_u32(advance(dst, padded(raw_bytes)))  # behind all that is written below
        before, count = write_mask(x, n, masks, tmp)
        if count == int32(0):
            return int32(0)
        start = columns_at(n)
        values_at = int32(start + padded(count))
        nbytes = int32(values_at + int32(count * int32(word)))
        if nbytes >= raw_bytes:
            return int32(-1)
        rows = int32((n + int32(255)) >> int32(LOG_ROW))
        zero_bytes(dst, int32(rows << int32(1)), start)
        zero_bytes(dst, int32(start + count), values_at)
        write_columns(masks, n, dst, start, before)
        pack(x, n, masks, as_words(advance(dst, values_at)), before)
        cuda.syncthreads()
        return nbytes

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        fill(x, n, 0)
        if nbytes == int32(0):
            return int32(0)
        start = columns_at(n)
        if nbytes < start:
            return int32(-1)
        ends, rows = as_u16(src), int32((n + int32(255)) >> int32(LOG_ROW))
        count = int32(ends[int32(rows - int32(1))])
        values_at = int32(start + padded(count))
        if count == int32(0) or nbytes != int32(values_at + int32(count * int32(word))):
            return int32(-1)
        values, wrong, row = as_words(advance(src, values_at)), int32(0), warp_id()
        while row < rows:
            low, high = int32(0), int32(ends[row])
            if row > int32(0):
                low = int32(ends[int32(row - int32(1))])
            base = int32(row << int32(LOG_ROW))
            if low > high or high > count:
                wrong, low, high = int32(1), int32(0), int32(0)
            k = int32(low + lane_id())
            while k < high:
                column, before = int32(src[int32(start + k)]), int32(-1)
                if k > low:
                    before = int32(src[int32(int32(start + k) - int32(1))])
                if column > before and int32(base + column) < n:
                    x[int32(base + column)] = values[k]
                else:
                    wrong = int32(1)
                k = int32(k + int32(32))
            row = int32(row + n_warps())
        if cuda.syncthreads_or(wrong):
            return int32(-1)
        return int32(0)

    return *in_one_step(encode), decode
