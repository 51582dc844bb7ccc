"""The cheapest of the priced candidates, where it is cheaper by enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.advisor.live_costs import KEEP

if TYPE_CHECKING:
    from cswap.advisor.cost import Candidate

MARGIN: Final = 0.05
"""Share by which a codec must be cheaper than leaving the tensor in place."""

HYSTERESIS: Final = 0.05
"""Share by which a codec must be cheaper than the codec in use."""


def cheapest(
    candidates: tuple[Candidate, ...], why: str, used: str | None
) -> tuple[Candidate, str]:
    """The candidate to be taken, and the reason.

    Args:
        candidates: the cheapest first.
        why: the reason for the first one.
        used: codec in use; None: there is none.
    """
    best = candidates[0]
    stay = next((c for c in candidates if c.codec == KEEP), None)
    if stay is not None and best.cost_s > (1 - MARGIN) * stay.cost_s:
        best, why = stay, f"nothing pays by {MARGIN:.0%}"
    current = next((c for c in candidates if c.codec == used), None)
    if current is None or current.codec == best.codec:
        return best, why
    margin = MARGIN if best.codec == KEEP else 0.0  # KEEP is best where none beats it by MARGIN
    if (1 - HYSTERESIS) * current.cost_s < (1 - margin) * best.cost_s:
        return current, f"no other is cheaper by {HYSTERESIS:.0%}"
    return best, why
