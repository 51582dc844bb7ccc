"""`Rest`: a place in the step whose tensor stays for several steps without being looked at.

Note [a tensor that rests]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Where the advisor or the limit of a step's time leaves a tensor in place, it will do so in the next
steps, too: values, prices and times change slowly. So the place in the step where it was saved
rests. The tensor that is saved there in the next steps gets no handle, which could be swapped, and
the advisor is not asked. It is counted, and that is all. After `FIRST_STEPS` it goes the general
way again, with a new sample of its values; if it stays then, too, the place rests for `GROWTH`
times as many steps, up to `MOST_STEPS`. A tensor that the limit no longer keeps ends its rest at
once: in the first thirty steps, a rest would be most of the time.

A tensor that shares the memory of one that rests has to rest as long: the memory stays for one of
them, so nothing is gained by swapping the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FIRST_STEPS: Final = 2
"""Steps for which a place rests at first: few, since the first measured times are noisy."""

GROWTH: Final = 4
"""Factor between two rests: a look takes 20 times as long as a rest."""

MOST_STEPS: Final = 64
"""Most steps for which a place rests."""


@dataclass(frozen=True, slots=True)
class Rest:
    """A place in the step whose tensor stays.

    Attributes:
        since: first step in which it rests.
        steps: for how many.
        reason: for which its tensor stays, a name in `cswap.stats.keep_reasons`.
        limited: number of the tensor in the step and bytes of its memory, by which the limit knows
            it.
        until: first step in which it no longer rests.
    """

    since: int
    steps: int = FIRST_STEPS
    reason: str = "does_not_pay"
    limited: tuple[int, int] = (0, 0)
    until: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "until", self.since + self.steps)

    def longer(
        self, step: int, reason: str = "does_not_pay", limited: tuple[int, int] = (0, 0)
    ) -> Rest:
        """The rest of a place whose tensor stays again."""
        return Rest(step + 1, min(GROWTH * self.steps, MOST_STEPS), reason, limited)
