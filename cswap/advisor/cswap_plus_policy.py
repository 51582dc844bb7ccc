"""``policy="cswap+"``: the paper's system on an engine, by the equations of cswap_plus.py.

RLE, CSR or ZVC if that shortens the swap of a tensor, else raw; values are sampled once per epoch
(`SwapEngine.begin_epoch`); times are regressed on size and sparsity by sub-models. With
``lossy="zfp"`` dense tensors may go through ZFP at a fixed rate, found by Algorithm 1 from the
tensors of the first epoch and sliding down from then on.

Our readings: the link is what the price of a byte stands for, and hides nothing: what a layer's
computation would hide is not known per tensor here (the planner's ``cswap+`` knows it from a
trace). LZ4 is left out: the papers name it and use ZVC. A tensor is dense below the sparsity that
sub-models are fitted from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor.cost import Candidate
from cswap.advisor.cswap_plus import (
    SPARSITIES,
    Dense,
    Swap,
    dense_bytes,
    fit_times,
    sliding_down,
    sparse_bytes,
    top_bottom,
)
from cswap.advisor.round_trip import round_trip
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec
from cswap.errors import CswapError
from cswap.schema.tensor import TensorProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.advisor.cswap_plus import TimeModels
    from cswap.advisor.live_costs import Market

CODECS: Final = ("zvc", "csr", "rle")
ZFP_MAX: Final = 32
"""MAX: bits of a float32."""

ZFP_SAMPLE: Final = 1 << 16
"""Values on which ZFP's time is measured, once."""

_SIZES: Final = tuple(1 << n for n in range(18, 27, 2))
_ZEROS: Final = tuple(SPARSITIES[0] + 0.05 * i for i in range(13))


class CswapPlus:
    """The paper's rule per tensor; see the module's text."""

    reason = "CSwap+'s rule"
    explores = False
    per_epoch = True

    def __init__(self) -> None:
        self._models: dict[str, TimeModels] = {}
        self._zfp_s_per_byte: float | None = None
        self._dense: list[Dense] = []
        self._bounds: tuple[int, int] | None = None
        self.rate: int | None = None

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """An epoch begins: ZFP's rate slides, from what the first epoch's tensors allow."""
        if self._bounds is None and self._dense:
            self._bounds = top_bottom(self._dense, ZFP_MAX)
        self._dense.clear()
        if self._bounds is not None:
            self.rate = sliding_down(*self._bounds, epoch, epochs)

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market, *, lossy_ok: bool
    ) -> Sequence[Candidate]:
        """See `Policy.price`."""
        rate = 2 / max(market.price_s_per_byte, 1e-15)
        swap = Swap(x.nbytes, rate, rate)
        by_name = {quote.codec: quote for quote in quotes}
        found = [replace(by_name["raw"], cost_s=swap.uncompressed_cost_s)]
        if not x.is_floating_point():
            return found
        zeros = 1 - 1 / by_name["zvc"].ratio if "zvc" in by_name else 0.0
        for name in CODECS:
            if name in by_name:
                quote = by_name[name]
                encoded = sparse_bytes(x.nbytes, zeros) if name == "zvc" else quote.nbytes
                seconds = self._times(name, market).seconds(x.nbytes, zeros)
                cost_s = swap.compressed_cost_s(min(encoded, x.nbytes), seconds, 0.0)
                found.append(replace(quote, device_s=seconds, cost_s=cost_s))
        if lossy_ok and zeros < SPARSITIES[0]:
            found += self._zfp(x, swap)
        return found

    def _times(self, name: str, market: Market) -> TimeModels:
        # Of encode and decode together, on the sizes and sparsities that the papers fit on.
        if name not in self._models:
            samples = [
                (float(n), zeros, market.model_s(name, TensorProfile("float32", n, 1, zeros)))
                for n in _SIZES
                for zeros in _ZEROS
            ]
            self._models[name] = fit_times(samples)
        return self._models[name]

    def _zfp(self, x: torch.Tensor, swap: Swap) -> list[Candidate]:
        try:
            seconds = self._zfp_seconds(x)
        except CswapError:  # zfp is not here, or does not take this dtype
            return []
        self._dense.append(Dense(swap, lambda _: seconds, lambda _: 0.0))
        if self.rate is None:
            return []
        codec = get_codec(f"zfp:{self.rate}")
        if not takes(codec, x.dtype, x.device.type):
            return []
        encoded = dense_bytes(x.nbytes, self.rate, ZFP_MAX)
        cost_s = swap.compressed_cost_s(encoded, seconds, 0.0)
        return [Candidate(codec.name, x.nbytes / encoded, seconds, cost_s, encoded)]

    def _zfp_seconds(self, x: torch.Tensor) -> float:
        if self._zfp_s_per_byte is None:
            sample = torch.randn(ZFP_SAMPLE, device=x.device)
            codec = get_codec("zfp")
            round_trip(codec, sample, repeat=1)
            _, encode_s, decode_s = round_trip(codec, sample)
            self._zfp_s_per_byte = (encode_s + decode_s) / sample.nbytes
        return self._zfp_s_per_byte * x.nbytes
