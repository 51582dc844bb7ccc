"""What the advisor is told of an engine's steps: when one begins, times, bytes held."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cswap.advisor.time_limit import Moment
from cswap.engine.saved.packed import PackedView
from cswap.engine.saved.without_handle import WithoutHandle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.advisor.gains import Key
    from cswap.engine.saved.packed import Kept
    from cswap.engine.saved.unread import Unread
    from cswap.engine.state import EngineState


class StepNotes:
    """The notes of one engine.

    Attributes:
        reports: see `TimeLimit`; None: there is no limit.
    """

    def __init__(self, state: EngineState) -> None:
        """Args: state: the engine's."""
        self._state, self._counters, self._order = state, state.counters, state.order
        limit = state.advisor.limit
        self.reports = None if limit is None else limit.reports
        self._unseen_bytes = 0  # of tensors that stay uncounted, in a step that reports
        self._begun = -1  # number of the step that has begun last
        self._ended = self._moment()

    def begin(self) -> None:
        """The first tensor of a step is being saved, or will be: the step begins, for a plan, too.

        A second time in a step does nothing.
        """
        if self._begun == self._order.step:
            return
        self._begun = self._order.step
        self._unseen_bytes = 0
        self._state.follower.begin_step()
        moment = self._moment()  # first, since it counts what was not counted yet
        exposed_s = self._counters.exposed_s + self._state.lanes.stalled_s
        self._state.advisor.begin_step(exposed_s, (moment, self._ended))

    def end_backward(self) -> None:
        """A backward has ended: a step's time is measured until then."""
        self._ended = self._moment()

    def saved(self, packed: Kept | PackedView | Unread | WithoutHandle) -> None:
        """A tensor has been saved, in a step that reports.

        Those that share another one's memory are no news.
        """
        reports, key = self.reports, None
        if isinstance(packed, PackedView):
            handle = packed.token.handle
            if handle.views == 1 and handle.position == self._order.position - 1:
                key = handle.position, handle.raw_nbytes
        elif isinstance(packed, WithoutHandle) and packed.first is None:
            key = packed.position, packed.nbytes
        if key is not None and reports is not None:
            reports.holds(key, self._counters.held_bytes + self._unseen_bytes)

    def saved_unseen(self, tensors: Iterable[Key]) -> None:
        """Tensors that stay are saved without a look, one after the other."""
        reports = self.reports
        if reports is not None and reports.wanted:
            held_bytes = self._counters.held_bytes
            for position, nbytes in tensors:
                self._unseen_bytes += nbytes
                reports.holds((position, nbytes), held_bytes + self._unseen_bytes)

    def _moment(self) -> Moment:
        counters = self._counters
        counters.count_kept()
        saved = counters.packed - counters.n_unseen
        return Moment(time.perf_counter(), counters.leaving_s, counters.staying_s, saved)
