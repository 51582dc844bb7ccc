"""Philox4x32-10: random numbers that are a function of a counter and a key. Used by int4.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, and its
Random123 library (known answers in tests/codecs/test_codec_lossy.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cswap_kernels.jit import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW: Final = 128
"""Values per row. A row takes 16 counters, each of which gives eight values 16 bits."""

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LANES = np.uint64(16)


@njit(nogil=True, inline="always")  # LLVM vectorises over the lanes only if this is inlined
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four random u32 of a counter of four u32 and a key of two u32; ten rounds."""
    for _ in range(10):
        a = np.uint64(np.uint64(c0) * _M0)
        b = np.uint64(np.uint64(c2) * _M1)
        c0 = np.uint32(np.uint32(b >> np.uint64(32)) ^ c1 ^ k0)
        c2 = np.uint32(np.uint32(a >> np.uint64(32)) ^ c3 ^ k1)
        c1 = np.uint32(b)
        c3 = np.uint32(a)
        k0 = np.uint32(k0 + _W0)
        k1 = np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@njit(nogil=True, cache=True)
def fill_rows(out, first_row, seed, stream):
    """Random 16 bits for each value of whole rows.

    Value i of a tensor has row i // 128 and, in it, lane i % 16 and piece i // 16 % 8. The counter
    of a lane is (16 row + lane, stream), the key is seed; piece p is the low (p even) or high half
    of the counter's output number p // 2. So 16 counters in a register fill a row without shuffles.

    Args:
        out: [n_rows * ROW] u16.
        first_row: i64, row of out[0].
        seed: u64.
        stream: u64, tensor in the low half and step in the high one.
    """
    k0, k1 = np.uint32(seed), np.uint32(seed >> np.uint64(32))
    c2, c3 = np.uint32(stream), np.uint32(stream >> np.uint64(32))
    for row in range(out.size // ROW):
        at = np.uint64(ROW * row)
        counter = np.uint64(first_row + row) * _LANES
        for lane in range(_LANES):
            c0 = np.uint64(counter + lane)
            r0, r1, r2, r3 = philox4x32(
                np.uint32(c0), np.uint32(c0 >> np.uint64(32)), c2, c3, k0, k1
            )
            i = np.uint64(at + lane)
            out[i] = np.uint16(r0)
            out[i + np.uint64(16)] = np.uint16(r0 >> np.uint32(16))
            out[i + np.uint64(32)] = np.uint16(r1)
            out[i + np.uint64(48)] = np.uint16(r1 >> np.uint32(16))
            out[i + np.uint64(64)] = np.uint16(r2)
            out[i + np.uint64(80)] = np.uint16(r2 >> np.uint32(16))
            out[i + np.uint64(96)] = np.uint16(r3)
            out[i + np.uint64(112)] = np.uint16(r3 >> np.uint32(16))


def philox4x32_reference(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """[n, 4] u32 random numbers of [n, 4] u32 counters."""
    c = counter.astype(np.uint64).T.copy()
    k = [np.uint64(key[0]), np.uint64(key[1])]
    for _ in range(10):
        a, b = c[0] * _M0, c[2] * _M1
        c = np.stack((b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF))
        k = [(k[0] + _W0) & 0xFFFFFFFF, (k[1] + _W1) & 0xFFFFFFFF]
    return c.T.astype(np.uint32)


def random16_reference(index: NDArray[Any], seed: int, stream: int) -> NDArray[np.uint16]:
    """[n] u16: the random bits of the values with these indices."""
    i = index.astype(np.uint64)
    counter = i // 128 * 16 + i % 16
    parts = (counter & 0xFFFFFFFF, counter >> 32, i * 0 + stream % 2**32, i * 0 + (stream >> 32))
    out = philox4x32_reference(np.stack(parts, 1).astype(np.uint32), (seed % 2**32, seed >> 32))
    piece = (i // 16 % 8).astype(np.int64)
    word = np.take_along_axis(out, (piece // 2)[:, None], 1)[:, 0]
    return (word >> (16 * (piece % 2)).astype(np.uint32)).astype(np.uint16)
