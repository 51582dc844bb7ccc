"""Bit planes on CUDA: fields of a few bits per word, as cswap_kernels/planes.py spreads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int32, uint8, uint32

from cswap_kernels.cuda.primitives import as_u32
from cswap_kernels.cuda.warps import ballot, lane_id, n_warps, padded, warp_id, zero_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


@cuda.jit(device=True)
def whole_groups(n):
    """The next multiple of 64."""
    return int32((n + int32(63)) & int32(-64))


@cuda.jit(device=True)
def parts_bytes(n, bits):
    """Bytes of the parts of a field of ``bits`` (0 to 7) bits of n words."""
    m, total = whole_groups(n), int32(0)
    if bits & int32(4):
        total = int32(total + padded(int32(m >> int32(1))))
    if bits & int32(2):
        total = int32(total + padded(int32(m >> int32(2))))
    if bits & int32(1):
        total = int32(total + padded(int32(m >> int32(3))))
    return total


def parts_writer(field: Callable[..., Any]) -> Any:
    """A device function put(x, n, p, bits, dst, at) -> byte behind, for fields of the words x.

    field(x, i, n, p) -> u32 is the field of word i, 0 from n on; p is handed on. Its low ``bits``
    (0 to 7) bits are packed. No syncthreads.
    """

    @cuda.jit(device=True)
    def put(x, n, p, bits, dst, at):
        m, shift, width = whole_groups(n), uint32(0), int32(4)
        while width > int32(1):  # `field` is inlined: one loop for parts of 4 and of 2 bits
            if bits & width:
                log = int32(1) if width == int32(4) else int32(2)
                q, j = int32(m >> log), int32(cuda.threadIdx.x)
                mask = uint32(uint32(uint32(1) << uint32(width)) - uint32(1))
                while j < q:
                    byte, i, up = uint32(0), j, uint32(0)
                    while i < m:
                        bits_here = uint32(uint32(field(x, i, n, p) >> shift) & mask)
                        byte = uint32(byte | uint32(bits_here << up))
                        i, up = int32(i + q), uint32(up + uint32(width))
                    dst[int32(at + j)] = uint8(byte)
                    j = int32(j + int32(cuda.blockDim.x))
                zero_bytes(dst, int32(at + q), int32(at + padded(q)))
                at, shift = int32(at + padded(q)), uint32(shift + uint32(width))
            width = int32(width >> int32(1))
        if bits & int32(1):
            q, group = int32(m >> int32(3)), warp_id()
            masks, first = as_u32(dst), int32(at >> int32(2))
            while group < int32(m >> int32(5)):
                i = int32(int32(group << int32(5)) + lane_id())
                mask = ballot(uint32(uint32(field(x, i, n, p) >> shift) & uint32(1)) != uint32(0))
                if lane_id() == int32(0):
                    masks[int32(first + group)] = mask
                group = int32(group + n_warps())
            zero_bytes(dst, int32(at + q), int32(at + padded(q)))
            at = int32(at + padded(q))
        return at

    return put


@cuda.jit(device=True)
def get_parts(src, at, bits, i, n):
    """The field (u32) of word i that `parts_writer` packed from byte ``at`` on."""
    m, value, shift = whole_groups(n), uint32(0), uint32(0)
    if bits & int32(4):
        q = int32(m >> int32(1))
        if i < q:
            value = uint32(uint32(src[int32(at + i)]) & uint32(15))
        else:
            value = uint32(uint32(src[int32(at + int32(i - q))]) >> uint32(4))
        at, shift = int32(at + padded(q)), uint32(4)
    if bits & int32(2):
        q, j, up = int32(m >> int32(2)), i, uint32(0)
        for _ in range(3):
            if j >= q:
                j, up = int32(j - q), uint32(up + uint32(2))
        two = uint32(uint32(uint32(src[int32(at + j)]) >> up) & uint32(3))
        value = uint32(value | uint32(two << shift))
        at, shift = int32(at + padded(q)), uint32(shift + uint32(2))
    if bits & int32(1):
        byte = uint32(src[int32(at + int32(i >> int32(3)))])
        one = uint32(uint32(byte >> uint32(i & int32(7))) & uint32(1))
        value = uint32(value | uint32(one << shift))
    return value
