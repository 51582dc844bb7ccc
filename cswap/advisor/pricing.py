"""How candidates are priced: the rule behind ``policy=...``.

``auto`` takes them as the market quotes them. The others are what it is compared with.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final, Protocol

from cswap.advisor.cost import Candidate
from cswap.advisor.cswap_plus_policy import CswapPlus
from cswap.advisor.live_costs import KEEP
from cswap.advisor.round_trip import round_trip
from cswap.codecs.registry import get_codec
from cswap.display import shown
from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cswap.advisor.live_costs import Market

LOSSLESS: Final = ("zvc", "zvc+expk", "expk", "bitpack", "rle", "csr")
"""Codecs that the advisor considers for any tensor that they take."""


class Policy(Protocol):
    """Prices candidates; the cheapest is chosen.

    Attributes:
        reason: why, in words.
        explores: whether codecs may be tried to learn their times.
        per_epoch: whether values are sampled when an epoch begins, and only then.
    """

    reason: str
    explores: bool
    per_epoch: bool

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market, *, lossy_ok: bool
    ) -> Sequence[Candidate]:
        """The candidates among these quotes for x [n], with this policy's costs; at least one."""
        ...

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Epoch ``epoch`` (from 0) of ``epochs`` begins."""
        ...


class _NoEpochs:
    """What most policies do when an epoch begins: nothing."""

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """See `Policy.begin_epoch`."""


class Auto(_NoEpochs):
    """Lowest predicted cost."""

    reason = "lowest predicted cost"
    explores = True
    per_epoch = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market, *, lossy_ok: bool
    ) -> Sequence[Candidate]:
        """See `Policy.price`."""
        return quotes


class Raw(_NoEpochs):
    """No codec at all: vDNN's mechanism."""

    reason = "policy raw"
    explores = False
    per_epoch = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market, *, lossy_ok: bool
    ) -> Sequence[Candidate]:
        """See `Policy.price`."""
        return [quote for quote in quotes if quote.codec == "raw"]


class Oracle(_NoEpochs):
    """True costs: every candidate is run on every tensor that is sampled. Slow, for evaluation."""

    reason = "lowest measured cost"
    explores = False
    per_epoch = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market, *, lossy_ok: bool
    ) -> Sequence[Candidate]:
        """See `Policy.price`."""
        return [quote if quote.codec == KEEP else _measured(x, quote, market) for quote in quotes]


def _measured(x: torch.Tensor, quote: Candidate, market: Market) -> Candidate:
    codec = get_codec(quote.codec)
    round_trip(codec, x[:64].clone(), repeat=1)  # compiles
    nbytes, encode_s, decode_s = round_trip(codec, x)
    device_s = encode_s + decode_s
    cost_s = device_s + market.price_s_per_byte * nbytes
    return Candidate(quote.codec, x.nbytes / max(nbytes, 1), device_s, cost_s, nbytes)


POLICIES: Final[dict[str, type[Policy]]] = {
    "auto": Auto,
    "cswap+": CswapPlus,
    "raw": Raw,
    "oracle": Oracle,
}


def make_policy(name: str) -> Policy:
    """The policy of that name; ``static:CODEC`` is the codec forced, and raw where it cannot be.

    Raises:
        ConfigError: there is none of that name.
    """
    if static_codec(name) is not None:
        return Raw()
    if name not in POLICIES:
        close = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"policy={shown(name)}: must be one of {', '.join(POLICIES)}, static:CODEC.{hint}"
        )
    return POLICIES[name]()


def static_codec(name: str) -> str | None:
    """CODEC of ``static:CODEC``; None for other policies.

    >>> static_codec("static:zvc"), static_codec("auto")
    ('zvc', None)
    """
    kind, colon, codec = name.partition(":")
    return codec if kind == "static" and colon else None
