"""A call of the model in which its quiet stretches are learned: `Learner`."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap import hook_stack
from cswap.dynamo import leave_alone
from cswap.engine.order.chooser import STAYS
from cswap.engine.saved.eligibility import bytes_of
from cswap.engine.saved.packed import Kept, KeptParameter, PackedView
from cswap.engine.saved.recomputed import Recomputed
from cswap.quiet_modules.stretch import Saved, Stretch, facts_of
from cswap.remat.reads import CAN_TELL

if TYPE_CHECKING:
    from cswap.engine.engine import SwapEngine
    from cswap.quiet_modules.run import Pair
    from cswap.quiet_modules.stretch import Arguments, Boundary
    from cswap.remat.record import Remat


_RESTING: Final = (Kept, PackedView)
"""Objects of tensors that rest. The second, of one that was looked at in this step, and rests again
from the next one on."""


@dataclass(slots=True)
class _Part:
    # Between two boundaries of the call that learns.
    begins: Boundary
    first: int
    arguments: Arguments
    training: bool
    stays: bool
    n_places: int = 0
    sizes: list[int] = field(default_factory=list)
    kept_sizes: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    resting: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # ids of objects that autograd holds

    def learn(self, ends: Boundary | None) -> bool:
        # Tell the boundary where this part begins; whether nothing is new. Args: ends: the one
        # where it ends.
        saved = Saved(
            self.first, self.n_places, tuple(self.sizes), self.arguments, self.training, ends
        )
        unseen = {why: (len(sizes), sum(sizes)) for why, sizes in self.kept_sizes.items()}
        stretch = Stretch(saved, tuple(unseen.items()), tuple(self.resting))
        return self.begins.learn(saved, stretch if self.stays else None)

    def take(self, later: _Part) -> None:
        # The part after this one, where no boundary can be told from others.
        self.stays = self.stays and later.stays
        self.n_places = later.first + later.n_places - self.first
        self.sizes += later.sizes
        for why, sizes in later.kept_sizes.items():
            self.kept_sizes[why] += sizes
        self.resting += later.resting
        self.kept += later.kept


class Learner:
    """One call of the model with all hooks on: notes the tensors between boundaries.

    Attributes:
        repeats: whether the call was like those before, once it has ended.
    """

    learns: Final = True
    repeats = False

    def __init__(self, engine: SwapEngine, pair: Pair) -> None:
        """Args: engine: swaps; pair: the hooks, which are to call `pack`."""
        self._engine, self._packer = engine, engine.packer
        self._pair = weakref.ref(pair)  # which refers to this
        self._parts: list[_Part] = []
        # Where torch does not tell tensors from hooks' objects, inputs of tensors that are computed
        # again have to be the latter. Ids: one that an object has after another is dead makes a
        # part seem needed, no more.
        self._needed: set[int] = set()

    @leave_alone
    def at(self, boundary: Boundary, module: torch.nn.Module, values: Any) -> None:
        """See `ModuleCalls`."""
        stays = self._close()
        facts, first = facts_of(values), self._packer.book.position
        self._parts.append(_Part(boundary, first, facts, module.training, stays))

    def pack(self, tensor: torch.Tensor) -> object:
        """Pack a tensor, and note it."""
        packed = self._engine.pack(tensor)
        if not CAN_TELL and (remat := _remat_of(packed)) is not None:
            self._needed.update(map(id, remat.inputs))
        if self._parts:
            self._note(self._parts[-1], tensor, packed)
        return packed

    def end(self) -> list[Boundary]:
        """Say which stretches are quiet from here on. Returns: the boundaries, in order."""
        self._close()
        parts = self._told_apart()
        ends: list[Boundary | None] = [part.begins for part in parts[1:]]
        for part in parts:
            part.stays = part.stays and self._needed.isdisjoint(part.kept)
        learned = [part.learn(end) for part, end in zip(parts, [*ends, None], strict=True)]
        self.repeats = all(learned)
        return [part.begins for part in parts]

    def _close(self) -> bool:
        # A part ends. Returns whether tensors of the next one may stay unseen.
        has_hooks = torch.is_grad_enabled() and hook_stack.owner_of_top() is self._pair()
        if self._parts:
            part = self._parts[-1]
            part.stays = part.stays and has_hooks
            part.n_places = self._packer.book.position - part.first
        return has_hooks

    def _told_apart(self) -> list[_Part]:
        # A boundary that comes twice in a call does not say which one it is.
        times = Counter(id(part.begins) for part in self._parts)
        parts: list[_Part] = []
        for part in self._parts:
            if parts and times[id(part.begins)] > 1:
                parts[-1].take(part)
            else:
                parts.append(part)
        return parts

    def _note(self, part: _Part, tensor: torch.Tensor, packed: object) -> None:
        book = self._packer.book
        has_place = book.position > part.first + part.n_places
        place = book.last_place if has_place else None
        nbytes = bytes_of(tensor)
        part.sizes.append(nbytes)
        if isinstance(packed, KeptParameter):
            part.kept_sizes["parameter"].append(nbytes)
        elif place is not None and place.rest is not None and isinstance(packed, _RESTING):
            part.resting.append(book.position - 1)
        elif not isinstance(packed, Kept):
            part.stays = False
        elif place is not None and (reason := place.recipe.keep) in ("parameter", "small"):
            part.kept_sizes[reason].append(nbytes)
        elif place is not None and place.choice is STAYS:
            part.kept_sizes["goal"].append(nbytes)
        elif not has_place and self._packer.is_small(tensor):
            part.kept_sizes["small"].append(nbytes)
        else:
            part.stays = False
        part.n_places = book.position - part.first
        part.kept.append(id(packed))


def _remat_of(packed: object) -> Remat | None:
    if isinstance(packed, PackedView):
        return packed.token.remat
    first = getattr(packed, "first", None) or packed
    return first.remat if isinstance(first, Recomputed) else None
