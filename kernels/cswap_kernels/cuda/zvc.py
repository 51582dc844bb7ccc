"""``zvc`` on CUDA: the format of cswap_kernels/zvc.py, a block per tile.

    mask bit i = (word i != 0)        packed[survivors before i] = word i, where bit i is set

Words are looked at in *groups* of 32, one per lane. A warp takes consecutive groups, a multiple of
4: so many fill 16 bytes of bitmask. It deals with 32 groups at a time; lane k keeps the mask of
the k-th, and so the warp knows by one prefix sum where the survivors of each begin.
"""

from __future__ import annotations

from numba import cuda, int32, uint32

from cswap_kernels.cuda.primitives import advance, as_u32, signed, unsigned
from cswap_kernels.cuda.warps import (
    WORD_TYPES,
    ballot,
    fill,
    from_lane,
    lane_id,
    log_warps,
    n_warps,
    warp_id,
    warp_inclusive,
    warp_sum,
    warps_exclusive,
)


@cuda.jit(device=True)
def mask_bytes(n):
    """Bytes of the bitmask of n words, padded to 16."""
    return int32(((n + int32(127)) >> int32(7)) << int32(4))


@cuda.jit(device=True)
def groups_of_warp(n):
    """(first, after the last) group that this warp deals with, of n words: multiples of 4."""
    fours = int32((n + int32(127)) >> int32(7))
    each = int32(int32(int32(fours + n_warps()) - int32(1)) >> log_warps())
    first = min(int32(warp_id() * each), fours)
    last = min(int32(first + each), fours)
    return int32(first << int32(2)), int32(last << int32(2))


@cuda.jit(device=True)
def zero_rest(x, n):
    """Let the words from n on be zero, up to a multiple of 128. Ends with a syncthreads."""
    if n & int32(127):
        i = int32(n + int32(cuda.threadIdx.x))
        while i < int32((n + int32(127)) & int32(-128)):
            x[i] = 0
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()


@cuda.jit(device=True)
def four_masks(row):
    """Of four groups, the mask of the one whose number is the lane's modulo 4."""
    a, b = ballot(row[0] != 0), ballot(row[32] != 0)
    c, d = ballot(row[64] != 0), ballot(row[96] != 0)
    lane = lane_id()
    low = b if lane & int32(1) else a
    high = d if lane & int32(1) else c
    return high if lane & int32(2) else low


@cuda.jit(device=True)
def write_mask(x, n, masks, tmp):
    """Write the bitmask of x [n] to masks (u32); (survivors before this warp's words, of all)."""
    zero_rest(x, n)
    lane = lane_id()
    first, last = groups_of_warp(n)
    count = int32(0)
    while first < last:
        mine, k = uint32(0), int32(0)
        several = min(int32(32), int32(last - first))
        row = advance(x, int32(int32(first << int32(5)) + lane))
        while k < several:
            four = four_masks(row)
            if int32(lane & int32(28)) == k:
                mine = four
            row, k = advance(row, 128), int32(k + int32(4))
        if lane < several:
            masks[int32(first + lane)] = mine
        count = int32(count + int32(cuda.popc(mine)))
        first = int32(first + int32(32))
    return warps_exclusive(warp_sum(count), tmp)


@cuda.jit(device=True)
def masks_of_lanes(masks, first, last, at):
    """(mask of this lane's group, survivors before it, survivors up to the last lane's)."""
    lane, mine = lane_id(), uint32(0)
    if lane < int32(last - first):
        mine = uint32(masks[int32(first + lane)])
    count = int32(cuda.popc(mine))
    inclusive = warp_inclusive(count)
    return mine, int32(at + int32(inclusive - count)), int32(at + from_lane(inclusive, 31))


@cuda.jit(device=True)
def pack(x, n, masks, out, at):
    """Pack the words that are not zero into out; this warp's from index ``at`` on.

    As `write_mask` left x and masks.
    """
    lane = lane_id()
    below = uint32((uint32(1) << uint32(lane)) - uint32(1))
    first, last = groups_of_warp(n)
    while first < last:
        mine, before, at = masks_of_lanes(masks, first, last, at)
        row = advance(x, int32(int32(first << int32(5)) + lane))
        k, several = int32(0), min(int32(32), int32(last - first))
        while k < several:
            for j in range(4):
                mask = unsigned(from_lane(signed(mine), int32(k + int32(j))))
                base = from_lane(before, int32(k + int32(j)))
                word = row[32 * j]
                if word != 0:
                    out[int32(base + int32(cuda.popc(uint32(mask & below))))] = word
            row, k = advance(row, 128), int32(k + int32(4))
        first = int32(first + int32(32))


@cuda.jit(device=True)
def read_mask(masks, n, tmp):
    """(survivors before this warp's words, of all) by a bitmask; -1 of all if it is none of n."""
    first, last = groups_of_warp(n)
    lane = lane_id()
    count, wrong = int32(0), int32(0)
    group = int32(first + lane)
    while group < last:
        count = int32(count + int32(cuda.popc(uint32(masks[group]))))
        group = int32(group + int32(32))
    if n & int32(127):  # there are bits behind the n-th
        group = int32(int32(n >> int32(5)) + int32(cuda.threadIdx.x))
        if group < int32(mask_bytes(n) >> int32(2)):
            rest = max(int32(0), int32(n - int32(group << int32(5))))
            if rest < int32(32) and (uint32(masks[group]) >> uint32(rest)) != uint32(0):
                wrong = int32(1)
        wrong = int32(cuda.syncthreads_or(wrong))
    before, total = warps_exclusive(warp_sum(count), tmp)
    return before, int32(-1) if wrong else total


@cuda.jit(device=True)
def unpack(masks, survivors, at, x, n, zero):
    """Inverse of `pack`: every word of x [n] is written, and some behind them.

    ``zero`` is that of the words' type.
    """
    lane = lane_id()
    own = uint32(uint32(1) << uint32(lane))
    below = uint32(own - uint32(1))
    first, last = groups_of_warp(n)
    while first < last:
        mine, before, at = masks_of_lanes(masks, first, last, at)
        row = advance(x, int32(int32(first << int32(5)) + lane))
        k, several = int32(0), min(int32(32), int32(last - first))
        while k < several:
            for j in range(4):
                mask = unsigned(from_lane(signed(mine), int32(k + int32(j))))
                base = from_lane(before, int32(k + int32(j)))
                word = zero
                if uint32(mask & own) != uint32(0):
                    word = survivors[int32(base + int32(cuda.popc(uint32(mask & below))))]
                row[32 * j] = word
            row, k = advance(row, 128), int32(k + int32(4))
        first = int32(first + int32(32))


def zvc_tile(word, as_words):
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py."""
    zero = WORD_TYPES[word](0)

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        before, count = write_mask(x, n, as_u32(dst), tmp)
        nbytes = int32(mask_bytes(n) + int32(count * int32(word)))
        if count == int32(0):
            nbytes = int32(0)
        return nbytes, (before,)

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        pack(x, n, as_u32(dst), as_words(advance(dst, mask_bytes(n))), state[0])

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        start = mask_bytes(n)
        if nbytes == int32(0):
            fill(x, n, 0)
            return int32(0)
        if nbytes < start:
            return int32(-1)
        before, count = read_mask(as_u32(src), n, tmp)
        if count <= int32(0) or nbytes != int32(start + int32(count * int32(word))):
            return int32(-1)
        unpack(as_u32(src), as_words(advance(src, start)), before, x, n, zero)
        cuda.syncthreads()
        return int32(0)

    return measure, write, decode
