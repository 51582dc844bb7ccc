"""How candidates are priced: the rule behind ``policy=...``.

``auto`` takes them as the market quotes them. The others are what it is compared with.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from cswap.advisor.cost import Candidate
from cswap.advisor.cswap_plus import Swap, sparse_bytes
from cswap.advisor.market import KEEP
from cswap.advisor.trial import round_trip
from cswap.codecs.registry import get_codec
from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cswap.advisor.market import Market

LOSSLESS: Final = ("zvc", "zvc+expk", "expk", "bitpack", "rle", "csr")
"""Codecs that the advisor considers for any tensor that they take."""


class Policy(Protocol):
    """Prices candidates; the cheapest is chosen.

    Attributes:
        reason: why, in words.
        explores: whether codecs may be tried to learn their times.
    """

    reason: str
    explores: bool

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market
    ) -> Sequence[Candidate]:
        """The candidates among these quotes for x [n], with this policy's costs; at least one."""
        ...


class Auto:
    """Lowest predicted cost."""

    reason = "lowest predicted cost"
    explores = True

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market
    ) -> Sequence[Candidate]:
        """See `Policy.price`."""
        return quotes


class Raw:
    """No codec at all: vDNN's mechanism."""

    reason = "policy raw"
    explores = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market
    ) -> Sequence[Candidate]:
        """See `Policy.price`."""
        return [quote for quote in quotes if quote.codec == "raw"]


class Oracle:
    """True costs: every candidate is run on every tensor that is sampled. Slow, for evaluation."""

    reason = "lowest measured cost"
    explores = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market
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


class CswapPlus:
    """The paper's rule (cswap_plus.py): ZVC if that shortens the swap of this tensor, else raw.

    Its link is what the price of a byte stands for, and hides nothing: what a layer's computation
    would hide is not known per tensor here (the planner's ``cswap+`` knows it from a trace).
    """

    reason = "CSwap+'s rule"
    explores = False

    def price(
        self, x: torch.Tensor, quotes: Sequence[Candidate], market: Market
    ) -> Sequence[Candidate]:
        """See `Policy.price`."""
        raw = next(quote for quote in quotes if quote.codec == "raw")
        zvc = next((quote for quote in quotes if quote.codec == "zvc"), None)
        rate = 2 / max(market.price_s_per_byte, 1e-15)
        swap = Swap(x.nbytes, rate, rate)
        costs = [replace(raw, cost_s=swap.uncompressed_cost_s)]
        if zvc is not None and x.is_floating_point():
            encoded = min(sparse_bytes(x.nbytes, 1 - 1 / zvc.ratio), x.nbytes)
            costs.append(replace(zvc, cost_s=swap.compressed_cost_s(encoded, zvc.device_s, 0.0)))
        return costs


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
            f"policy={name!r}: must be one of {', '.join(POLICIES)}, static:CODEC.{hint}"
        )
    return POLICIES[name]()


def static_codec(name: str) -> str | None:
    """CODEC of ``static:CODEC``; None for other policies.

    >>> static_codec("static:zvc"), static_codec("auto")
    ('zvc', None)
    """
    kind, colon, codec = name.partition(":")
    return codec if kind == "static" and colon else None
