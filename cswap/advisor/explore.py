"""Exploration: a codec that has hardly been measured is tried, within a small budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.advisor.live_costs import KEEP, REFIT_EVERY
from cswap.codecs.registry import get_codec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cswap.advisor.cost import Candidate
    from cswap.advisor.live_costs import Market
    from cswap.advisor.site_history import SiteMemory

SHARE: Final = 0.005
"""Of a step's time that trials of one step may cost more than the choices they replace."""

DOUBT: Final = 0.3
"""Of a codec's predicted time that may be wrong before it was ever measured here."""

ENOUGH: Final = 3
"""Measurements of a codec after which nothing is doubted."""

LOOK_AT: Final = 4
"""Sites that are considered at a time."""


def trial_at(used: Sequence[SiteMemory], step_s: float, markets: Mapping[str, Market]) -> None:
    """Let some of the sites try another lossless codec once, the next time that they are used.

    Args:
        used: sites in the step before; which of them are looked at goes round with the steps.
        step_s: seconds of a step; `SHARE` of it is what trials may cost.
        markets: by kind of device.
    """
    allowance_s = SHARE * step_s
    if not used:
        return
    market = next(iter(markets.values()))
    first = market.steps // REFIT_EVERY * LOOK_AT
    for i in range(min(LOOK_AT, len(used))):
        memory = used[(first + i) % len(used)]
        chosen = _chosen(memory)
        if chosen is None:
            continue
        for candidate in memory.explanation.candidates:
            extra_s = candidate.cost_s - chosen.cost_s
            if extra_s <= allowance_s and _is_worth_it(candidate, chosen, market):
                memory.trial = get_codec(candidate.codec)
                allowance_s -= max(0.0, extra_s)
                break


def _chosen(memory: SiteMemory) -> Candidate | None:
    candidates = memory.explanation.candidates
    return next((c for c in candidates if c.codec == memory.explanation.codec), None)


def _is_worth_it(candidate: Candidate, chosen: Candidate, market: Market) -> bool:
    # Whether it could be the cheapest, if its time is overestimated.
    if candidate.codec in (KEEP, chosen.codec) or not get_codec(candidate.codec).lossless:
        return False
    known = market.corrections.count(candidate.codec)
    if known >= ENOUGH:
        return False
    return candidate.cost_s - DOUBT * candidate.device_s < chosen.cost_s
