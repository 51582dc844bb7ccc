"""Pricing rules: how candidates are compared. The option ``policy`` names one.

``policy="auto"`` takes the predicted costs as they are. The other rules exist for comparison.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final, Protocol

from cswap.advisor.cost import Candidate
from cswap.advisor.cswap_plus_pricing import CswapPlusPricing
from cswap.advisor.live_costs import KEEP
from cswap.advisor.round_trip import round_trip
from cswap.codecs.registry import get_codec
from cswap.display import shown
from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cswap.advisor.live_costs import LiveCosts


class Pricing(Protocol):
    """A pricing rule; the advisor takes the cheapest candidate.

    Attributes:
        reason: reason of the choice, in words.
        explores: whether the advisor may try codecs to learn their times.
        per_epoch: whether the advisor samples values once per epoch only.
    """

    reason: str
    explores: bool
    per_epoch: bool

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], costs: LiveCosts, *, tolerance: int
    ) -> Sequence[Candidate]:
        """The candidates for x [n] among these quotes, with this rule's costs; at least one."""
        ...

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Epoch ``epoch`` (from 0) of ``epochs`` begins."""
        ...


class _NoEpochs:
    """Base of the rules that do not depend on the epoch."""

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """See `Pricing.begin_epoch`."""


class Auto(_NoEpochs):
    """The predicted costs."""

    reason = "lowest predicted cost"
    explores = True
    per_epoch = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], costs: LiveCosts, *, tolerance: int
    ) -> Sequence[Candidate]:
        """See `Pricing.price`."""
        return quotes


class Raw(_NoEpochs):
    """Raw alone: every tensor is moved without a codec, as vDNN does."""

    reason = "policy raw"
    explores = False
    per_epoch = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], costs: LiveCosts, *, tolerance: int
    ) -> Sequence[Candidate]:
        """See `Pricing.price`."""
        return [quote for quote in quotes if quote.codec == "raw"]


class Oracle(_NoEpochs):
    """Measured costs: every candidate runs on every sampled tensor. Slow, for evaluation."""

    reason = "lowest measured cost"
    explores = False
    per_epoch = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], costs: LiveCosts, *, tolerance: int
    ) -> Sequence[Candidate]:
        """See `Pricing.price`."""
        return [quote if quote.codec == KEEP else _measured(x, quote, costs) for quote in quotes]


def _measured(x: torch.Tensor, quote: Candidate, costs: LiveCosts) -> Candidate:
    codec = get_codec(quote.codec)
    round_trip(codec, x[:64].clone(), repeat=1)  # compiles
    nbytes, encode_s, decode_s = round_trip(codec, x)
    device_s = encode_s + decode_s
    cost_s = device_s + costs.price_s_per_byte * nbytes
    return Candidate(quote.codec, x.nbytes / max(nbytes, 1), device_s, cost_s, nbytes)


PRICINGS: Final[dict[str, type[Pricing]]] = {
    "auto": Auto,
    "cswap+": CswapPlusPricing,
    "raw": Raw,
    "oracle": Oracle,
}
"""Pricing rules by value of the option ``policy``."""


def make_pricing(policy: str) -> Pricing:
    """The pricing rule for the option ``policy``.

    ``static:CODEC`` forces the codec (`static_codec`), and prices raw alone where it cannot.

    Raises:
        ConfigError: there is no rule of that name.
    """
    if static_codec(policy) is not None:
        return Raw()
    if policy not in PRICINGS:
        close = difflib.get_close_matches(policy, PRICINGS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"policy={shown(policy)}: must be one of {', '.join(PRICINGS)}, static:CODEC.{hint}"
        )
    return PRICINGS[policy]()


def static_codec(policy: str) -> str | None:
    """CODEC of ``static:CODEC``; None for other values of the option ``policy``.

    >>> static_codec("static:zvc"), static_codec("auto")
    ('zvc', None)
    """
    kind, colon, codec = policy.partition(":")
    return codec if kind == "static" and colon else None
