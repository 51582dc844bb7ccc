"""`Replay`: an engine's two hooks. Most steps repeat the one before, slot by slot.

Note [a step is repeated]
~~~~~~~~~~~~~~~~~~~~~~~~~
A tensor's way is learned once (packer.py). Then the place in the step gets a `Slot`, which has at
hand what the next tensor needs. When a step begins, one loop asks for all slots together whether
what was decided still holds. A tensor is asked only whether it looks like the last one: one call of
torch's compares its type, dtype, layout and device. Where something may be lossy, the operators
that made it and that save it have to be the same, too. Any other tensor goes the general way, so a
slot is a guess about time, never about values.

A slot takes tensors until the next step begins. Where anything else is wanted (a choice of codecs,
a report, a look at every tensor, a timeline), none does, and all tensors go the general way. So do
those of every `STEPS`-th step: a second tensor that begins to use the same memory is seen there.
"""

from __future__ import annotations

import time
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING

import torch

from cswap.advisor.site_history import Advice
from cswap.dynamo import leave_alone
from cswap.engine import short_way
from cswap.engine.recipes import producer
from cswap.engine.replay.link_slot import LinkSlot
from cswap.engine.saved.away import Away
from cswap.engine.saved.encoded import Encoded
from cswap.engine.saved.reclaim import MOST_LATER
from cswap.engine.short_way import WORD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.engine.packer import Packer
    from cswap.engine.recipes import Place
    from cswap.engine.replay.slot import Slot
    from cswap.engine.saved.packed import Kept, PackedView
    from cswap.engine.saved.without_handle import WithoutHandle
    from cswap.engine.state import EngineState
    from cswap.engine.unpacker import Unpacker

_now = time.perf_counter
_Tensor = torch.Tensor
_is_tracing = torch._C._is_tracing  # noqa: SLF001
_current_backward = torch._C._current_graph_task_id  # noqa: SLF001


