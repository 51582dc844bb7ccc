"""Tensors that may stay, so that a step's peak is as low as the time for swapping allows.

Note [the peak of a step]
~~~~~~~~~~~~~~~~~~~~~~~~~
The memory of saved tensors grows in forward. It falls in backward, which asks for the tensors in
the reverse order. When backward asks for a tensor that has left, three things are held: everything
that was saved before it, its encoding, and the tensor. The largest of these sums over the step is
its peak.

A tensor that stays instead adds its gain to the sums of all tensors saved after it, and takes its
own encoding out of its own sum. So the tensor that was saved last should stay. The same holds for
late tensors in a network whose first layers are the largest: the peak comes when backward reaches
those. To encode such a tensor takes time and lowers no peak.

For a given peak, tensors stay in the order of seconds for a byte, as long as no sum exceeds the
peak. The constraints are nested (a tensor adds to all sums after its own), so this greedy choice is
close to the best one. The peak is the lowest for which the tensors that leave keep the limit of
time; bisection finds it.

All of this takes for granted that backward comes next. Where it does not (two forwards and then
their backward, pipelines of micro-batches), late tensors wait as long as early ones.

Note [nodes with many tensors]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The backward of a compiled graph asks for all of its tensors at once. They all come back beside all
of their encodings, which autograd holds until the node has run, and beside the gradients that the
node's many operators compute. So they count in one sum, that of the node's last tensor. A model
that is compiled as one graph has its lowest peak if all of its tensors stay. Tensors of a node with
few count one by one, as those of other nodes do, and without gradients.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Sums = NDArray[np.float64]

ALIKE: Final = 1.3
"""Factor between the seconds for a byte of two tensors up to which their order decides."""

ROUNDS: Final = 12
"""Rounds of bisection: the peak is within 1/4096 of the range."""


class Leaver(NamedTuple):
    """A tensor that could leave.

    Attributes:
        moment: its number among the moments of the step.
        nbytes: of the tensor.
        gain: bytes fewer that are held while it is away.
        seconds: that its leaving and coming back take.
        returns: moment at which it counts as back: its own, or that of the last tensor of a node
            with many.
    """

    moment: int
    nbytes: int
    gain: float
    seconds: float
    returns: int


class Choice(NamedTuple):
    """A choice of tensors that stay.

    Attributes:
        staying: their numbers among the leavers.
        needless: those of them whose leaving would not lower the peak, had all others time.
        peak_bytes: of the step.
    """

    staying: frozenset[int]
    needless: frozenset[int]
    peak_bytes: float

    @property
    def limited(self) -> bool:
        """Whether the limit of time makes the peak higher than it could be."""
        return self.needless != self.staying


def rate_of(seconds: float, nbytes: float) -> int:
    """Seconds for a byte, in steps of `ALIKE`."""
    seconds_for_a_byte = seconds / nbytes
    if seconds_for_a_byte <= 0:
        return -sys.maxsize
    return math.floor(math.log(seconds_for_a_byte) / math.log(ALIKE))


class StepPeak:
    """The sums of one step. See Note [the peak of a step]."""

    def __init__(self, held: Sequence[float], leavers: Sequence[Leaver]) -> None:
        """The sums if every leaver leaves.

        Args:
            held: per moment, in the order of saving: bytes held when its tensor had been saved. The
                tensor's own bytes are included, or those of its encoding.
            leavers: tensors that could leave, at most one for each moment.
        """
        self._leavers = leavers
        self._sums = np.array(held, np.float64)
        for leaver in leavers:
            self._sums[leaver.returns] += leaver.nbytes
        self._add_gradients()
        self.lowest_bytes = float(self._sums.max(initial=0.0))
        self._needed = self._lower_the_peak()
        # Those that take the most seconds for a byte stay first; among like ones the latest.
        self._order = sorted(
            (n for n in range(len(leavers)) if n not in self._needed),
            key=lambda n: (rate_of(leavers[n].seconds, leavers[n].gain), leavers[n].moment),
            reverse=True,
        )

    def _add_gradients(self) -> None:
        n_of_node = Counter(leaver.returns for leaver in self._leavers)
        for leaver in self._leavers:
            if n_of_node[leaver.returns] > 1:
                self._sums[leaver.returns] += leaver.nbytes

    def within(self, limit_s: float) -> Choice:
        """The choice with the lowest peak whose leaving tensors take at most ``limit_s``.

        Where several have this peak: with the least time.
        """
        staying = self._stay_below(self.lowest_bytes)
        if self._seconds_without(staying) <= limit_s:
            return Choice(frozenset(staying), frozenset(staying), self.lowest_bytes)
        low = self.lowest_bytes
        high = low + sum(leaver.gain for leaver in self._leavers)
        staying = set(range(len(self._leavers)))
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            found = self._stay_below(middle)
            if self._seconds_without(found) <= limit_s:
                high, staying = middle, found
            else:
                low = middle
        return Choice(frozenset(staying), frozenset(self._needed), high)

    def _lower_the_peak(self) -> set[int]:
        # Those without whose encoding the peak is lower, from the last one saved to the first. When
        # a node's tensors stay, the peak may move to one that was looked at before: once more.
        sums, found = self._sums, set[int]()
        left = sorted(range(len(self._leavers)), key=lambda n: -self._leavers[n].moment)
        n_before = -1
        while len(found) != n_before:
            n_before = len(found)
            before = np.maximum.accumulate(sums)
            for n in left:
                if self._is_lower_with(sums, before, self._leavers[n]):
                    self._let_stay(sums, self._leavers[n])
                    found.add(n)
            left = [n for n in left if n not in found]
        self.lowest_bytes = float(sums.max(initial=0.0))
        return found

    def _is_lower_with(self, sums: Sums, before: Sums, leaver: Leaver) -> bool:
        # Whether the peak is lower if this one stays. before: largest sum until each moment.
        others = float(before[leaver.moment - 1]) if leaver.moment else -math.inf
        own, later = self._own_and_later(sums, leaver)
        encoding = leaver.nbytes - leaver.gain
        return max(later + leaver.gain, own - encoding, others) < max(later, own, others)

    @staticmethod
    def _own_and_later(sums: Sums, leaver: Leaver) -> tuple[float, float]:
        # The sum in which the leaver comes back, and the largest other one from its moment on.
        moment, returns = leaver.moment, leaver.returns
        later = float(sums[returns + 1 :].max(initial=-math.inf))
        if returns > moment:  # as few are
            later = max(later, float(sums[moment:returns].max()))
        return float(sums[returns]), later

    @staticmethod
    def _let_stay(sums: Sums, leaver: Leaver) -> None:
        sums[leaver.moment :] += leaver.gain
        sums[leaver.returns] -= leaver.nbytes

    def _stay_below(self, peak_bytes: float) -> set[int]:
        sums, staying = self._sums.copy(), set(self._needed)
        for n in self._order:
            leaver = self._leavers[n]
            _, later = self._own_and_later(sums, leaver)
            if later + leaver.gain <= peak_bytes:
                self._let_stay(sums, leaver)
                staying.add(n)
        return staying

    def _seconds_without(self, staying: set[int]) -> float:
        return sum(x.seconds for n, x in enumerate(self._leavers) if n not in staying)
