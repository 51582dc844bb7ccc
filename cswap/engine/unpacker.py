"""From a packed object back to the saved tensor: the stage of unpack.

A tensor's way is: handle, memory, view.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from cswap.dynamo import leave_alone
from cswap.engine.order.step_order import NO_BACKWARD
from cswap.engine.saved.apart import Apart
from cswap.engine.saved.packed import Kept, PackedView, Token
from cswap.engine.saved.unread import Unread

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.engine.saved.without_handle import WithoutHandle
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
        self._order = state.order
        self._deaths = state.reclaimer.deaths
        self._counters, self._outliving = state.counters, state.outliving
        self._at_end = at_end
        self._recomputer, self._results = state.recomputer, state.results
        self._unread = state.unread
        self.backward = NO_BACKWARD

    @leave_alone
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
            if self._deaths or state.interrupted:
                state.tidy(in_step=True)
            if _current_backward() != self.backward:
                self._note_backward()
            self._recomputer.inputs_s = 0.0
            tensor = self._bring(packed, start_s)
            if chooser is not None and isinstance(packed, PackedView):
                chooser.unpacked(packed, tensor, entered)
        except Exception:
            raise
        except BaseException:
            state.interrupted = True
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

    def _bring(self, packed: PackedView | WithoutHandle, start_s: float) -> torch.Tensor:
        first, in_backward = packed.owner(), self.backward != NO_BACKWARD
        waited = first.result is not None
        if not first.uses:
            self._order.asked_since_pack = True
            if isinstance(first, Token):
                base, outliving = first.handle.base, self._outliving
                is_held = base is not None and base() is not None
                # Outside of a backward somebody looks at a node, whose tensor exists of course.
                if (is_held or outliving.known) and in_backward:
                    outliving.note(first)
        memory, own = self._recomputer.bring(first)
        tensor = packed.rebuild(memory, own=own)
        if not (first.uses or waited or own or first.over_link):  # a link counts for itself
            self._counters.hits.append(False)
        first.uses += 1
        if (first.users > 1 or waited) and not own and in_backward:
            self._results.asked(first, memory)
        if self._unread.seeks and in_backward and isinstance(packed, PackedView):
            self._unread.note(packed)
        first.took_s += _now() - start_s - self._recomputer.inputs_s
        took = self._state.took
        if took is not None and first.uses == first.users and not first.stays:
            took.append((first.position, first.nbytes, first.took_s))
        return tensor

    def _begin_backward(self) -> None:
        # The last tensors of forward often stay, and nothing else is asked for at its peak.
        self._state.backward_is_next = False
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
