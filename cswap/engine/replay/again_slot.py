"""`AgainSlot`: one saved tensor of each step that is computed again.

Note [computed again without a handle]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A tensor that is computed again holds no bytes: nothing is to be given back when it goes. Its handle
serves other tensors that use the same memory, and the decision between ways to hold the tensor. So
where the last tensor of a place was computed again, and nobody else needed its handle, the next one
gets a `Recomputed`. The graph around it is compared with that of the last one (Note [a formula is
recognised] in recognition.py). If it differs, it goes the general way, as all do in a look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.advisor.live_costs import REMAT
from cswap.engine.recomputer import are_aligned
from cswap.engine.replay.slot import Slot
from cswap.engine.saved.recomputed import Recomputed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.advisor.advisor import Advisor
    from cswap.engine.replay.slot import SlotPlace
    from cswap.engine.state import EngineState
    from cswap.engine.transfer.handle import Handle


class AgainSlot(Slot):
    """See the top, and `Slot`.

    Attributes:
        formula: of the last tensor.
        for_goal: whether a goal has chosen it.
        finder: recognises the formula.
        trials: of chains.
        refused: number of kinds of these that were not used any more when it was made.
        kind: of its chain, for these.
        place: of the handle: another call of the model before a backward may write into the result.
        steps: know which call it is now.
        moves: see `Counters`.
    """

    __slots__ = (
        "finder",
        "for_goal",
        "formula",
        "kind",
        "moves",
        "place",
        "refused",
        "steps",
        "trials",
    )

    def __init__(
        self,
        handle: Handle,
        place: SlotPlace,
        check: Callable[[torch.Tensor], bool],
        state: EngineState,
    ) -> None:
        """The slot of a place, whose last tensor had a handle.

        Args:
            handle: of that tensor.
            place: where in the step.
            check: see `Slot`.
            state: the engine's.
        """
        shared_use, formula, recomputer = place.shared_use, place.formula, state.recomputer
        assert shared_use is not None  # the caller has looked
        assert formula is not None  # of a tensor that is computed again
        super().__init__(place.recipe, shared_use, handle.position, handle.raw_nbytes, check)
        self.formula, self.for_goal = formula, place.choice is not None
        self.finder = recomputer.finder(tolerance=handle.tolerance, for_goal=self.for_goal)
        self.trials, self.moves = recomputer.trials, state.counters.moves
        self.refused, self.steps = self.trials.refused, state.order
        self.kind, self.place = (
            (place.recipe.scope.path, formula.operator, formula.layout),
            handle.place,
        )

    def is_for(self, handle: Handle, place: SlotPlace) -> bool:
        """See `Slot.is_for`."""
        return (
            self.recipe is place.recipe
            and self.formula is place.formula
            and self.for_goal is (place.choice is not None)
            and self.position == handle.position
            and self.refused == self.trials.refused
            and place.codec is None
        )

    def stands(self, place: SlotPlace, advisor: Advisor) -> bool:
        """See `Slot.stands`."""
        if place.shared_use is not self.shared_use or self.shared_use.seen:
            return False
        thread, call, number = self.place
        if self.refused != self.trials.refused:
            return False
        return call == self.steps.call or self.trials.agreed(
            self.kind, (thread, self.steps.call, number), self.recipe.tolerance
        )

    def take(self, tensor: torch.Tensor, address: int, step: int) -> Recomputed | None:
        """See `Slot.take`."""
        lane, formula, recipe = self.lane, self.formula, self.recipe
        if lane.may_capture and lane.device.is_capturing():
            return None
        remat = self.finder.recognised(tensor, formula)
        if remat is None or (formula.product and not are_aligned(remat)):
            return None
        packed = Recomputed(
            tensor, recipe, lane, self.shared_use, self.nbytes, tolerance=recipe.tolerance
        )
        packed.remat, packed.depth = remat, formula.depth
        packed.is_memory = tensor._base is None  # noqa: SLF001
        if not packed.is_memory:
            packed.offset = int(tensor.storage_offset())
        packed.position, packed.step = self.position, step
        self.moves.append((0, 0, 1, REMAT, self.nbytes, 0, 0.0))
        return packed
