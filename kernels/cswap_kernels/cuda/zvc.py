"""``zvc`` on CUDA: the format of cswap_kernels/zvc.py, a block per tile."""

from __future__ import annotations

from numba import cuda, int32, uint32

from cswap_kernels.cuda.primitives import (
    advance,
    as_u32,
    ballot,
    block_exclusive,
    fill,
    lane_id,
    share_of_warp,
)


@cuda.jit(device=True)
def mask_bytes(n):
    """Bytes of the bitmask of n words, padded to 16."""
    return int32(((n + int32(127)) >> int32(7)) << int32(4))


@cuda.jit(device=True)
def groups_of_warp(n):
    """(first, after the last) group of 32 words that this warp deals with, of n words."""
    return share_of_warp(int32((n + int32(31)) >> int32(5)))


@cuda.jit(device=True)
def write_mask(x, n, masks, tmp):
    """Write the bitmask of x [n] to masks (u32); (survivors before this warp's words, of all)."""
    lane = lane_id()
    first, last = groups_of_warp(n)
    count = int32(0)
    for group in range(first, last):
        i = int32((int32(group) << int32(5)) + lane)
        mask = ballot(i < n and x[i] != 0)
        if lane == int32(0):
            masks[int32(group)] = mask
        count = int32(count + int32(cuda.popc(mask)))
    # The padding too is the same every time.
    group = int32(((n + int32(31)) >> int32(5)) + int32(cuda.threadIdx.x))
    if group < int32(mask_bytes(n) >> int32(2)):
        masks[group] = uint32(0)
    return block_exclusive(count if lane == int32(0) else int32(0), tmp)


@cuda.jit(device=True)
def before_lane(mask):
    """How many of the lanes before this one are set in the mask."""
    below = uint32((uint32(1) << uint32(lane_id())) - uint32(1))
    return int32(cuda.popc(uint32(mask & below)))


@cuda.jit(device=True)
def pack(x, n, masks, out, at):
    """Pack the words that the bitmask chooses into out; this warp's from index ``at`` on."""
    lane = lane_id()
    at = int32(cuda.shfl_sync(0xFFFFFFFF, at, 0))
    first, last = groups_of_warp(n)
    for group in range(first, last):
        mask = uint32(masks[int32(group)])
        if (mask >> uint32(lane)) & uint32(1):
            out[int32(at + before_lane(mask))] = x[int32((int32(group) << int32(5)) + lane)]
        at = int32(at + int32(cuda.popc(mask)))


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
    group = int32((n >> int32(5)) + int32(cuda.threadIdx.x))
    if group < int32(mask_bytes(n) >> int32(2)):
        rest = max(int32(0), int32(n - int32(group << int32(5))))
        if rest < int32(32) and (uint32(masks[group]) >> uint32(rest)) != uint32(0):
            wrong = int32(1)
    before, total = block_exclusive(count, tmp)
    before = int32(cuda.shfl_sync(0xFFFFFFFF, before, 0))
    if cuda.syncthreads_or(wrong):
        total = int32(-1)
    return before, total


@cuda.jit(device=True)
def unpack(masks, survivors, at, x, n):
    """Inverse of `pack`: every word of x [n] is written."""
    lane = lane_id()
    first, last = groups_of_warp(n)
    for group in range(first, last):
        mask = uint32(masks[int32(group)])
        i = int32((int32(group) << int32(5)) + lane)
        if i < n:
            if (mask >> uint32(lane)) & uint32(1):
                x[i] = survivors[int32(at + before_lane(mask))]
            else:
                x[i] = 0
        at = int32(at + int32(cuda.popc(mask)))


def zvc_tile(word, as_words):
    """(encode_tile, decode_tile) for words of ``word`` bytes; contract: container.py."""

    @cuda.jit(device=True)
    def encode(x, n, dst, tmp, a0, a1, a2, a3, first):
        masks = as_u32(dst)
        before, count = write_mask(x, n, masks, tmp)
        start = mask_bytes(n)
        nbytes = int32(start + int32(count * int32(word)))
        if count == int32(0):
            return int32(0)
        if nbytes >= int32(n * int32(word)):
            return int32(-1)
        pack(x, n, masks, as_words(advance(dst, start)), before)
        cuda.syncthreads()
        return nbytes

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
        unpack(as_u32(src), as_words(advance(src, start)), before, x, n)
        cuda.syncthreads()
        return int32(0)

    return encode, decode
