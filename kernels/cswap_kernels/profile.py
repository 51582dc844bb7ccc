"""Counts properties of a tensor's words in one pass over sampled pieces.

`cswap.schema.tensor.TensorProfile` explains the counts. A *piece* stands for a tile.
"""

from __future__ import annotations

import numpy as np

from cswap_kernels.jit import njit

WORDS, ZEROS, REPEATS, FOLLOWERS, NON_FINITE, PIECES, INT_BITS, AMAX = range(8)
SPREAD, SPREAD_NONZERO, ZERO_EXPONENT, N_COUNTS = 8, 12, 16, 17

REACHES = (1, 3, 7, 15)
"""`TensorProfile.spread` counts exponents that lie less than these distances below the largest."""

EXPONENT_BITS, MANTISSA_BITS, FLIP, LARGEST, NAN, N_LAYOUT = range(6)
"""Layout of a word: exponent bits (> 0 for floats, 0 for integers and bools, -1 for neither);
mantissa bits; the sign bit of signed integers, else 0; the bits of the largest finite magnitude; a
word that is NaN besides the words above that magnitude, or -1."""


@njit(nogil=True, cache=True)
def _piece_counts(x, counts):
    # Count words, zeros, and words that equal the preceding word.
    zeros = 0
    repeats = 0
    for i in range(x.size):
        zeros += x[i] == 0
    for i in range(1, x.size):
        repeats += x[i] == x[i - 1]
    counts[WORDS] += x.size
    counts[ZEROS] += zeros
    counts[REPEATS] += repeats
    counts[FOLLOWERS] += x.size - 1
    counts[PIECES] += 1


@njit(nogil=True, cache=True)
def _piece_exponents(x, layout, counts):
    # Count exponents by their distance from the piece's largest; find the largest finite magnitude.
    mantissa_bits, largest, nan = layout[MANTISSA_BITS], layout[LARGEST], layout[NAN]
    magnitude = (np.int64(1) << (layout[EXPONENT_BITS] + mantissa_bits)) - 1
    top, amax, non_finite, small = np.int64(0), np.int64(0), 0, 0
    for i in range(x.size):
        word = np.int64(x[i])
        bits = word & magnitude
        finite = (bits <= largest) & (word != nan)
        top = max(top, bits >> mantissa_bits)
        amax = max(amax, bits if finite else np.int64(0))
        non_finite += not finite
        small += bits >> mantissa_bits == 0
    counts[AMAX] = max(counts[AMAX], amax)
    counts[NON_FINITE] += non_finite
    counts[ZERO_EXPONENT] += small
    for k in range(4):
        least = (top - REACHES[k] + 1) << mantissa_bits
        within, within_nonzero = 0, 0
        for i in range(x.size):
            near = (np.int64(x[i]) & magnitude) >= least
            within += near
            within_nonzero += near & (x[i] != 0)
        counts[SPREAD + k] += within
        counts[SPREAD_NONZERO + k] += within_nonzero


@njit(nogil=True, cache=True)
def _piece_range(x, flip, counts):
    # Add the bits of (largest - smallest). flip inverts a sign bit: unsigned order is then signed.
    low = np.uint64(x[0]) ^ flip
    high = low
    for i in range(x.size):
        word = np.uint64(x[i]) ^ flip
        low = min(low, word)
        high = max(high, word)
    width = high - low
    while width:
        counts[INT_BITS] += 1
        width >>= np.uint64(1)


@njit(nogil=True, cache=True)
def profile_pieces(words, n_pieces, piece_words, layout, counts):
    """Count n_pieces evenly spread pieces of words [n], n >= 1, into counts [17] i64.

    layout [5] i64 describes a word. It is one array, because each array argument costs half a
    microsecond.
    """
    n = words.size
    counts[:] = 0
    step = max(piece_words, n // n_pieces)  # pieces do not overlap
    for piece in range(n_pieces):
        # A fixed jitter, so that a period in the data does not coincide with the sample's period.
        start = piece * step + (piece * 0x9E3779B1 & 0x7FFFFFFF) % (step - piece_words + 1)
        if start >= n:
            break
        x = words[start : min(start + piece_words, n)]
        _piece_counts(x, counts)
        if layout[EXPONENT_BITS] > 0:
            _piece_exponents(x, layout, counts)
        elif layout[EXPONENT_BITS] == 0:
            _piece_range(x, np.uint64(layout[FLIP]), counts)
