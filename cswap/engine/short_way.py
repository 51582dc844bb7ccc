"""The short way of tensors that are computed again: out and back without a handle.

Note [computed again without a handle]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A tensor that is computed again holds no bytes: nothing is to be given back when it goes. Its handle
serves other tensors that use the same memory, and the decision between ways to hold the tensor. So
where the last tensor of a place was computed again, and nobody else needed its handle, the next
one gets a `Recomputed` and no handle, no token and no entry in a table. The graph around it is read
again (Note [a formula is recognised] in reads.py). If a read differs, if the price of a byte has
changed, or if the limit of the step's time keeps the tensor, it goes the whole way.

Where the last tensor was saved once more, at another place, that place goes the short way, too: see
Note [saved again without a handle] in recomputed.py.

If another tensor begins to use the same memory, the first one does not notice: both are held, each
in its own way, and each comes back with its own values. So in every `STEPS`-th step all places go
the whole way, and there such a use is seen.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch

from cswap.engine.order.step_order import NO_BACKWARD
from cswap.engine.recomputer import are_aligned
from cswap.engine.saved.aliases import is_saved_again
from cswap.engine.saved.packed import PackedView
from cswap.engine.saved.recomputed import Recomputed
from cswap.engine.transfer.handle import State

if TYPE_CHECKING:
    from cswap.engine.recipes import Place
    from cswap.engine.state import EngineState
    from cswap.engine.transfer.device_lanes import Lane
    from cswap.remat.record import Remat

_now = time.perf_counter
_current_backward = torch._C._current_graph_task_id  # noqa: SLF001

STEPS: Final = 64
"""In steps whose number is a multiple, all tensors go the whole way."""


class ShortWay:
    """Packs and unpacks tensors of one engine that are computed again."""

    def __init__(self, state: EngineState) -> None:
        """Args: state: the engine's."""
        self._lock, self._order, self._counters = state.lock, state.order, state.counters
        self._recomputer, self._advisor = state.recomputer, state.advisor
        self._limit = state.advisor.limit
        self._results = state.results

    def pack(self, tensor: torch.Tensor, place: Place) -> Recomputed | None:
        """The packed object of a tensor; None: it goes the whole way.

        Args:
            tensor: as autograd saves it.
            place: where in the step; its last tensor was computed again.
        """
        start_s = _now()
        shared_use, lane = place.shared_use, place.recipe.lane
        assert shared_use is not None  # the caller has looked
        assert lane is not None  # or it would stay
        for_goal = place.choice is not None
        whole = shared_use.seen or not self._order.step % STEPS
        if whole or not (for_goal or self._is_worth(place, lane)):
            place.shared_use = None
            return None
        if lane.may_capture and lane.device.is_capturing():
            return None
        formula = place.formula
        if formula is None or tensor.dtype is not formula.layout.dtype:
            return None
        if tensor.is_conj() or tensor.is_neg():  # other numbers than those in memory
            return None
        lossy_ok = place.recipe.lossy_ok
        finder = self._recomputer.finder(lossy_ok=lossy_ok, for_goal=for_goal)
        remat = finder.recognised(tensor, formula)
        if remat is None or (lane.ahead and not _is_at_hand(remat)):
            return None
        if formula.product and not are_aligned(remat):
            return None
        packed = Recomputed(tensor, remat, lane, shared_use, lossy_ok=lossy_ok)
        with self._lock:
            packed.position, packed.step = self._order.next_position()
        if not for_goal and place.worth_at is not None and packed.position != place.worth_at[0]:
            place.shared_use = None  # the limit knows the tensor by another position
        self._counters.again.append(formula.nbytes)
        if shared_use.again:
            packed.expect_others(tensor)
        packed.took_s = took_s = _now() - start_s
        self._counters.leaving_s += took_s
        return packed

    def pack_again(self, tensor: torch.Tensor, place: Place) -> Recomputed | None:
        """The packed object of a tensor that another place has saved; None: the whole way.

        Args:
            tensor: as autograd saves it.
            place: where in the step; its last tensor was one that another place had saved.
        """
        start_s = _now()
        shared_use = place.saved_by
        reference = None if shared_use is None else shared_use.last
        first = None if reference is None else reference()
        if shared_use is None or first is None or first.step != self._order.step:
            return None  # the first one has a handle
        lossy_ok = place.recipe.lossy_ok
        if (first.lossy_ok and not lossy_ok) or not _serves(first, tensor):
            shared_use.seen, place.saved_by = True, None
            return None
        packed = Recomputed(tensor, first.remat, first.lane, shared_use, lossy_ok=first.lossy_ok)
        packed.first, packed.position, packed.step = first, first.position, first.step
        first.users += 1
        self._counters.share()
        took_s = _now() - start_s
        first.took_s += took_s
        self._counters.leaving_s += took_s
        return packed

    def _is_worth(self, place: Place, lane: Lane) -> bool:
        if place.worth_at is None or place.formula is None:
            return False
        position, price, refused = place.worth_at
        if price != self._advisor.price(lane.device.kind) or refused != self._recomputer.refused:
            return False
        limit = self._limit if lane.may_keep else None
        return limit is None or (position, place.formula.nbytes) not in limit.staying

    def unpack(self, packed: Recomputed, start_s: float) -> torch.Tensor:
        """The tensor, computed again.

        Args:
            packed: it; asked for, if this is the first time.
            start_s: when this unpack began.

        Raises:
            RuntimeError: autograd's own, if it or an input was modified in place since it was
                saved.
        """
        first = packed.first or packed
        if not first.uses:
            self._counters.fetched(hit=False, first=True)
        packed.check()
        memory = first.result
        if memory is None:
            memory = self._recomputer.run(first.remat)
        else:
            first.lane.device.share(memory)
        first.uses += 1
        if first.users > 1 and _current_backward() != NO_BACKWARD:  # else the user looks at a node
            self._results.asked(first, memory)
        took_s = _now() - start_s
        first.took_s += took_s
        self._counters.leaving_s += took_s
        if first.uses == first.users and self._limit is not None:
            self._limit.took(first.position, first.nbytes, first.took_s)
        return packed.view_of(memory)


def _serves(first: Recomputed, tensor: torch.Tensor) -> bool:
    # Whether another saved tensor is this one or a view of its memory, unmodified.
    same = is_saved_again(tensor, first.base, first.remat.formula.layout.dtype)
    return same and tensor._version == first.version  # noqa: SLF001


def _is_at_hand(remat: Remat) -> bool:
    # Whether no input has to be decoded ahead: its user would need a handle.
    for packed in remat.inputs:
        if isinstance(packed, PackedView):
            handle = packed.token.handle
            if handle.state is not State.KEPT and not handle.recomputed:
                return False
    return True
