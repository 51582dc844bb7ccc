"""From a packed object back to the saved tensor: the stage of unpack.

A tensor's way is: handle, memory, view.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from cswap.engine.order.step_order import NO_BACKWARD
from cswap.engine.saved.apart import Apart
from cswap.engine.saved.away import Away
from cswap.engine.saved.packed import Kept, PackedView
from cswap.engine.saved.reclaim import MOST_LATER
from cswap.engine.saved.unread import Unread
from cswap.engine.saved.without_handle import WithoutHandle
from cswap.engine.transfer.handle import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.engine.saved.packed import Token
    from cswap.engine.state import EngineState

_now = time.perf_counter
_current_backward = torch._C._current_graph_task_id  # noqa: SLF001


class Unpacker:
    """Unpacks the tensors of one engine.

    Attributes:
        backward: torch's number of the one that has asked last.
    """

    def __init__(self, state: EngineState, at_end: Callable[[], None]) -> None:
        """Args: state: the engine's; at_end: called at the end of every backward."""
        self._state = state
        self._lock, self._order = state.lock, state.order
        self._deaths, self._later = state.reclaimer.deaths, state.reclaimer.later
        self._counters, self._outliving = state.counters, state.outliving
        self._at_end = at_end
        self._recomputer, self._results = state.recomputer, state.results
        self._recomputer.note_ready = self._note_ready
        self._unread = state.unread
        self.backward = NO_BACKWARD

    def unpack(self, packed: Kept | PackedView | Unread | Apart | WithoutHandle) -> torch.Tensor:
        """See `SwapEngine.unpack`."""
        state = self._state
        chooser = state.chooser
        if isinstance(packed, Kept):
            if chooser is not None:
                chooser.used()
            if state.backward_is_next and _current_backward() != NO_BACKWARD:
                self._begin_with_kept()
            version = packed.version
            if version >= 0 and packed.tensor._version != version:  # noqa: SLF001
                return packed.unpack()  # which raises; a call for each tensor that stays is saved
            return packed.tensor
        if isinstance(packed, Unread):
            return self._bring_unread(packed)
        if isinstance(packed, Apart):
            return packed.unpack(self.unpack)
        try:
            entered = None if chooser is None else chooser.enter()
            start_s = _now()
            if self._deaths or len(self._later) > MOST_LATER or state.interrupted:
                state.tidy(in_step=True)
            if _current_backward() != self.backward:
                self._note_backward()
            if isinstance(packed, WithoutHandle):
                return self._bring_without_handle(packed, start_s)
            self._recomputer.inputs_s = 0.0
            tensor = self._bring(packed)
            if self._unread.seeks and self.backward != NO_BACKWARD:
                self._unread.note(packed)
            packed.token.handle.took_s += _now() - start_s - self._recomputer.inputs_s
            if chooser is not None:
                chooser.unpacked(packed, tensor, entered)
        except Exception:
            raise
        except BaseException:
            self._state.interrupted = True
            raise
        return tensor

    def _bring_unread(self, packed: Unread) -> torch.Tensor:
        state = self._state
        if packed.tensor is not None:
            state.unread.asked(packed)
        if state.backward_is_next and _current_backward() != NO_BACKWARD:
            self._begin_with_kept()
        tensor = packed.unpack()
        if state.chooser is not None:
            state.chooser.used(tensor if packed.tensor is None else None)
        return tensor

    def _bring_without_handle(self, packed: WithoutHandle, start_s: float) -> torch.Tensor:
        first = packed.first or packed
        if not first.uses:
            self._order.asked_since_pack = True
        recomputer = self._recomputer
        recomputer.inputs_s = 0.0
        packed.check()
        if not first.uses and not isinstance(first, Away):  # those count for themselves
            self._counters.hits.append(False)
        waited = first.result is not None
        memory = first.waiting() if waited else None
        if memory is None:
            memory = recomputer.memory(first)
        first.uses += 1
        shared = (first.users > 1 or waited) and _current_backward() != NO_BACKWARD
        if shared and not (isinstance(first, Away) and first.region.source is not None):
            self._results.asked(first, memory)
        first.took_s += _now() - start_s - recomputer.inputs_s
        took = self._state.took
        if took is not None and first.uses == first.users:
            took.append((first.position, first.nbytes, first.took_s))
        return packed.view_of(memory)

    def _bring(self, packed: PackedView) -> torch.Tensor:
        token = packed.token
        handle, lane = token.handle, token.lane
        if handle.modified():
            packed.raise_modified()
        if handle.unpacked == 0:
            base, outliving = handle.base, self._outliving
            is_held = base is not None and base() is not None
            # Outside of a backward somebody looks at a node, whose tensor exists of course.
            if (is_held or outliving.known) and self.backward != NO_BACKWARD:
                outliving.note(token)
            self._order.asked_since_pack = True
        memory, own = lane.executor.memory(handle)
        out = packed.rebuild(memory, own=own)
        with self._lock:
            handle.unpacked += 1
            last = handle.unpacked % (handle.views or 1) == 0
            if last and lane.ready.waiting:
                lane.ready.remove(handle)
        if not last:
            if not own:
                self._note_ready(token)
        elif handle.state is State.READY:
            lane.executor.drop_result(handle)
        return out

    def _note_ready(self, token: Token) -> None:
        lane = token.lane
        with self._lock:
            dropped = lane.ready.add(token.handle)
        for other in dropped:
            lane.executor.drop_result(other)

    def _begin_backward(self) -> None:
        # The last tensors of forward often stay, and nothing else is asked for at its peak.
        self._state.backward_is_next = False
        self._state.lanes.trim_scratch()  # nothing is encoded in backward
        self._counters.begin_backward()

    def _begin_with_kept(self) -> None:
        self._begin_backward()
        for link in self._state.lanes.links:
            link.start_first()

    def _note_backward(self) -> None:
        # Once per backward: when it ends, all that its graph held is gone.
        backward: int = _current_backward()
        self.backward = backward
        for link in self._state.lanes.links:
            link.begin_backward()
        if backward != NO_BACKWARD:
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end)  # noqa: SLF001
