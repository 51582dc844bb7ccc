"""`Replay`: an engine's hook of pack. Most steps repeat the one before, slot by slot.

Note [a step is repeated]
~~~~~~~~~~~~~~~~~~~~~~~~~
A tensor's way is learned once (packer.py). Then the place in the step gets a `Slot`, which has at
hand what the next tensor needs. When a step begins, one loop asks for all slots together whether
what was decided still holds. A tensor is asked only whether it looks like the last one: one call of
torch's compares its type, dtype, layout and device. Where something may be lossy, or operators are
selected, those that made it and that save it have to be the same, too. Any other tensor goes the
general way, so a slot is a guess about time, never about values.

Most tensors stay: parameters, small ones, and those of places where the last tensor stayed. They
need no slot, and nothing is wrong if another tensor stays instead. See Note [a tensor that stays]
in order/looks.py.

A slot takes tensors until the next step begins. Where anything else is wanted (a choice of codecs,
a look at every tensor, a timeline), none does, and all tensors go the general way. Now and then
there is a look at least (`EngineState.looks`). If another tensor begins to use the same memory, the
slot of the first does not notice: both are held, each in its own way, and each comes back with its
own values. In such a step the second use is seen.
"""

from __future__ import annotations

import time
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from cswap.engine.order.chooser import STAYS
from cswap.engine.order.looks import last_look
from cswap.engine.packer import kept_in_place, kind_of_kept
from cswap.engine.recipe import role_of
from cswap.engine.recipes import Place
from cswap.engine.replay.link_slot import LinkSlot
from cswap.engine.replay.slot import CodecSlot
from cswap.engine.saved.packed import Kept, KeptClone, KeptParameter
from cswap.engine.sender import BY_BUDGET
from cswap.remat.reads import CLONE

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from cswap.engine.link.link import Link
    from cswap.engine.link.link_way import LinkWay
    from cswap.engine.order.looks import Key, Stay
    from cswap.engine.packer import Packer
    from cswap.engine.replay.slot import Slot
    from cswap.engine.saved.apart import Apart
    from cswap.engine.saved.packed import PackedView
    from cswap.engine.saved.unread import Unread
    from cswap.engine.saved.without_handle import WithoutHandle
    from cswap.engine.state import EngineState

_now = time.perf_counter
_new = object.__new__
_Tensor, _strided = torch.Tensor, torch.strided
_is_tracing = torch._C._is_tracing  # noqa: SLF001
_len_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001


