"""One pass over sampled pieces of a tensor: what its words are like.

The counts are those that `cswap.schema.tensor.TensorProfile` explains; a *piece* stands for a tile.
"""

from __future__ import annotations

import numpy as np
from numba import njit

WORDS, ZEROS, REPEATS, FOLLOWERS, NON_FINITE, PIECES, INT_BITS, AMAX = range(8)
SPREAD, SPREAD_NONZERO = 8, 12
N_COUNTS = 16


@njit(nogil=True, cache=True)
def _piece_counts(x, counts):
    # Words, zeros and words equal to the one before.
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
def _piece_exponents(x, exponent_bits, mantissa_bits, counts):
    # How far exponents lie below the piece's largest, and the largest finite magnitude.
    field = (np.int64(1) << exponent_bits) - 1
    magnitude = (np.int64(1) << (exponent_bits + mantissa_bits)) - 1
    top = np.int64(0)
    for i in range(x.size):
        top = max(top, (np.int64(x[i]) >> mantissa_bits) & field)
    for i in range(x.size):
        bits = np.int64(x[i]) & magnitude
        exponent = bits >> mantissa_bits
        if exponent == field:
            counts[NON_FINITE] += 1
        elif bits > counts[AMAX]:
            counts[AMAX] = bits
        below = top - exponent
        k = 0 if below < 1 else 1 if below < 3 else 2 if below < 7 else 3 if below < 15 else 4
        if k < 4:
            counts[SPREAD + k] += 1
            if x[i] != 0:
                counts[SPREAD_NONZERO + k] += 1


@njit(nogil=True, cache=True)
def _piece_range(x, flip, counts):
    # Bits of (largest - smallest); flip moves a sign bit so that unsigned order is signed order.
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
def profile_pieces(words, n_pieces, piece_words, exponent_bits, mantissa_bits, flip, counts):
    """Add what n_pieces pieces of words [n], n >= 1, spread evenly, are like to counts [16] f64.

    exponent_bits: > 0 for floats, 0 for integers and bools, -1 for neither.
    """
    n = words.size
    counts[:] = 0
    step = max(piece_words, n // n_pieces)  # pieces do not overlap
    for piece in range(n_pieces):
        # A fixed jitter, so that a period in the data does not meet a period of the sample.
        start = piece * step + (piece * 0x9E3779B1 & 0x7FFFFFFF) % (step - piece_words + 1)
        if start >= n:
            break
        x = words[start : min(start + piece_words, n)]
        _piece_counts(x, counts)
        if exponent_bits > 0:
            _piece_exponents(x, exponent_bits, mantissa_bits, counts)
        elif exponent_bits == 0:
            _piece_range(x, flip, counts)