class Replay:
    """The slots of one engine, and its two hooks."""

    __slots__ = (
        "_advisor",
        "_book",
        "_by_role",
        "_counters",
        "_deaths",
        "_hits",
        "_later",
        "_limit",
        "_notes",
        "_pack",
        "_reclaimer",
        "_reports",
        "_scopes",
        "_state",
        "_steps",
        "_thread",
        "_unpack",
        "_unpacker",
        "_used",
    )

    def __init__(self, state: EngineState, packer: Packer, unpacker: Unpacker) -> None:
        """Args: state, packer, unpacker: the engine's."""
        self._state, self._book, self._notes = state, packer.book, packer.notes
        self._pack, self._unpack, self._unpacker = packer.pack, unpacker.unpack, unpacker
        self._steps, self._scopes, self._counters = state.order, state.scopes, state.counters
        self._reclaimer, self._advisor = state.reclaimer, state.advisor
        self._deaths, self._later = state.reclaimer.deaths, state.reclaimer.later
        self._hits = state.counters.hits
        self._limit = state.advisor.limit
        self._reports = None if self._limit is None else self._limit.reports
        self._by_role = state.advisor.may_use_lossy
        self._thread = 0
        self._used: deque[Slot] = deque()  # since the advisor was told

    # ---------------------------------------------------------------- each step

    def review(self, *, saving: bool = False) -> Sequence[Slot | None]:
        """See which slots take tensors in the step that has begun, in this thread.

        Args:
            saving: a tensor is being saved, so the step's forward has begun. Else it begins if
                gradients are wanted.
        """
        book = self._book
        places = book.begun.places
        slots: Sequence[Slot | None] = ()
        self.tell()
        if (saving or torch.is_grad_enabled()) and any(place.slot is not None for place in places):
            self._notes.begin()  # it may want another kind of step
            if not self._is_special():
                self._thread = get_ident()
                slots = [self._standing(place) for place in places]
                self._reclaimer.wake()
        for link in self._state.lanes.links:
            mine = [slot for slot in slots if type(slot) is LinkSlot and slot.link is link]
            link.begin_step(mine)
        book.slots = slots
        return slots

    def tell(self) -> None:
        """Tell the advisor of the tensors that slots have taken since the last call."""
        advices = []
        while self._used:
            slot = self._used.popleft()
            slot.is_used = False
            if slot.encoded_bytes and slot.advice is not None:
                slot.tell()
            if isinstance(slot.notes, Advice):
                advices.append(slot.notes)
        if advices:
            self._advisor.has_used(advices)

    def _is_special(self) -> bool:
        # Whether something else than the tensors' way is wanted in this step.
        state, reports = self._state, self._reports
        return (
            state.chooser is not None
            or state.observer.seen is not None
            or state.follower.follows
            or state.counters.timeline is not None
            or (reports is not None and reports.wanted)
            or not self._steps.step % short_way.STEPS
            or _is_tracing()
        )

    def _standing(self, place: Place) -> Slot | None:
        slot = place.slot
        if slot is None:
            return None
        shared_use, notes, lane = place.shared_use, place.notes, slot.lane
        if (
            shared_use is not slot.shared_use
            or place.codec is not slot.codec
            or notes is not slot.notes
            or slot.shared_use.seen
        ):
            place.slot = None
            return None
        if type(slot) is LinkSlot:
            if not slot.verbatim:
                slot.prepare()
        elif lane.executor.in_line is not None and lane.overlaps:
            return None
        kind = slot.recipe.site.kind
        if place.choice is not None:
            allowed = slot.codec.lossless or self._advisor.milder.allows(kind, slot.codec.name)
            return slot if allowed else None
        limit = self._limit if lane.may_keep else None
        if limit is not None and limit.keeps(slot.position, slot.nbytes):
            return None
        stands = isinstance(notes, Advice) and self._advisor.stands(notes, kind, use=False)
        return slot if stands else None

    # -------------------------------------------------------------- each tensor

    def pack(self, tensor: torch.Tensor) -> Kept | PackedView | WithoutHandle:
        """See `SwapEngine.pack`."""
        # One function for all questions: see the Note.
        book = self._book
        n, slots = book.begun.next, book.slots
        if slots is None:
            slots = self.review(saving=True)  # operators switch gradients off while they save
        if n >= len(slots):
            return self._pack(tensor)
        slot = slots[n]
        if slot is None:
            return self._pack(tensor)
        start_s, steps = _now(), self._steps
        try:
            address = tensor.data_ptr() if type(tensor) is _Tensor else 0
        except RuntimeError:  # sparse, say: it has no storage
            address = 0
        if (
            not address
            or tensor.is_nested  # the guard raises for these, through Python's own frames
            or not slot.check(tensor)
            or self._scopes.stack[-1] is not slot.scope
            or steps.position != slot.position
            or (self._by_role and slot.recipe.role != (self._scopes.operator, producer(tensor)))
        ):
            return self._other(tensor, n)
        base = tensor._base  # noqa: SLF001
        if (
            steps.asked_since_pack
            or get_ident() != self._thread
            or address % WORD
            or self._deaths
            or tensor.untyped_storage().nbytes() != slot.nbytes  # a part, or cut short meanwhile
            or (base is not None and type(base) is not _Tensor)
        ):
            return self._pack(tensor)
        try:
            packed = slot.take(tensor, address, steps.step)
            if packed is None:
                return self._pack(tensor)
            # Without the lock: other threads save no tensors of this step, as a rule, and all that
            # depends on a position is a guess.
            steps.position, book.begun.next = slot.position + 1, n + 1
            if not slot.is_used:
                slot.is_used = True
                self._used.append(slot)
            if slot.shared_use.again:
                packed.expect_others(tensor)
            packed.took_s = took_s = _now() - start_s
            self._counters.leaving_s += took_s
        except BaseException:
            self._state.interrupted = True
            raise
        return packed

    def _other(self, tensor: torch.Tensor, n: int) -> Kept | PackedView | WithoutHandle:
        # Another tensor than the slot of the n-th place is for. If it is at no place, as weights
        # and small tensors are, the slot waits for the next one.
        begun = self._book.begun
        packed = self._pack(tensor)
        if n < begun.next <= len(begun.places):
            begun.places[n].slot = None  # it is made anew for the tensor that comes here now
        return packed

    @leave_alone
    def unpack(self, packed: Kept | PackedView | WithoutHandle) -> torch.Tensor:
        """See `SwapEngine.unpack`."""
        if type(packed) is not Encoded and type(packed) is not Away:
            return self._unpack(packed)
        start_s, state, reports = _now(), self._state, self._reports
        if (
            packed.uses
            or packed.users > 1
            or packed.result is not None
            or state.chooser is not None
            or (reports is not None and reports.wanted)
            or _current_backward() != self._unpacker.backward
        ):
            return self._unpack(packed)
        try:
            if self._deaths:
                self._reclaimer.collect_encodings()
            if self._deaths or len(self._later) > MOST_LATER:
                state.tidy(in_step=True)
            steps = self._steps
            steps.asked_since_pack = True
            if packed.step == steps.asked_step:
                steps.asked_positions.append(packed.position)
            else:
                steps.asked(packed)
            if packed.counter._version != packed.version:  # noqa: SLF001
                packed.check()  # which raises
            if isinstance(packed, Encoded):
                self._hits.append(False)
                found = packed.in_line.decode(packed)
            else:
                memory = packed.link.bring(packed)
                found = memory if packed.region.slot.as_it_is else packed.view_of(memory)
            packed.uses = 1
            took_s = _now() - start_s
            packed.took_s += took_s
            self._counters.leaving_s += took_s
            took = state.took
            if took is not None:
                took.append((packed.position, packed.nbytes, packed.took_s))
        except Exception:
            raise
        except BaseException:
            state.interrupted = True
            raise
        return found
