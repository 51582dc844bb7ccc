"""``zfp``: the reference of zfp's one-dimensional fixed-rate streams. See docs/format/zfp.md.

The reference is slow and obvious. On the CPU, the ``zfpy`` package does the work
(cswap/codecs/zfp.py). Tests compare a twin on another device with this reference, byte by byte.

Source: Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays", IEEE TVCG 20(12), 2014, and the
code of zfp 1.0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK: Final = 4
"""Values of a block."""

EXPONENT_BITS: Final = {4: 8, 8: 11}
"""Exponent bits by bytes of a value. A block starts with one bit more."""

SMALLEST: Final = {4: 2.0**-96, 8: 2.0**-960}
"""Smaller magnitudes become 0, by bytes of a value: zfp divides a block by its largest magnitude,
times 2**30 or 2**62, and the inverse of that must not overflow."""

LARGEST: Final = {4: 2.0**126, 8: 2.0**1022}
"""A tensor with a magnitude from here on is stored raw: decoding may overshoot."""


def block_bits(rate: int, itemsize: int) -> int:
    """Bits per block at ``rate`` bits per value; no less than its exponent needs."""
    return max(BLOCK * rate, 1 + EXPONENT_BITS[itemsize])


def stream_bytes(n: int, bits: int) -> int:
    """Bytes of the stream of n values, in whole words of 64 bits."""
    return -(-(-(-n // BLOCK) * bits) // 64) * 8


def zfp_encode_reference(x: NDArray[Any], bits: int) -> bytes:
    """The stream of x [n] f32|f64, finite and without tiny values, at ``bits`` per block."""
    filled = {1: [0, 0, 0, 0], 2: [0, 1, 1, 0], 3: [0, 1, 2, 0]}  # a short last block
    whole = 0
    for i in range(0, x.size, BLOCK):
        block = x[i : i + BLOCK]
        block = block if block.size == BLOCK else block[filled[block.size]]
        whole |= _encode_block(block, bits) << (bits * (i // BLOCK))
    return whole.to_bytes(stream_bytes(x.size, bits), "little")


def zfp_decode_reference(data: bytes, dtype: Any, n: int, bits: int) -> NDArray[Any]:
    """x_hat [n] of a stream."""
    whole = int.from_bytes(data, "little")
    out = np.zeros((-(-n // BLOCK), BLOCK), dtype)
    for i in range(out.shape[0]):
        out[i] = _decode_block(whole >> (bits * i) & ((1 << bits) - 1), out.dtype, bits)
    return out.reshape(-1)[:n]


def _encode_block(x: NDArray[Any], bits: int) -> int:
    # A number of ``bits`` bits, of which the stream's first is the lowest.
    largest = float(np.abs(x).max())
    if largest == 0:
        return 0
    width, exponent_bits = 8 * x.itemsize, EXPONENT_BITS[x.itemsize]
    exponent = math.frexp(largest)[1]  # |x| < 2**exponent
    integers = [int(math.ldexp(float(v), width - 2 - exponent)) for v in x]
    mask = _negabinary_mask(width)
    negabinary = [((v + mask) ^ mask) % 2**width for v in _lift(*integers)]
    head = ((exponent + (1 << exponent_bits - 1) - 1) << 1) + 1
    return head | _encode_planes(negabinary, width, bits - 1 - exponent_bits) << (1 + exponent_bits)


def _decode_block(code: int, dtype: np.dtype[Any], bits: int) -> NDArray[Any]:
    if code % 2 == 0:
        return np.zeros(BLOCK, dtype)
    width, exponent_bits = 8 * dtype.itemsize, EXPONENT_BITS[dtype.itemsize]
    exponent = (code >> 1) % (1 << exponent_bits) - ((1 << exponent_bits - 1) - 1)
    planes = _decode_planes(code >> (1 + exponent_bits), width, bits - 1 - exponent_bits)
    mask = _negabinary_mask(width)
    integers = np.array(_unlift(width, *((u ^ mask) - mask for u in planes)))
    x_hat: NDArray[Any] = np.ldexp(integers.astype(dtype), exponent - (width - 2))
    return x_hat


def _negabinary_mask(width: int) -> int:
    return int("a" * (width // 4), 16)  # every second bit, including the highest


def _lift(x: int, y: int, z: int, w: int) -> tuple[int, int, int, int]:
    # 1/16 [[4, 4, 4, 4], [5, 1, -1, -5], [-4, 4, 4, -4], [-2, 6, -6, 2]], roundings apart.
    x = (x + w) >> 1
    w -= x
    z = (z + y) >> 1
    y -= z
    x = (x + z) >> 1
    z -= x
    w = (w + y) >> 1
    y -= w
    w += y >> 1
    y -= w >> 1
    return x, y, z, w


def _unlift(width: int, x: int, y: int, z: int, w: int) -> list[int]:
    # 1/4 [[4, 6, -4, -1], [4, 2, 4, 5], [4, -2, 4, -5], [4, -6, -4, 1]], in integers that wrap
    # around, because coefficients that a low rate has cut may overflow.
    y = _wrap(y + (w >> 1), width)
    w -= y >> 1
    y, w = y + w, w - y
    z, x = z + x, x - z
    y, z = y + z, z - y
    w, x = w + x, x - w
    return [_wrap(v, width) for v in (x, y, z, w)]


def _wrap(v: int, width: int) -> int:
    half = 1 << width - 1
    return (v + half) % (2 * half) - half


def _encode_planes(values: list[int], width: int, budget: int) -> int:
    # Bit planes from the highest on; of each, the first n bits, then the rest run by run.
    out: list[int] = []
    n = 0  # number of values up to the last that has had a one bit
    for k in reversed(range(width)):
        plane = [v >> k & 1 for v in values]
        out += plane[:n]
        while n < BLOCK:
            out.append(int(any(plane[n:])))
            if not out[-1]:
                break
            while n < BLOCK - 1 and not plane[n]:
                out.append(0)
                n += 1
            if n < BLOCK - 1:  # the last value must have it, so no bit is written
                out.append(1)
            n += 1
    return sum(bit << i for i, bit in enumerate(out[:budget]))


def _decode_planes(code: int, width: int, budget: int) -> list[int]:
    # Inverse of _encode_planes; bits beyond the budget read as 0.
    bits = iter([code >> i & 1 for i in range(budget)])
    values = [0] * BLOCK
    n = 0
    for k in reversed(range(width)):
        for i in range(n):
            values[i] |= next(bits, 0) << k
        while n < BLOCK and next(bits, 0):
            while n < BLOCK - 1 and not next(bits, 1):
                n += 1
            values[n] |= 1 << k
            n += 1
    return values
