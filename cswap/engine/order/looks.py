"""Steps in which an engine looks at tensors for which a decision stands: `Stay`, `is_look`.

Note [a tensor that stays]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Where the advisor leaves a tensor in place, it will do so in the next steps, too: values and prices
change slowly. So the tensor that is saved at the same place in the next steps stays as well. It
gets no handle, which could be swapped, and the advisor is not asked. It is counted, and that is
all. Now and then it goes the general way again, with a new sample of its values, which takes 20
times as long.

In one step of `EVERY`, all tensors go the general way, those that have left before as well.

A tensor that shares the memory of one that stays has to stay as long: the memory stays for one of
them, so nothing is gained by swapping the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

Key: TypeAlias = tuple[int, int]
"""Position of a tensor in its step, and its bytes: steps of several sizes may take turns."""

EARLY: Final = (2, 4, 8, 16, 32)
"""The first steps in which tensors that stay are looked at: the first times are noisy."""

EVERY: Final = 61
"""Steps between two in which every tensor is looked at. A goal has a measure of its own. It is a
prime: calls of several kinds that come in turns are all looked at."""


def is_look(step: int) -> bool:
    """Whether every tensor of this step is looked at."""
    return step > 0 and step % EVERY == 0


def last_look(step: int) -> int:
    """The last step, up to this one, in which tensors that stay are looked at.

    >>> [last_look(step) for step in (2, 3, 44, 60, 61, 130)]
    [2, 2, 32, 32, 61, 122]
    """
    return step - step % EVERY or max((n for n in EARLY if n <= step), default=0)


@dataclass(frozen=True, slots=True)
class Stay:
    """The tensor of a place in the step stays for some steps.

    Attributes:
        since: step in which that was decided.
        reason: a name in `cswap.stats.keep_reasons`.
        key: number of the tensor in the step and bytes of its memory, by which a budget knows it.
        shares: the memory is that of another tensor, which stays.
    """

    since: int
    reason: str
    key: Key
    shares: bool = False
