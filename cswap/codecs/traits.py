"""A codec's description of itself, for the code that chooses codecs. Needs no torch.

Note [where default rates come from]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
CPU rates of the built-in codecs: one thread on float32 (int64 for ``bitpack``), on ReLU or GELU
activations, whichever is slower; ``raw`` at memcpy's rate. Source:
bench/results/cpu/codecs-worker.json. CUDA rates were not measured. They are upper bounds computed
from the kernels' machine code for an A100, float32 (int64 for ``bitpack``), rounded down to two
digits. Source: bench/results/cpu/kernels.json. Only the order of magnitude matters. A calibration
of the machine replaces them (`cswap.advisor.calibrate`).

Note [where relative errors come from]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Those of the built-in codecs: bench/results/cpu/codecs.json, normal values in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from cswap.display import shown
from cswap.errors import ConfigError
from cswap.schema.tensor import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cswap.schema.tensor import TensorProfile

LOSSLESS: Final = "lossless"
"""Value of `CodecTraits.milder`, and last rung of the accuracy guard's ladder: no lossy codec."""


@dataclass(frozen=True, slots=True)
class CodecRate:
    """Speed of a codec on one kind of device.

    Attributes:
        encode_bytes_per_s: raw bytes per second; infinite if encoding takes no time.
        decode_bytes_per_s: raw bytes per second; infinite if decoding takes no time.
        overhead_s: seconds per tensor and direction, independent of the size.
        assumed: whether the rates are neither measured nor computed by this project. Then a wrong
            prediction says nothing about the device (`cswap.advisor.correction`).

    Raises:
        ConfigError: a rate is not positive, or the overhead is negative or infinite.
    """

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    overhead_s: float = 20e-6
    assumed: bool = False

    def __post_init__(self) -> None:
        if not (self.encode_bytes_per_s > 0 and self.decode_bytes_per_s > 0):
            raise ConfigError(f"{self}: rates must be above 0, in bytes per second.")
        if not 0 <= self.overhead_s < math.inf:
            raise ConfigError(f"{self}: overhead_s must be finite and not negative, in seconds.")

    def device_s(self, profile: TensorProfile) -> float:
        """Seconds of encode and decode together, for a tensor of this profile."""
        per_byte = 1 / self.encode_bytes_per_s + 1 / self.decode_bytes_per_s
        return 2 * self.overhead_s + profile.nbytes * per_byte


@dataclass(frozen=True, slots=True)
class CodecTraits:
    """Facts about a codec by which ``codec="auto"`` and the accuracy guard choose. All optional.

    Attributes:
        predicted_ratio: raw bytes over encoded bytes of a tensor with the given profile. A value
            below 1 counts as 1, since tiles that would grow are stored raw. None (default): the
            ratio cannot be predicted, so ``codec="auto"`` does not consider the codec.
        relative_error: of a lossy codec, the root mean square of the error over that of the
            tensor, on normally distributed values. ``lossy=0.01`` admits codecs up to 0.01. None
            (default): unknown; no tolerance admits the codec, and the guard takes its error for the
            largest.
        milder: name of the lossy codec that the guard uses where this one harms gradients, or
            "lossless". None (default): chosen by relative error (`cswap.advisor.lossy_fallback`).
        rates: speed by kind of device ("cpu", "cuda"), until the machine is calibrated. Default:
            the codec counts as slow (`cswap.advisor.rates.UNKNOWN_RATES`).
        after_zvc: whether ``zvc+`` may precede the codec, if it is a `TiledCodec`. False for codecs
            that only look for zeros.
        rates_after_zvc: measured speed of ``zvc+`` this codec, by kind of device. Default: derived
            from the rates of both.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    predicted_ratio: Callable[[TensorProfile], float] | None = None
    relative_error: float | None = None
    milder: str | None = None
    rates: Mapping[str, CodecRate] = field(default_factory=dict)
    after_zvc: bool = True
    rates_after_zvc: Mapping[str, CodecRate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.predicted_ratio is not None and not callable(self.predicted_ratio):
            raise ConfigError(
                f"predicted_ratio={shown(self.predicted_ratio)}: must be a function from "
                "TensorProfile to a number, or None."
            )
        if self.relative_error is not None and not _is_positive(self.relative_error):
            raise ConfigError(
                f"relative_error={shown(self.relative_error)}: must be a number above 0 such as "
                "0.01, or None."
            )
        for name, rates in (("rates", self.rates), ("rates_after_zvc", self.rates_after_zvc)):
            if not all(isinstance(rate, CodecRate) for rate in rates.values()):
                raise ConfigError(
                    f"{name}={shown(dict(rates))}: must map kinds of device to CodecRate."
                )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def word_bits(profile: TensorProfile) -> int:
    """Bits of one word of the profiled tensor."""
    return 8 * DTYPES[profile.dtype].word
