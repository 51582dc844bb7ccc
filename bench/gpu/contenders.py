"""A codec with a tensor to encode on the device, checked before anything is timed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch

from cswap.codecs.base import DEFAULT_KEY

if TYPE_CHECKING:
    from bench.gpu.meter import Meter
    from cswap.codecs.base import Codec, LateSize

MAX_ERROR: Final = 0.5


class Contender:
    """One codec with a tensor to encode and memory to do so."""

    def __init__(self, codec: Codec, x: torch.Tensor, meter: Meter) -> None:
        """Encode and decode once: the result is checked before anything is timed."""
        self.lossless = codec.lossless
        self._codec, self._x, self._meter = codec, x, meter
        bound = codec.bound(x.dtype, x.numel())
        self._out = torch.empty(bound, dtype=torch.uint8, device=x.device)
        self._back = torch.empty_like(x)
        self._sizes: list[int | LateSize] = []
        start_s = time.perf_counter()
        self.encode()
        meter.synchronize()
        self.nbytes = self.settle()
        self._payload = self._out[: self.nbytes].clone()
        self.decode()
        meter.synchronize()
        self.first_call_s = time.perf_counter() - start_s
        self.error = relative_error(x, self._back, lossless=codec.lossless)

    def encode(self) -> None:
        """Do it once; the size stays unread."""
        stream = self._meter.stream
        size = self._codec.encode_flat(self._x, self._out, key=DEFAULT_KEY, stream=stream)  # type: ignore[arg-type]
        self._sizes.append(size)

    def decode(self) -> None:
        """Do it once."""
        self._codec.decode_flat(self._payload, self._back, stream=self._meter.stream)  # type: ignore[arg-type]

    def settle(self) -> int:
        """Read the sizes of all encodes, which have finished; return the last one's."""
        sizes = [s if isinstance(s, int) else s.value() for s in self._sizes]
        self._sizes.clear()
        return sizes[-1]


def relative_error(x: torch.Tensor, back: torch.Tensor, *, lossless: bool) -> float:
    """Relative root mean square of a codec's changes.

    Raises:
        ValueError: a lossless codec changed bits, or a lossy one nearly all of them: no figure of
            it is reported.
    """
    if lossless:
        if not torch.equal(x.view(torch.uint8), back.view(torch.uint8)):
            raise ValueError("a lossless codec changed bits")
        return 0.0
    exact = x.double()
    error = float((back.double() - exact).norm() / exact.norm())
    if not error < MAX_ERROR:  # NaN is not
        raise ValueError(f"what came back has a relative error of {error}")
    return error
