"""Operations of the threads of a warp or block together: sums, extremes, places in an order.

Integers: a bare Python int makes an operation 64 bits wide, at twice the instructions, so every
device function wraps its results in ``int32(...)`` or ``uint32(...)``.

``tmp`` is shared memory, [TMP_WORDS] u32, of which the functions here use the last `ROOM` words.
They end with a ``syncthreads``, so that tmp may be used again at once.
"""

from __future__ import annotations

from typing import Any, Final

from numba import cuda, int32, uint8, uint16, uint32, uint64

from cswap_kernels.cuda.primitives import (
    FULL,
    advance,
    architecture,
    redux_add,
    redux_max,
    redux_max_u32,
    redux_min,
    signed,
    unsigned,
)

MASK_WORDS: Final = 256
"""u32 at the start of tmp, for tile functions: a bit per word of the largest tile."""

THREES: Final = 96
"""u32 of `three_of_warps`: three for each of up to 32 warps."""

ROOM: Final = 64
"""u32 behind them, for this module."""

TMP_WORDS: Final = MASK_WORDS + ROOM

WORD_TYPES: Final[dict[int, Any]] = {1: uint8, 2: uint16, 4: uint32, 8: uint64}
"""The type of words of so many bytes."""

REDUX: Final = 800
"""The first architecture that reduces over a warp by one instruction."""


@cuda.jit(device=True)
def lane_id():
    """Index of this thread in its warp."""
    return int32(int32(cuda.threadIdx.x) & int32(31))


@cuda.jit(device=True)
def warp_id():
    """Index of this thread's warp in its block."""
    return int32(int32(cuda.threadIdx.x) >> int32(5))


@cuda.jit(device=True)
def n_warps():
    """Warps of a block: 1, 2, 4, ... 32."""
    return int32(int32(cuda.blockDim.x) >> int32(5))


@cuda.jit(device=True)
def log_warps():
    """Binary logarithm of `n_warps`: to divide by it."""
    return int32(int32(31) - int32(cuda.clz(n_warps())))


@cuda.jit(device=True)
def ballot(predicate):
    """u32: bit i is set if the predicate holds in lane i. The whole warp calls it."""
    return uint32(cuda.ballot_sync(FULL, predicate))


@cuda.jit(device=True)
def before_lane(mask):
    """How many of the lanes before this one are set in the mask."""
    below = uint32((uint32(1) << uint32(lane_id())) - uint32(1))
    return int32(cuda.popc(uint32(mask & below)))


@cuda.jit(device=True)
def from_lane(value, lane):
    """The i32 of one lane, in every lane."""
    return int32(cuda.shfl_sync(FULL, value, lane))


@cuda.jit(device=True)
def warp_inclusive(value):
    """Sum of an i32 over the lanes up to and including this one."""
    lane = lane_id()
    for k in range(5):
        step = int32(1 << k)
        other = int32(cuda.shfl_up_sync(FULL, value, step))
        if lane >= step:
            value = int32(value + other)
    return value


@cuda.jit(device=True)
def warp_sum(value):
    """Sum of an i32 over the lanes, in every lane."""
    if architecture() >= REDUX:
        return redux_add(value)
    for k in range(5):
        value = int32(value + int32(cuda.shfl_xor_sync(FULL, value, int32(16 >> k))))
    return value


@cuda.jit(device=True)
def warp_min(value):
    """Smallest i32 of the lanes, in every lane."""
    if architecture() >= REDUX:
        return redux_min(value)
    for k in range(5):
        value = int32(min(value, int32(cuda.shfl_xor_sync(FULL, value, int32(16 >> k)))))
    return value


@cuda.jit(device=True)
def warp_max(value):
    """Largest i32 of the lanes, in every lane."""
    if architecture() >= REDUX:
        return redux_max(value)
    for k in range(5):
        value = int32(max(value, int32(cuda.shfl_xor_sync(FULL, value, int32(16 >> k)))))
    return value


