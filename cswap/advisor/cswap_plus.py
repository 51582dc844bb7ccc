"""CSwap+'s equations: compress a tensor if that shortens its swap.

Sources: CSWAP, IEEE Cluster 2021 (section IV-B; Eq. 1-5), and CSwap+, IEEE TPDS 33(12), 2022
(sections 5.2.2 and 5.3; Eq. 1-7, Algorithm 1). The papers leave some points open: our readings are
marked. Needs no torch: the planning policies apply the equations to traces, the advisor's pricing
rule to tensors as they are saved.

Note [limits of the rule]
~~~~~~~~~~~~~~~~~~~~~~~~~
The rule judges each tensor alone, although all share one link. It never hides compression and
decompression. It counts a ZVC encoding without its bitmap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DENSE: Final = 0.2
"""Zero fraction below which a tensor is dense: the low end of the range on which the papers fit the
times of lossless codecs (CSWAP, section IV-B)."""

MAX: Final = 512
"""MAX of ZFP's rate P: the bits of a block of 4 x 4 float32 values, as in CSWAP's released code.
The papers do not define the unit. With 32, the bits of one value, the papers' step of P would round
to 0 in most trainings. Codecs have whole bits per value, see `bits_per_value`."""

VALUE_BITS: Final = 32
"""Bits of a float32."""


@dataclass(frozen=True, slots=True)
class Swap:
    """One tensor's swap-out and swap-in.

    Attributes:
        nbytes: raw bytes.
        d2h_bytes_per_s, h2d_bytes_per_s: measured rates of the link.
        forward_s, backward_s: seconds of the layer that hide the swap-out, and the swap-in.
    """

    nbytes: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    forward_s: float = 0.0
    backward_s: float = 0.0

    def exposed_s(self, nbytes: float) -> float:
        """Seconds of moving so many bytes out and back, less the hidden ones (Eq. 3)."""
        out = max(nbytes / self.d2h_bytes_per_s - self.forward_s, 0.0)
        return out + max(nbytes / self.h2d_bytes_per_s - self.backward_s, 0.0)

    @property
    def uncompressed_cost_s(self) -> float:
        """T' of Eq. 3."""
        return self.exposed_s(self.nbytes)

    def compressed_cost_s(self, encoded: float, compress_s: float, decompress_s: float) -> float:
        """T of Eq. 4-6, for ``encoded`` bytes."""
        return compress_s + decompress_s + self.exposed_s(encoded)

    def pays(self, encoded: float, compress_s: float, decompress_s: float) -> bool:
        """Whether to compress: T' > T."""
        return self.uncompressed_cost_s > self.compressed_cost_s(encoded, compress_s, decompress_s)


def sparse_bytes(nbytes: float, zeros: float) -> float:
    """Bytes of a ZVC encoding without its bitmap (Eq. 7).

    >>> sparse_bytes(1000, 0.75)
    250.0
    """
    return nbytes * (1 - zeros)


def dense_bytes(nbytes: float, rate: int, most: int) -> float:
    """Bytes of a fixed-rate ZFP encoding: P of MAX (Eq. 7)."""
    return nbytes * rate / most


def bits_per_value(rate: int) -> int:
    """Bits of one float32 at rate P of `MAX`, rounded up: the parameter of the codec ``zfp``.

    At most 31, because 32 bits would save nothing.

    >>> bits_per_value(512), bits_per_value(100), bits_per_value(1)
    (31, 7, 1)
    """
    return min(math.ceil(rate * VALUE_BITS / MAX), VALUE_BITS - 1)


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense tensor for Algorithm 1.

    Attributes:
        swap: its swap-out and swap-in.
        codec_s: seconds of compression and decompression, at any rate P.
    """

    swap: Swap
    codec_s: float


def top_bottom(tensors: Sequence[Dense], most: int) -> tuple[int, int] | None:
    """Algorithm 1: the largest P that shortens some tensor's swap, and the smallest worth trying.

    Top is the maximum over tensors of the largest P that shortens the swap. Bottom is the minimum
    over tensors of the largest P whose transfers are all hidden. The paper's search returns 1 where
    no P shortens the swap, or none is hidden. Here such a tensor does not count towards Top, and
    counts 1 towards Bottom.

    Args:
        tensors: dense tensors, at least one.
        most: MAX of P.

    Returns:
        (Top, Bottom); None (no lossy compression) if no P shortens a swap, or Top <= Bottom.
    """
    top, bottom = 0, most
    for tensor in tensors:
        top = max(top, _largest(most, partial(_dense_pays, tensor, most)))
        bottom = min(bottom, max(_largest(most, partial(_is_hidden, tensor, most)), 1))
    return (top, bottom) if top > bottom else None


def _dense_pays(tensor: Dense, most: int, rate: int) -> bool:
    return tensor.swap.pays(dense_bytes(tensor.swap.nbytes, rate, most), tensor.codec_s, 0.0)


def _is_hidden(tensor: Dense, most: int, rate: int) -> bool:
    return tensor.swap.exposed_s(dense_bytes(tensor.swap.nbytes, rate, most)) == 0.0


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    # Bisection: the largest of 1 ... most for which ``holds``, monotonic; 0 if there is none.
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def sliding_down(top: int, bottom: int, epoch: int, epochs: int) -> int:
    """P of an epoch: from Top down to Bottom, since early epochs are sensitive (Eq. 1-2).

    The paper's step is a whole number: 0 where Top - Bottom is less than half the epochs.

    >>> sliding_down(100, 20, 0, 90), sliding_down(100, 20, 79, 90), sliding_down(100, 20, 80, 90)
    (100, 21, 20)
    """
    step = int((top - bottom) / epochs + 0.5)
    return max(top - epoch * step, bottom)
