"""Exploration: try codecs with few measurements, within a small budget of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.advisor.live_costs import KEEP, REFIT_EVERY
from cswap.codecs.registry import get_codec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cswap.advisor.cost import Candidate
    from cswap.advisor.live_costs import LiveCosts
    from cswap.advisor.site_history import SiteMemory

SHARE: Final = 0.005
"""Share of a step's time that trials may cost in addition to the choices that they replace."""

DOUBT: Final = 0.3
"""Share of a codec's predicted time that may be wrong before it was measured here."""

ENOUGH: Final = 3
"""Measurements of a codec after which its predicted time is trusted."""

LOOK_AT: Final = 4
"""Call sites considered per call."""


def trial_at(used: Sequence[SiteMemory], step_s: float, costs_on: Mapping[str, LiveCosts]) -> None:
    """Let some call sites try another lossless codec once, the next time that they are used.

    Args:
        used: call sites of the step before. Each call looks at the next `LOOK_AT` of them.
        step_s: seconds of a step; trials may cost `SHARE` of it.
        costs_on: by kind of device.
    """
    allowance_s = SHARE * step_s
    if not used:
        return
    costs = next(iter(costs_on.values()))
    first = costs.steps // REFIT_EVERY * LOOK_AT
    for i in range(min(LOOK_AT, len(used))):
        memory = used[(first + i) % len(used)]
        chosen = _chosen(memory)
        if chosen is None:
            continue
        for candidate in memory.explanation.candidates:
            extra_s = candidate.cost_s - chosen.cost_s
            if extra_s <= allowance_s and _is_worth_it(candidate, chosen, costs):
                memory.trial = get_codec(candidate.codec)
                allowance_s -= max(0.0, extra_s)
                break


def _chosen(memory: SiteMemory) -> Candidate | None:
    candidates = memory.explanation.candidates
    return next((c for c in candidates if c.codec == memory.explanation.codec), None)


def _is_worth_it(candidate: Candidate, chosen: Candidate, costs: LiveCosts) -> bool:
    # Whether the candidate could be the cheapest, if its predicted time is too high.
    if candidate.codec in (KEEP, chosen.codec) or not get_codec(candidate.codec).lossless:
        return False
    known = costs.corrections.count(candidate.codec)
    if known >= ENOUGH:
        return False
    return candidate.cost_s - DOUBT * candidate.device_s < chosen.cost_s
