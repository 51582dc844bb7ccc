"""Robust regression: of a codec's time on a tensor's size and zeros, and of others on a line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cswap.schema.tensor import TensorProfile

HUBER: Final = 1.345
"""Residuals beyond this many spreads weigh less. Source: Huber, Robust Statistics (1981), 95 %
efficiency on normal errors."""

ROUNDS: Final = 20
"""Most iterations of the reweighting."""

MAD_TO_SIGMA: Final = 1.4826
"""Standard deviation over median absolute deviation, of normal errors."""


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds that one direction of a codec takes.

    The model is linear in the bytes, in the bytes that are not zero, and in a term for mispredicted
    branches, which is largest where half of the words are zero.

    Attributes:
        overhead_s: seconds per tensor, independent of its size.
        s_per_byte: seconds per raw byte.
        s_per_nonzero_byte: additional seconds per raw byte of words that are not zero.
        s_per_mixed_byte: additional seconds per raw byte, times 4 z (1 - z) for a zero fraction z.
        residual: median relative error on the measurements of the fit.
    """

    overhead_s: float
    s_per_byte: float
    s_per_nonzero_byte: float
    residual: float
    s_per_mixed_byte: float = 0.0

    def seconds(self, profile: TensorProfile) -> float:
        """Predicted time for a tensor of this profile."""
        return self.overhead_s + self._s_per_byte(profile.zero_fraction) * profile.nbytes

    def bytes_per_s(self, zero_fraction: float) -> float:
        """Raw bytes per second of a large tensor; infinite if it takes no time."""
        per_byte = self._s_per_byte(zero_fraction)
        return 1 / per_byte if per_byte else math.inf

    def _s_per_byte(self, zeros: float) -> float:
        mixed = 4 * zeros * (1 - zeros) * self.s_per_mixed_byte
        return self.s_per_byte + (1 - zeros) * self.s_per_nonzero_byte + mixed


def fit(profiles: Sequence[TensorProfile], seconds: Sequence[float]) -> TimeModel:
    """Fit the model with the smallest relative errors; no term is negative.

    Args:
        profiles: of the measured tensors, at least three.
        seconds: measured for each, all above 0.

    Raises:
        ValueError: fewer than three measurements, or one that is not positive.
    """
    measured = np.asarray(seconds, float)
    if measured.size < 3 or not (measured > 0).all():
        raise ValueError(f"seconds={list(seconds)}: need at least three, all above 0.")
    nbytes = np.array([p.nbytes for p in profiles], float)
    zeros = np.array([p.zero_fraction for p in profiles])
    columns = (np.ones_like(nbytes), nbytes, nbytes * (1 - zeros), 4 * nbytes * zeros * (1 - zeros))
    terms = np.column_stack(columns) / measured[:, None]
    found, residual = robust(terms, np.ones_like(measured))
    overhead_s, s_per_byte, s_per_nonzero_byte, s_per_mixed_byte = (float(v) for v in found)
    return TimeModel(overhead_s, s_per_byte, s_per_nonzero_byte, residual, s_per_mixed_byte)


def robust(
    terms: NDArray[np.float64], target: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Coefficients [k], none negative, with which terms [n, k] come close to target [n].

    Iteratively reweighted least squares with Huber's weights: one disturbed measurement changes the
    result little.

    Returns:
        The coefficients, and the median absolute error.
    """
    from scipy.optimize import nnls  # takes long to import

    scale = np.maximum(np.linalg.norm(terms, axis=0), 1e-300)  # nnls's tolerance is absolute
    weights, terms = np.ones_like(target), terms / scale
    found, before = np.zeros(terms.shape[1]), None
    for _ in range(ROUNDS):
        found, _ = nnls(terms * weights[:, None], weights * target)
        if before is not None and np.allclose(found, before, rtol=1e-3, atol=0.0):
            break
        before = found
        errors = terms @ found - target
        spread = max(MAD_TO_SIGMA * float(np.median(np.abs(errors))), 1e-9)
        weights = np.sqrt(np.minimum(1, HUBER * spread / np.maximum(np.abs(errors), 1e-12)))
    return found / scale, float(np.median(np.abs(terms @ found - target)))
