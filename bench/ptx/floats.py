"""Floating-point operations of PTX on numpy arrays, a value per thread."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[Any]

CANONICAL_NAN: Final = 0x7FFFFFFF
"""Bits of the one NaN that float32 operations of PTX give."""


def quiet(x: Lanes) -> Lanes:
    """The result of a float32 operation: every NaN of it is PTX's one."""
    x = np.asarray(x)
    if x.dtype == np.float32:
        bad = np.isnan(x)
        if bad.any():
            return np.where(bad, np.uint32(CANONICAL_NAN).view(np.float32), x)
    return x


def fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """fma.rn.f32: a * b + c with one rounding."""
    # The product of two float32 is exact in 64 bits. Their sum with c is rounded to odd there, so
    # that rounding it once more, to 24 bits, is as one rounding (Boldo and Melquiond, 2008).
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    c = np.asarray(c, np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = np.atleast_1d(total).view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits.reshape(np.shape(total)) & 1) == 0)
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where(inexact, np.nextafter(total, towards), total)
    return quiet(odd.astype(np.float32))


def least_or_greatest(a: Lanes, b: Lanes, *, greatest: bool) -> Lanes:
    """min or max: a number beats NaN, and -0 is less than +0."""
    a, b = np.broadcast_arrays(np.asarray(a), np.asarray(b))
    out = np.fmax(a, b) if greatest else np.fmin(a, b)
    both_zero = (a == 0) & (b == 0)
    if both_zero.any():
        signs = np.signbit(a) & np.signbit(b) if greatest else np.signbit(a) | np.signbit(b)
        zero = out.dtype.type(0)
        out = np.where(both_zero, np.where(signs, -zero, zero), out)
    return quiet(out)


def to_integer(x: Lanes, dtype: np.dtype[Any], how: str) -> Lanes:
    """cvt to an integer: saturates; NaN is 0, or the top bit alone if either side is 64 bits."""
    x = np.asarray(x)
    rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[how]
    r = rounding(x.astype(np.float64))
    info = np.iinfo(dtype)
    out = np.zeros(r.shape, dtype)
    nan = np.isnan(r)
    high = r >= float(info.max) if dtype.itemsize == 8 else r > info.max
    low = r < info.min
    fits = ~(nan | high | low)
    out[fits] = r[fits].astype(dtype)
    out[high], out[low] = info.max, info.min
    if nan.any() and (x.dtype == np.float64 or dtype.itemsize == 8):
        out[nan] = info.min if info.min else 1 << (8 * dtype.itemsize - 1)
    return out


def to_bfloat16_pair(high: Lanes, low: Lanes) -> Lanes:
    """cvt.rn.bf16x2.f32: nearest, ties to even; every NaN is 7fff."""
    return _pair(_to_bfloat16(high), _to_bfloat16(low))


def to_half_pair(high: Lanes, low: Lanes) -> Lanes:
    """cvt.rn.f16x2.f32: nearest, ties to even; every NaN is 7fff."""
    return _pair(_to_half(high), _to_half(low))


def from_half(x: Lanes) -> Lanes:
    """cvt.f32.f16 of the bits of a half; exact."""
    return quiet(np.asarray(x, np.uint16).view(np.float16).astype(np.float32))


def to_e4m3_pair(high: Lanes, low: Lanes) -> Lanes:
    """cvt.rn.satfinite.e4m3x2.f32: nearest, ties to even, at most 448; NaN is 7f."""
    return (_to_e4m3(high) << np.uint16(8)) | _to_e4m3(low)


def from_e4m3_pair(x: Lanes) -> Lanes:
    """cvt.rn.f16x2.e4m3x2; exact. NaN is 7fff."""
    x = np.asarray(x, np.uint16)
    return _pair(_from_e4m3(x >> np.uint16(8)), _from_e4m3(x & np.uint16(255)))


def _pair(high: Lanes, low: Lanes) -> Lanes:
    packed: Lanes = (high.astype(np.uint32) << np.uint32(16)) | low.astype(np.uint32)
    return packed


def _to_bfloat16(x: Lanes) -> Lanes:
    x = np.asarray(x, np.float32)
    bits = np.atleast_1d(x).view(np.uint32).astype(np.uint64).reshape(x.shape)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _to_half(x: Lanes) -> Lanes:
    x = np.asarray(x, np.float32)
    half = np.atleast_1d(x.astype(np.float16)).view(np.uint16).reshape(x.shape)
    return np.where(np.isnan(x), np.uint16(0x7FFF), half)


def _to_e4m3(x: Lanes) -> Lanes:
    # Steps of a code are 2**(e - 3) from 2**-6 on, and 2**-9 below.
    x = np.asarray(x, np.float32)
    size = np.minimum(np.abs(x).astype(np.float64), 448.0)
    step = np.exp2(np.maximum(np.frexp(size)[1] - 1, -6) - 3.0)
    rounded = np.minimum(np.rint(size / step) * step, 448.0)
    exponent = np.maximum(np.frexp(rounded)[1] - 1, -6)
    steps = rounded / np.exp2(exponent - 3.0)
    code = np.where(steps < 8, steps, (exponent + 7) * 8 + (steps - 8))
    code = np.where(np.isnan(x), 0x7F, code).astype(np.uint16)
    return code | np.where(np.signbit(x) & ~np.isnan(x), np.uint16(0x80), np.uint16(0))


def _from_e4m3(code: Lanes) -> Lanes:
    exponent, mantissa = (code >> np.uint16(3)) & np.uint16(15), code & np.uint16(7)
    small = mantissa * 2.0**-9
    value = np.where(exponent == 0, small, (8.0 + mantissa) * np.exp2(exponent - 10.0))
    half = value.astype(np.float16).view(np.uint16) | ((code & np.uint16(0x80)) << np.uint16(8))
    nan = (code & np.uint16(0x7F)) == np.uint16(0x7F)
    return np.where(nan, np.uint16(0x7FFF), half)
