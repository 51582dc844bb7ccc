"""Pricing rules: how candidates are compared. The option ``policy`` names one.

``policy="auto"`` takes the predicted costs as they are. The other rules exist for comparison.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final, Protocol

from cswap.advisor.cswap_plus_pricing import CswapPlusPricing
from cswap.display import shown
from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cswap.advisor.cost import Candidate
    from cswap.advisor.live_costs import LiveCosts


class Pricing(Protocol):
    """A pricing rule; the advisor takes the cheapest candidate.

    Attributes:
        reason: reason of the choice, in words.
        per_epoch: whether the advisor samples values once per epoch only.
    """

    reason: str
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
    per_epoch = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], costs: LiveCosts, *, tolerance: int
    ) -> Sequence[Candidate]:
        """See `Pricing.price`."""
        return quotes


class Raw(_NoEpochs):
    """Raw alone: every tensor is moved without a codec, as vDNN does."""

    reason = "policy raw"
    per_epoch = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], costs: LiveCosts, *, tolerance: int
    ) -> Sequence[Candidate]:
        """See `Pricing.price`."""
        return [quote for quote in quotes if quote.codec == "raw"]


PRICINGS: Final[dict[str, type[Pricing]]] = {
    "auto": Auto,
    "cswap+": CswapPlusPricing,
    "raw": Raw,
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
