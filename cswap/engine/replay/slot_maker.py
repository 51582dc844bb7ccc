"""Makes the slot of a place from the way that its last tensor went: `SlotMaker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.replay.again_slot import AgainSlot
from cswap.engine.replay.in_line_slot import InLineSlot
from cswap.engine.replay.link_slot import LinkSlot
from cswap.engine.replay.shared_slot import SharedSlot
from cswap.engine.saved.aliases import whole_address
from cswap.engine.saved.tensor_check import check_of

if TYPE_CHECKING:
    import torch

    from cswap.engine.recipes import Place
    from cswap.engine.replay.slot import Slot
    from cswap.engine.saved.packed import Token
    from cswap.engine.state import EngineState


class SlotMaker:
    """Makes the slots of one engine."""

    def __init__(self, state: EngineState) -> None:
        """Args: state: the engine's."""
        self._state = state

    def learn(self, token: Token, tensor: torch.Tensor, place: Place) -> None:
        """The next tensor of a place may go by a slot, if the last one could do without a handle.

        Args:
            token: of the last one.
            tensor: that one, as autograd saves it.
            place: where in the step.
        """
        shared_use, slot = token.shared_use, place.slot
        if shared_use is None:
            place.slot = None
        elif slot is not None and slot.is_for(token.handle, place):
            slot.renew(shared_use, place.notes)
        else:
            place.slot = self._made(token, tensor, place)

    def learn_shared(self, first: Token, tensor: torch.Tensor, place: Place) -> None:
        """The same for a tensor that another place has saved before. Args: first: of that one."""
        place.slot, shared_use = None, place.saved_by
        if shared_use is None or (check := check_of(tensor)) is None:
            return
        state, nbytes = self._state, first.handle.raw_nbytes
        place.slot = SharedSlot(
            shared_use, place.recipe, state.order.position, nbytes, check, state.counters
        )

    def _made(self, token: Token, tensor: torch.Tensor, place: Place) -> Slot | None:
        # Where a tensor is conjugated or negated, its memory has other numbers.
        check = None if tensor.is_conj() or tensor.is_neg() else check_of(tensor)
        if check is None:
            return None
        handle, executor = token.handle, token.lane.executor
        if place.codec is None:
            formula = place.formula
            if formula is None or tensor.dtype is not formula.layout.dtype:
                return None  # a view of another dtype than its memory
            return AgainSlot(handle, place, check, self._state)
        if executor.link is not None:
            assert place.way is not None  # it has left
            return LinkSlot(handle, place, check, place.way, executor.link)
        if executor.in_line is not None and whole_address(tensor):
            return InLineSlot(handle, place, check, executor.in_line, self._state)
        return None
