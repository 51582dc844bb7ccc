"""The cost model: cost = time on the device + price * encoded bytes. Needs no torch.

Source: the decision "compress only if it pays" is CSwap+'s (TPDS 33(12), 2022, Eq. 3-7). Here the
bytes have a price instead of a simulated transfer: `price_s_per_byte` is the worth of a byte on the
link, or in the host's memory, in seconds of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cswap.schema.tensor import TensorProfile


class Times(Protocol):
    """Time that a codec takes: a default (`CodecRate`) or measured (`calibration.CodecTimes`)."""

    def device_s(self, profile: TensorProfile) -> float:
        """Seconds of encode and decode together, for a tensor of this profile."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """One codec's predicted cost for one tensor.

    Attributes:
        codec: its name.
        ratio: predicted raw bytes over encoded bytes.
        device_s: predicted encode plus decode time, in seconds.
        cost_s: device_s plus the price of the encoded bytes, in seconds.
        nbytes: predicted encoded bytes.
    """

    codec: str
    ratio: float
    device_s: float
    cost_s: float
    nbytes: float


def candidate(
    codec: str, raw_nbytes: int, ratio: float, device_s: float, price_s_per_byte: float
) -> Candidate:
    """A codec's predicted cost for a tensor of ``raw_nbytes``.

    Args:
        codec: its name.
        raw_nbytes: bytes of the tensor.
        ratio: predicted; a value below 1 counts as 1, since tiles that would grow are stored raw.
        device_s: predicted seconds of encode and decode.
        price_s_per_byte: price of an encoded byte.

    >>> round(candidate("zvc", 1000, 4.0, 1e-6, 1e-9).cost_s, 9)
    1.25e-06
    """
    ratio = max(1.0, ratio)
    nbytes = raw_nbytes / ratio
    return Candidate(codec, ratio, device_s, device_s + price_s_per_byte * nbytes, nbytes)