class Replay:
    """The slots of one engine, and its hook of pack.

    Attributes:
        is_plain: whether slots and places where tensors stay are asked in the step that runs.
    """

    __slots__ = (
        "_advisor",
        "_book",
        "_by_role",
        "_counters",
        "_deaths",
        "_kept_sizes",
        "_min_bytes",
        "_newest",
        "_pack",
        "_parameters",
        "_reclaimer",
        "_scopes",
        "_small",
        "_state",
        "_stayed",
        "_steps",
        "_thread",
        "_unproven",
        "_unread",
        "_used",
        "is_plain",
    )

    def __init__(self, state: EngineState, packer: Packer) -> None:
        """Args: state, packer: the engine's."""
        self._state, self._book = state, packer.book
        self._pack = packer.pack
        self._steps, self._scopes, self._counters = state.order, state.scopes, state.counters
        self._reclaimer, self._advisor = state.reclaimer, state.advisor
        self._deaths = state.reclaimer.deaths
        self._stayed = state.counters.stayed
        self._parameters, self._small = state.counters.parameters, state.counters.small
        self._kept_sizes = state.counters.kept_sizes
        self._min_bytes, self.is_plain = max(1, state.lanes.min_bytes), False
        self._newest = state.newest
        self._by_role = packer.book.by_role
        self._thread = 0
        self._unread, self._unproven = state.unread, state.unread.unproven
        self._used: deque[CodecSlot] = deque()  # since the advisor was told

    # ---------------------------------------------------------------- each step

    def review(self) -> Sequence[Slot | Place | None]:
        """See which slots take tensors in the step that has begun, in this thread.

        Its first tensor is being saved. A place without a slot is one where the tensor stays.
        """
        book = self._book
        places = book.begun.places
        self.tell()
        has_slots = any([place.slot is not None for place in places])  # noqa: C419 - no calls
        if has_slots or any([place.stay is not None for place in places]):  # noqa: C419
            self._state.step_begins()  # it may want another kind of step
        slots: Sequence[Slot | Place | None] = ()
        self.is_plain = not self._is_special()
        if self.is_plain:
            self._thread = get_ident()
            reasons, advisor = self._kept_sizes, self._advisor
            looked, newest = last_look(self._steps.step), self._newest.of_call(self._steps.call)
            slots = [
                (slot if slot.stands(place, advisor) and slot.key not in newest else None)
                if (slot := place.slot) is not None
                else place
                if place.choice is STAYS
                or place.recipe.keep in reasons
                or ((stay := place.stay) is not None and self._stands(stay, looked, newest))
                else None
                for place in places
            ]
            if has_slots:
                self._reclaimer.wake()
        for link in self._state.lanes.links:
            link.begin_step(self._ways(link, slots, places), self._newest.rest_bytes)
        book.slots = slots
        return slots

    def _ways(
        self, link: Link, slots: Sequence[Slot | Place | None], places: Sequence[Place]
    ) -> list[LinkWay]:
        # That tensors are expected to go in this step: those of slots, or those of last time.
        if self.is_plain:
            return [slot.way for slot in slots if type(slot) is LinkSlot and slot.link is link]
        ways = [way for place in places if (way := place.way) is not None]
        return [way for way in ways if way.lane.executor.link is link]

    def _stands(self, stay: Stay, looked: int, newest: Collection[Key]) -> bool:
        # Whether the decision holds. looked: the step of the last look. newest: that stay within
        # the budget.
        if stay.reason == BY_BUDGET:
            return stay.key in newest
        return stay.since >= looked

    def tell(self) -> None:
        """Tell the advisor of the tensors that slots have taken since the last call."""
        while self._used:
            try:
                slot = self._used.popleft()
            except IndexError:  # another thread took it
                break
            slot.is_used = False
            if slot.advice is not None:
                slot.tell()

    def _is_special(self) -> bool:
        # Whether something else than the tensors' way is wanted in this step.
        state = self._state
        return (
            state.looks
            or state.observer.seen is not None
            or state.counters.timeline is not None
            or _is_tracing()
        )

    # -------------------------------------------------------------- each tensor

    def pack(self, tensor: torch.Tensor) -> Kept | PackedView | Unread | Apart | WithoutHandle:
        """See `SwapEngine.pack`."""
        # One function for all questions: see the Note.
        book = self._book
        if self._unproven:
            self._unread.look(tensor)
        n, slots = book.begun.next, book.slots
        if slots is None:
            slots = self.review()
        steps, kind = self._steps, type(tensor)
        if (
            self.is_plain
            and (kind is _Tensor or kind is Parameter)
            and not _is_tracing()
            and tensor.layout is _strided
        ):
            nbytes, sizes, after = tensor.nbytes, None, 0
            kept_kind: type[Kept] = Kept
            if kind is Parameter or type(tensor._base) is Parameter:  # noqa: SLF001
                sizes, kept_kind = self._parameters, KeptParameter
            elif nbytes < self._min_bytes:
                sizes = self._small
            elif n < len(slots) and type(place := slots[n]) is Place:
                if (
                    place.nbytes != nbytes
                    or place.recipe.scope is not self._scopes.stack[-1]
                    or steps.asked_since_pack
                    or get_ident() != self._thread
                    or tensor.is_nested
                ):
                    return self._other(tensor, n)
                if place.stay is not None:
                    return self._stay(tensor, place.stay)
                sizes, after = self._kept_sizes[place.recipe.keep or "goal"], n + 1
                if type(tensor.grad_fn).__name__ == CLONE:
                    kept_kind = KeptClone
            if sizes is not None and not _len_dispatch_modes():
                try:
                    held = tensor if tensor.is_leaf else tensor.detach()
                    version = tensor._version  # noqa: SLF001
                except RuntimeError:  # of inference mode
                    return self._pack(tensor)
                sizes.append(nbytes)
                if after:
                    book.begun.next = after
                kept = _new(kept_kind)  # without a call of Python
                kept.tensor, kept.version = held, version
                return kept
        if n >= len(slots):
            return self._pack(tensor)
        slot = slots[n]
        if slot is None or isinstance(slot, Place):
            return self._pack(tensor)
        start_s = _now()
        try:
            address = tensor.data_ptr() if kind is _Tensor else 0
        except RuntimeError:  # sparse, say: it has no storage
            address = 0
        if (
            not address
            or tensor.is_nested  # the guard raises for these, through Python's own frames
            or not slot.check(tensor)
            or self._scopes.stack[-1] is not slot.scope
            or steps.position != slot.position
            or (self._by_role and slot.recipe.role != role_of(tensor, self._scopes.operator))
        ):
            return self._other(tensor, n)
        base = tensor._base  # noqa: SLF001
        if self._deaths:
            self._state.tidy(in_step=True)
        if (
            steps.asked_since_pack
            or get_ident() != self._thread
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
            steps.position, book.begun.next = slot.after, n + 1
            owner = packed.first
            if owner is None:
                owner = packed
                if isinstance(slot, CodecSlot) and not slot.is_used:
                    slot.is_used = True
                    self._used.append(slot)
                if slot.shared_use.again:
                    packed.expect_others(tensor)
            owner.took_s += _now() - start_s
        except BaseException:
            self._state.interrupted = True
            raise
        return packed

    def _stay(self, tensor: torch.Tensor, stay: Stay) -> Kept:
        # Without the lock, as with slots.
        self._book.begun.next += 1
        if stay.shares:
            self._counters.share()
        else:
            self._steps.position += 1
            self._stayed.append((stay.reason, stay.key[1]))
        return kept_in_place(tensor, kind_of_kept(tensor))

    def _other(
        self, tensor: torch.Tensor, n: int
    ) -> Kept | PackedView | Unread | Apart | WithoutHandle:
        # Another tensor than the slot of the n-th place is for. If it is at no place, as weights
        # and small tensors are, the slot waits for the next one.
        begun = self._book.begun
        before = self._book.slots
        packed = self._pack(tensor)
        if n < begun.next <= len(begun.places):
            place = begun.places[n]
            if before is not None and n < len(before) and place.slot is before[n]:
                place.slot = None  # it would refuse the tensor that comes here now
        return packed
