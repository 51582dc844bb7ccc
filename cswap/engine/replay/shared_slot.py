"""`SharedSlot`: a saved tensor of each step that another place has saved before.

See Note [saved again without a handle] in cswap/engine/saved/without_handle.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.replay.slot import Slot
from cswap.engine.saved.aliases import is_saved_again
from cswap.engine.saved.without_handle import Again, WithoutHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.advisor.advisor import Advisor
    from cswap.engine.recipe import Recipe
    from cswap.engine.replay.slot import SlotPlace
    from cswap.engine.saved.without_handle import SharedUse
    from cswap.stats.counters import Counters


class SharedSlot(Slot):
    """See the top, and `Slot`. Its tensors have no position of their own.

    Attributes:
        counters: the engine's.
    """

    __slots__ = ("counters",)

    def __init__(
        self,
        shared_use: SharedUse,
        recipe: Recipe,
        position: int,
        nbytes: int,
        check: Callable[[torch.Tensor], bool],
        counters: Counters,
    ) -> None:
        """The slot of a place.

        Args:
            shared_use: of the place that has saved the last tensor before.
            recipe: of the place.
            position: of the next tensor that is no shared one.
            nbytes: of the memory.
            check: see `Slot`.
            counters: the engine's.
        """
        super().__init__(recipe, shared_use, position, nbytes, check)
        self.after, self.counters = position, counters
        self.key = -1, nbytes

    def stands(self, place: SlotPlace, advisor: Advisor) -> bool:
        """See `Slot.stands`."""
        return place.saved_by is self.shared_use

    def take(self, tensor: torch.Tensor, address: int, step: int) -> Again | None:
        """See `Slot.take`."""
        shared_use = self.shared_use
        first = None if shared_use.last is None else shared_use.last()
        if first is None or first.step != step:
            return None  # the first one has a handle
        if first.tolerance > self.recipe.tolerance or not _serves(first, tensor):
            shared_use.seen = True
            return None
        self.counters.share()
        return Again(tensor, self.recipe, first, shared_use)


def _serves(first: WithoutHandle, tensor: torch.Tensor) -> bool:
    # Whether another saved tensor is this one or a view of its memory, unmodified.
    same = is_saved_again(tensor, first.base, first.dtype)
    return same and tensor._version == first.version  # noqa: SLF001
