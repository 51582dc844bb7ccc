"""``rle`` on CUDA: the format of cswap_kernels/rle.py, a warp per group of 64 words."""

from __future__ import annotations

from numba import cuda, int32, uint32

from cswap_kernels.cuda.container import in_one_step
from cswap_kernels.cuda.primitives import advance, as_u32, atomic_add
from cswap_kernels.cuda.warps import (
    ballot,
    before_lane,
    block_exclusive,
    fill,
    lane_id,
    padded,
    share_of_warp,
)

MASKS_AT = 16
"""Byte behind the 128 bits that say which groups have a mask."""


@cuda.jit(device=True)
def groups_of_warp(n):
    """(first, after the last) group of 64 words that this warp deals with."""
    return share_of_warp(int32((n + int32(63)) >> int32(6)))


@cuda.jit(device=True)
def values_at(n_masks):
    """Byte of the first value."""
    return padded(int32(int32(MASKS_AT) + int32(n_masks << int32(3))))


@cuda.jit(device=True)
def starts_run(x, i, n):
    """Whether a run starts at word i; false from n on."""
    if i >= n:
        return False
    return i == int32(0) or x[i] != x[int32(max(i, int32(1)) - int32(1))]


@cuda.jit(device=True)
def masks_before(present, group):
    """How many groups before this one have a mask; present: 4 u32."""
    count = int32(0)
    for k in range(4):
        rest = int32(min(int32(max(int32(group - int32(32 * k)), int32(0))), int32(32)))
        bits = uint32(present[int32(k)])
        if rest < int32(32):
            bits = uint32(bits & uint32(uint32(uint32(1) << uint32(rest)) - uint32(1)))
        count = int32(count + int32(cuda.popc(bits)))
    return count


@cuda.jit(device=True)
def half_mask(src, group, half):
    """u32: one half of a group's mask; 0 if it has none."""
    words = as_u32(src)
    bit = uint32(uint32(words[int32(group >> int32(5))]) >> uint32(group & int32(31)))
    if uint32(bit & uint32(1)) == uint32(0):
        return uint32(0)
    at = int32(int32(MASKS_AT >> 2) + int32(masks_before(words, group) << int32(1)))
    return uint32(words[int32(at + half)])


@cuda.jit(device=True)
def from_lane(mask, lane):
    """The bits of a mask from a lane on; all of them from a lane below 0 on."""
    if lane >= int32(32):
        return uint32(0)
    return uint32(mask >> uint32(max(lane, int32(0))))


def rle_tile(word, as_words):
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py."""

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        present, lane = as_u32(dst), lane_id()
        if int32(cuda.threadIdx.x) < int32(4):
            present[int32(cuda.threadIdx.x)] = uint32(0)
        cuda.syncthreads()
        begin, end = groups_of_warp(n)
        counts = int32(0)  # runs, and masks above bit 16
        for group in range(begin, end):
            i = int32(int32(int32(group) << int32(6)) + lane)
            low = ballot(starts_run(x, i, n))
            high = ballot(starts_run(x, int32(i + int32(32)), n))
            counts = int32(counts + int32(int32(cuda.popc(low)) + int32(cuda.popc(high))))
            if uint32(low | high) != uint32(0):
                counts = int32(counts + int32(1 << 16))
                if lane == int32(0):
                    bit = uint32(uint32(1) << uint32(int32(group) & int32(31)))
                    atomic_add(present, int32(int32(group) >> int32(5)), bit)
        before, total = block_exclusive(counts if lane == int32(0) else int32(0), tmp)
        before = int32(cuda.shfl_sync(0xFFFFFFFF, before, 0))
        n_runs, n_masks = int32(total & int32(0xFFFF)), int32(total >> int32(16))
        at = values_at(n_masks)
        nbytes = int32(at + int32(n_runs * int32(word)))
        if n_runs == int32(1) and x[int32(0)] == 0:
            return int32(0)
        if nbytes >= int32(n * int32(word)):
            return int32(-1)
        words, values = as_u32(dst), as_words(advance(dst, at))
        if int32(cuda.threadIdx.x) < int32(2):  # the padding, if there is any
            pad = int32(int32(MASKS_AT >> 2) + int32(n_masks << int32(1)))
            if int32(pad << int32(2)) < at:
                words[int32(pad + int32(cuda.threadIdx.x))] = uint32(0)
        run, mask_at = int32(before & int32(0xFFFF)), int32(before >> int32(16))
        for group in range(begin, end):
            i = int32(int32(int32(group) << int32(6)) + lane)
            upper = int32(i + int32(32))
            starts, starts_upper = starts_run(x, i, n), starts_run(x, upper, n)
            low, high = ballot(starts), ballot(starts_upper)
            if uint32(low | high) != uint32(0):
                if lane == int32(0):
                    place = int32(int32(MASKS_AT >> 2) + int32(mask_at << int32(1)))
                    words[place], words[int32(place + int32(1))] = low, high
                mask_at = int32(mask_at + int32(1))
            if starts:
                values[int32(run + before_lane(low))] = x[i]
            run = int32(run + int32(cuda.popc(low)))
            if starts_upper:
                values[int32(run + before_lane(high))] = x[upper]
            run = int32(run + int32(cuda.popc(high)))
        cuda.syncthreads()
        return nbytes

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        if nbytes == int32(0):
            fill(x, n, 0)
            return int32(0)
        if nbytes < int32(MASKS_AT + 8):
            return int32(-1)
        words, lane = as_u32(src), lane_id()
        n_masks = masks_before(words, int32(128))
        at = values_at(n_masks)
        if nbytes < at:
            return int32(-1)
        wrong, group = int32(0), int32(cuda.threadIdx.x)
        while group < int32(128):
            bit = uint32(uint32(words[int32(group >> int32(5))]) >> uint32(group & int32(31)))
            if uint32(bit & uint32(1)) != uint32(0):
                low, high = half_mask(src, group, int32(0)), half_mask(src, group, int32(1))
                lanes = int32(n - int32(group << int32(6)))
                behind = uint32(from_lane(low, lanes) | from_lane(high, int32(lanes - int32(32))))
                if uint32(low | high) == uint32(0) or behind != uint32(0):
                    wrong = int32(1)
            group = int32(group + int32(cuda.blockDim.x))
        if uint32(half_mask(src, int32(0), int32(0)) & uint32(1)) == uint32(0):
            wrong = int32(1)
        if cuda.syncthreads_or(wrong):
            return int32(-1)
        begin, end = groups_of_warp(n)
        runs = int32(0)
        for group in range(begin, end):
            for half in range(2):
                mask = half_mask(src, int32(group), int32(half))
                runs = int32(runs + int32(cuda.popc(mask)))
        before, n_runs = block_exclusive(runs if lane == int32(0) else int32(0), tmp)
        before = int32(cuda.shfl_sync(0xFFFFFFFF, before, 0))
        if nbytes != int32(at + int32(n_runs * int32(word))):
            return int32(-1)
        values = as_words(advance(src, at))
        for group in range(begin, end):
            for half in range(2):
                mask = half_mask(src, int32(group), int32(half))
                i = int32(int32(int32(int32(group) << int32(6)) + int32(32 * half)) + lane)
                own = int32(uint32(mask >> uint32(lane)) & uint32(1))
                rank = int32(before + int32(before_lane(mask) + own))
                if i < n:
                    x[i] = values[int32(rank - int32(1))]
                before = int32(before + int32(cuda.popc(mask)))
        cuda.syncthreads()
        return int32(0)

    return *in_one_step(encode), decode
