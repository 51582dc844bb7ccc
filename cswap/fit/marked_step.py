"""A step in which every tensor stays, and every hook leaves a mark: `MarkedStep`.

Note [times of a host that is ahead]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In an explored step the host is slow, and a GPU waits for it between any two tensors. So the time
between its events there is the host's. A marked step has the same hooks, which do next to nothing:
the host is ahead as in a plain step, and the events tell the time of the computation. It needs the
memory of a plain step. Where the host is not ahead, the device has waited for the hook, too: that
time is taken out. A hook takes longer than its mark, by a factor that nobody sees at one hook. It
is the one with which the step takes as long as a plain one, which was timed before.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from cswap.dynamo import leave_alone
from cswap.engine.saved.packed import Kept
from cswap.fit.problem import Times

if TYPE_CHECKING:
    import torch

    from cswap.devices.stopwatch import Stopwatch
    from cswap.engine.engine import SwapEngine
    from cswap.fit.seen import Step

LEAST_AHEAD_S: Final = 3e-5
"""The host is ahead of the device if it is by so much: by two or three operators."""

MOST_PER_MARK: Final = 16.0
"""Most seconds of a hook, over those of its mark."""

HALVINGS: Final = 12
"""Of the interval in which this factor lies."""


class Marked(NamedTuple):
    """The object that autograd holds. Attributes: number: of the save; kept: its tensor."""

    number: int
    kept: Kept


class _Interval(NamedTuple):
    """Seconds from one mark to the next: of the device, of the host without marks, of the mark."""

    moment: int
    device_s: float
    host_s: float
    mark_s: float


class MarkedStep:
    """The hooks of one step, in the place of the engine's. See the Note."""

    def __init__(self, engine: SwapEngine, watch: Stopwatch) -> None:
        """Args: engine: whose hooks these are not; watch: of its device."""
        self._engine, self._watch = engine, watch
        self._n_saved, self._is_on = 0, True
        self._marks: list[tuple[int, bool, Any]] = []  # number of the save, whether it is its use

    def pack(self, tensor: torch.Tensor) -> Marked:
        """The tensor stays."""
        number = self._n_saved
        self._n_saved += 1
        if self._is_on:
            self._marks.append((number, False, self._watch.mark()))
        return Marked(number, self._engine.pass_through(tensor))

    @leave_alone
    def unpack(self, marked: Marked | Kept) -> torch.Tensor:
        """The tensor. Args: marked: `Kept` by hooks that an interrupt has left on the stack.

        Raises:
            RuntimeError: autograd's own: it was modified in place since it was saved.
        """
        if isinstance(marked, Kept):
            return marked.unpack()
        if self._is_on:
            self._marks.append((marked.number, True, self._watch.mark()))
        return marked.kept.unpack()

    def stop(self) -> None:
        """Mark nothing more: the step's graph may live on."""
        self._is_on = False
        self._marks.clear()

    def times(self, explored: Step, step: Step, plain_s: float) -> Times | None:
        """The times at the moments of an explored step.

        Args:
            explored: the other step.
            step: the record of this one, which has ended.
            plain_s: seconds of a plain step.

        Returns:
            None: they did not save and use the same tensors in the same order.
        """
        stays = [lap.stays for lap in explored.laps if not lap.is_use]
        if len(stays) != self._n_saved or not stays:
            return None
        # Nobody sees the use of a tensor that stays in an explored step.
        marks = [(is_use, mark) for n, is_use, mark in self._marks if not (is_use and stays[n])]
        if [lap.is_use for lap in explored.laps] != [is_use for is_use, _ in marks]:
            return None
        n_moments, watch = explored.n_moments, self._watch
        moments = [min(lap.moment, n_moments - 1) for lap in explored.laps]
        first_s = watch.seconds(step.began, marks[0][1])  # in which nobody is ahead
        intervals = [
            _Interval(moments[0], first_s, first_s, 0.0),
            # A mark ends before it begins.
            *(
                _Interval(
                    m, watch.seconds(a, b), watch.host_seconds(a, b), -watch.host_seconds(a, a)
                )
                for m, ((_, a), (_, b)) in zip(moments[1:], pairwise(marks), strict=True)
            ),
        ]
        least, most = 1.0, MOST_PER_MARK
        times = _without_hooks(intervals, n_moments, step.step_s, least)
        for _ in range(HALVINGS if times.step_s > plain_s else 0):
            per_mark = (least + most) / 2
            times = _without_hooks(intervals, n_moments, step.step_s, per_mark)
            least, most = (per_mark, most) if times.step_s > plain_s else (least, per_mark)
        return times


def _without_hooks(
    intervals: list[_Interval], n_moments: int, step_s: float, per_mark: float
) -> Times:
    # The times of a marked step without its hooks, which take so many times their marks.
    durations, ahead = np.zeros(n_moments), np.zeros(n_moments)
    lead_s = marked_lead_s = 0.0  # of the host, without the marks and with them
    for moment, device_s, host_s, mark_s in intervals:
        marked_lead_s = max(0.0, marked_lead_s + device_s - host_s - mark_s)
        waited_s = min(per_mark * mark_s, device_s) if marked_lead_s < LEAST_AHEAD_S else 0.0
        device_s -= waited_s
        step_s -= waited_s
        lead_s = max(0.0, lead_s + device_s - host_s)
        durations[moment] += device_s
        ahead[moment:] = lead_s
    return Times(durations, ahead, max(step_s, 1e-9))
