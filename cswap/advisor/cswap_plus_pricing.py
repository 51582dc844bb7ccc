"""CSwap+'s pricing rule for an engine (``policy="cswap+"``), by the equations of cswap_plus.py.

A tensor goes through RLE, CSR, ZVC or LZ4 (nvCOMP's, on a GPU where it is installed) if that
shortens its swap, else it is moved raw. Values are sampled once per epoch
(`SwapEngine.begin_epoch`). Times are those of the advisor's models, which are fitted to size and
sparsity by `cswap calibrate`, in place of the papers' own regression. With
``lossy="zfp"`` dense tensors may go through ZFP at a fixed rate: Algorithm 1 finds the rate from
the tensors of the first epoch, and it slides down from then on.

The planning policy ``cswap+`` (`cswap.plan.policies.cswap_plus`) applies the same equations to a
trace, where it knows the computation that hides each transfer. Here that is unknown per tensor.

Our readings of the papers: the price of a byte stands for the link, and nothing hides a transfer.
A tensor is dense if its sparsity lies below the range of the papers' regression.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cswap.advisor.cost import Candidate
from cswap.advisor.cswap_plus import (
    DENSE,
    MAX,
    VALUE_BITS,
    Dense,
    Swap,
    bits_per_value,
    dense_bytes,
    sliding_down,
    sparse_bytes,
    top_bottom,
)
from cswap.advisor.round_trip import normal, round_trip
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec
from cswap.codecs.tolerance import COARSE
from cswap.errors import CswapError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cswap.advisor.live_costs import LiveCosts
    from cswap.schema.tensor import TensorProfile

CODECS: Final = ("zvc", "csr", "rle", "nvcomp-lz4")
"""The lossless codecs of the papers. They name LZ4, and use ZVC."""

ZFP_SAMPLE: Final = 1 << 16
"""Number of values on which ZFP's time is measured, once."""

REASON: Final = "CSwap+'s rule"
"""Reason of its choices, in words."""


class CswapPlusPricing:
    """CSwap+'s rule, tensor by tensor. See the module's docstring."""

    def __init__(self) -> None:
        self._zfp_s_per_byte: float | None = None
        self._dense: list[Dense] = []
        self._bounds: tuple[int, int] | None = None
        self._epoch = 0
        self.rate: int | None = None

    def begin_epoch(self, epochs: int) -> None:
        """The next of ``epochs`` begins: slide ZFP's rate down, in the bounds of the first one."""
        self._epoch += 1
        if self._bounds is None and self._dense:
            self._bounds = top_bottom(self._dense, MAX)
        self._dense.clear()
        if self._bounds is not None:
            self.rate = sliding_down(*self._bounds, self._epoch, epochs)

    def price(
        self,
        x: torch.Tensor,
        taken: TensorProfile,
        quotes: Sequence[Candidate],
        costs: LiveCosts,
        *,
        tolerance: int,
    ) -> Sequence[Candidate]:
        """The rule's candidates for x [n] of this profile, among these quotes, with its costs."""
        rate = 2 / max(costs.price_s_per_byte, 1e-15)
        swap = Swap(x.nbytes, rate, rate)
        by_name = {quote.codec: quote for quote in quotes}
        found = [replace(by_name["raw"], cost_s=swap.uncompressed_cost_s)]
        if not x.is_floating_point():
            return found
        zeros = taken.zero_fraction
        for quote in (by_name[name] for name in CODECS if name in by_name):
            encoded = sparse_bytes(x.nbytes, zeros) if quote.codec == "zvc" else quote.nbytes
            seconds = costs.model_s(quote.codec, taken)
            cost_s = swap.compressed_cost_s(encoded, seconds, 0.0)
            found.append(replace(quote, device_s=seconds, cost_s=cost_s))
        if tolerance == COARSE and zeros < DENSE:
            found += self._zfp(x, swap)
        return found

    def _zfp(self, x: torch.Tensor, swap: Swap) -> list[Candidate]:
        try:
            seconds = self._zfp_seconds(x)
        except CswapError:  # zfp is not here, or does not take this dtype
            return []
        self._dense.append(Dense(swap, seconds))
        if self.rate is None:
            return []
        bits = bits_per_value(self.rate)
        codec = get_codec(f"zfp:{bits}")
        if not takes(codec, x.dtype, x.device.type):
            return []
        encoded = dense_bytes(x.nbytes, bits, VALUE_BITS)
        cost_s = swap.compressed_cost_s(encoded, seconds, 0.0)
        return [Candidate(codec.name, x.nbytes / encoded, seconds, cost_s, encoded)]

    def _zfp_seconds(self, x: torch.Tensor) -> float:
        if self._zfp_s_per_byte is None:
            sample = normal(ZFP_SAMPLE, device=x.device)
            codec = get_codec("zfp")
            round_trip(codec, sample, repeat=1)
            _, encode_s, decode_s = round_trip(codec, sample)
            self._zfp_s_per_byte = (encode_s + decode_s) / sample.nbytes
        return self._zfp_s_per_byte * x.nbytes
