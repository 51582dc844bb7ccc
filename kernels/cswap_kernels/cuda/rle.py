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


@cuda.jit(device=True)
def starts_of(x, group, n):
    """Whether runs start at this lane's two words of a group, and the two masks of that (u32)."""
    i = int32(int32(int32(group) << int32(6)) + lane_id())
    lower, upper = starts_run(x, i, n), starts_run(x, int32(i + int32(32)), n)
    return lower, upper, ballot(lower), ballot(upper)


@cuda.jit(device=True)
def count_starts(x, n, present, begin, end):
    """This warp's runs, and its masks above bit 16; of each mask a bit in ``present``."""
    counts = int32(0)
    for group in range(begin, end):
        _, _, low, high = starts_of(x, group, n)
        counts = int32(counts + int32(int32(cuda.popc(low)) + int32(cuda.popc(high))))
        if uint32(low | high) != uint32(0):
            counts = int32(counts + int32(1 << 16))
            if lane_id() == int32(0):
                bit = uint32(uint32(1) << uint32(int32(group) & int32(31)))
                atomic_add(present, int32(int32(group) >> int32(5)), bit)
    return counts


@cuda.jit(device=True)
def put_padding(words, n_masks, at):
    """Zeros between the masks and the first value, which is at byte ``at``, if there is room."""
    if int32(cuda.threadIdx.x) < int32(2):
        pad = int32(int32(MASKS_AT >> 2) + int32(n_masks << int32(1)))
        if int32(pad << int32(2)) < at:
            words[int32(pad + int32(cuda.threadIdx.x))] = uint32(0)


@cuda.jit(device=True)
def put_mask(words, mask_at, low, high):
    """Write the mask number ``mask_at``."""
    if lane_id() == int32(0):
        place = int32(int32(MASKS_AT >> 2) + int32(mask_at << int32(1)))
        words[place], words[int32(place + int32(1))] = low, high


@cuda.jit(device=True)
def put_runs(x, n, words, values, begin, end, before):
    """Masks and values of this warp's groups. before: runs and masks of the warps before it."""
    run, mask_at = int32(before & int32(0xFFFF)), int32(before >> int32(16))
    for group in range(begin, end):
        i = int32(int32(int32(group) << int32(6)) + lane_id())
        lower, upper, low, high = starts_of(x, group, n)
        if uint32(low | high) != uint32(0):
            put_mask(words, mask_at, low, high)
            mask_at = int32(mask_at + int32(1))
        if lower:
            values[int32(run + before_lane(low))] = x[i]
        run = int32(run + int32(cuda.popc(low)))
        if upper:
            values[int32(run + before_lane(high))] = x[int32(i + int32(32))]
        run = int32(run + int32(cuda.popc(high)))


@cuda.jit(device=True)
def is_damaged(src, n):
    """1 if a mask that this thread sees is empty or has words from n on, or no run is at word 0."""
    words, wrong, group = as_u32(src), int32(0), int32(cuda.threadIdx.x)
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
    return wrong


@cuda.jit(device=True)
def count_runs(src, begin, end):
    """Runs that start in this warp's groups."""
    runs = int32(0)
    for group in range(begin, end):
        for half in range(2):
            mask = half_mask(src, int32(group), int32(half))
            runs = int32(runs + int32(cuda.popc(mask)))
    return runs


@cuda.jit(device=True)
def get_words(src, values, x, n, begin, end, before):
    """The words of this warp's groups. before: runs that start in the groups before them."""
    lane = lane_id()
    for group in range(begin, end):
        for half in range(2):
            mask = half_mask(src, int32(group), int32(half))
            i = int32(int32(int32(int32(group) << int32(6)) + int32(32 * half)) + lane)
            own = int32(uint32(mask >> uint32(lane)) & uint32(1))
            rank = int32(before + int32(before_lane(mask) + own))
            if i < n:
                x[i] = values[int32(rank - int32(1))]
            before = int32(before + int32(cuda.popc(mask)))


@cuda.jit(device=True)
def of_warps_before(value, tmp):
    """(sum over the warps before this one, over all) of an i32 that is equal in a warp."""
    before, total = block_exclusive(value if lane_id() == int32(0) else int32(0), tmp)
    return int32(cuda.shfl_sync(0xFFFFFFFF, before, 0)), total


def rle_tile(word, as_words):
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py."""

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        present = as_u32(dst)
        if int32(cuda.threadIdx.x) < int32(4):
            present[int32(cuda.threadIdx.x)] = uint32(0)
        cuda.syncthreads()
        begin, end = groups_of_warp(n)
        before, total = of_warps_before(count_starts(x, n, present, begin, end), tmp)
        n_runs, n_masks = int32(total & int32(0xFFFF)), int32(total >> int32(16))
        at = values_at(n_masks)
        nbytes = int32(at + int32(n_runs * int32(word)))
        if n_runs == int32(1) and x[int32(0)] == 0:
            return int32(0)
        if nbytes >= int32(n * int32(word)):
            return int32(-1)
        words, values = as_u32(dst), as_words(advance(dst, at))
        put_padding(words, n_masks, at)
        put_runs(x, n, words, values, begin, end, before)
        cuda.syncthreads()
        return nbytes

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        if nbytes == int32(0):
            fill(x, n, 0)
            return int32(0)
        if nbytes < int32(MASKS_AT + 8):
            return int32(-1)
        at = values_at(masks_before(as_u32(src), int32(128)))
        if nbytes < at:
            return int32(-1)
        if cuda.syncthreads_or(is_damaged(src, n)):
            return int32(-1)
        begin, end = groups_of_warp(n)
        before, n_runs = of_warps_before(count_runs(src, begin, end), tmp)
        if nbytes != int32(at + int32(n_runs * int32(word))):
            return int32(-1)
        get_words(src, as_words(advance(src, at)), x, n, begin, end, before)
        cuda.syncthreads()
        return int32(0)

    return *in_one_step(encode), decode