@cuda.jit(device=True)
def warp_max_u32(value):
    """Largest u32 of the lanes, in every lane."""
    if architecture() >= REDUX:
        return redux_max_u32(value)
    for k in range(5):
        other = unsigned(int32(cuda.shfl_xor_sync(FULL, signed(value), int32(16 >> k))))
        value = uint32(max(value, other))
    return value


@cuda.jit(device=True)
def of_warps(value, tmp, slot):
    """An i32 of every warp (the same in all its lanes), lane k having warp k's; 0 from n_warps on.

    ``slot`` (0 or 1) is the half of the room in tmp that is used. No syncthreads behind it.
    """
    room = advance(tmp, int32(MASK_WORDS + 32 * slot))
    lane = lane_id()
    if lane == int32(0):
        room[warp_id()] = unsigned(value)
    cuda.syncthreads()
    return signed(uint32(room[lane])) if lane < n_warps() else int32(0)


@cuda.jit(device=True)
def warps_exclusive(value, tmp):
    """(sum over the warps before this one, sum over all) of an i32 that is equal in a warp."""
    parts = of_warps(value, tmp, 0)
    total = warp_sum(parts)
    before = warp_sum(parts if lane_id() < warp_id() else int32(0))
    cuda.syncthreads()
    return before, total


@cuda.jit(device=True)
def block_exclusive(value, tmp):
    """(sum of an i32 over the threads before this one, sum over all)."""
    inclusive = warp_inclusive(value)
    before, total = warps_exclusive(from_lane(inclusive, 31), tmp)
    return int32(before + inclusive - value), total


@cuda.jit(device=True)
def three_of_warps(a, b, c, tmp):
    """`of_warps` of three i32, which takes the first `THREES` words of tmp."""
    at, lane = int32(warp_id() * int32(3)), lane_id()
    if lane == int32(0):
        tmp[at], tmp[int32(at + int32(1))] = unsigned(a), unsigned(b)
        tmp[int32(at + int32(2))] = unsigned(c)
    cuda.syncthreads()
    a = b = c = int32(0)
    if lane < n_warps():
        at = int32(lane * int32(3))
        a, b = signed(uint32(tmp[at])), signed(uint32(tmp[int32(at + int32(1))]))
        c = signed(uint32(tmp[int32(at + int32(2))]))
    return a, b, c


@cuda.jit(device=True)
def block_sums(a, b, c, tmp):
    """Sums of three i32 over the threads of a block, in every thread; tmp: `three_of_warps`."""
    first, second, third = three_of_warps(warp_sum(a), warp_sum(b), warp_sum(c), tmp)
    first, second, third = warp_sum(first), warp_sum(second), warp_sum(third)
    cuda.syncthreads()
    return first, second, third


@cuda.jit(device=True)
def block_sum(value, tmp):
    """Sum of an i32 over the threads of a block, in every thread."""
    total = warp_sum(of_warps(warp_sum(value), tmp, 0))
    cuda.syncthreads()
    return total


@cuda.jit(device=True)
def block_max(value, tmp):
    """Largest i32 (from 0 on) of the threads of a block, in every thread."""
    largest = warp_max(of_warps(warp_max(value), tmp, 0))
    cuda.syncthreads()
    return largest


@cuda.jit(device=True)
def share_of_warp(groups):
    """(first, after the last) of so many groups: each warp takes as many, in order."""
    each = int32((groups + n_warps() - int32(1)) >> log_warps())
    first = min(int32(warp_id() * each), groups)
    return first, min(int32(first + each), groups)


@cuda.jit(device=True)
def fill(x, n, value):
    """Set n words of x. Ends with a syncthreads."""
    i = int32(cuda.threadIdx.x)
    while i < n:
        x[i] = value
        i = int32(i + int32(cuda.blockDim.x))
    cuda.syncthreads()


@cuda.jit(device=True)
def zero_bytes(dst, first, last):
    """Zero dst[first:last], fewer bytes than a block has threads."""
    i = int32(first + int32(cuda.threadIdx.x))
    if i < last:
        dst[i] = uint8(0)


@cuda.jit(device=True)
def padded(nbytes):
    """The next multiple of 16."""
    return int32((nbytes + int32(15)) & int32(-16))
