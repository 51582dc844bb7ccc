"""A call of the model in which quiet modules are learned: `Learner`."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap import hook_stack
from cswap.advisor.time_limit import BY_LIMIT
from cswap.engine.order.chooser import STAYS
from cswap.engine.saved.packed import Kept, KeptParameter, PackedView
from cswap.engine.saved.recomputed import Recomputed
from cswap.quiet_modules.stretch import Resting, Stretch, facts_of
from cswap.stats.counters import SHARED

if TYPE_CHECKING:
    from cswap.engine.engine import SwapEngine
    from cswap.engine.saved.rest import Rest
    from cswap.quiet_modules.run import Pair
    from cswap.quiet_modules.stretch import Arguments, Tracked
    from cswap.remat.record import Remat


@dataclass(slots=True)
class _Call:
    # One call of a module, in a step that learns.
    tracked: Tracked
    first: int
    arguments: Arguments
    training: bool
    stays: bool
    n_places: int = 0
    parameters: list[int] = field(default_factory=list)
    small: list[int] = field(default_factory=list)
    by_goal: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    until: list[int] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # ids of objects that autograd holds

    def stretch(self) -> Stretch | None:
        if not self.stays:
            return None
        found = {"parameter": self.parameters, "small": self.small, "goal": self.by_goal}
        found[SHARED] = self.shared
        for rest in self.rests:
            found.setdefault(rest.reason, []).append(rest.limited[1])
        unseen = {why: (len(sizes), sum(sizes)) for why, sizes in found.items() if sizes}
        return Stretch(
            self.first,
            self.n_places,
            self.arguments,
            self.training,
            tuple(unseen.items()),
            self._resting(),
        )

    def _resting(self) -> Resting | None:
        if not self.until:
            return None
        limited = {rest.limited for rest in self.rests if rest.reason in BY_LIMIT}
        tensors = tuple(rest.limited for rest in self.rests)
        return Resting(tensors, min(self.until), frozenset(limited))

    def take(self, inner: _Call) -> None:
        # A call inside of this one has ended.
        self.stays = self.stays and inner.stays
        self.n_places = inner.first + inner.n_places - self.first
        self.parameters += inner.parameters
        self.small += inner.small
        self.by_goal += inner.by_goal
        self.shared += inner.shared
        self.until += inner.until
        self.rests += inner.rests
        self.kept += inner.kept


class Learner:
    """One call of the model with all hooks on: notes the tensors of each module."""

    learns: Final = True
    off: Final = 0

    def __init__(self, engine: SwapEngine, pair: Pair) -> None:
        """Args: engine: swaps; pair: the hooks, which are to call `pack`."""
        self._engine, self._packer = engine, engine.packer
        self._pair = weakref.ref(pair)  # which refers to this
        self._calls: list[_Call] = []  # under way, outermost first
        self._ended: list[_Call] = []
        # Ids: one that an object has after another is dead makes a module seem needed, no more.
        self._needed: set[int] = set()

    def enter(self, tracked: Tracked, module: torch.nn.Module, args: Any, _depth: int) -> None:
        """See `Run`."""
        facts, first = facts_of(args), self._packer.book.position
        has_tensor = len(args) > 0 and isinstance(args[0], torch.Tensor)
        stays = has_tensor and torch.is_grad_enabled() and self._has_hooks()
        self._calls.append(_Call(tracked, first, facts, module.training, stays))

    def leave(self, tracked: Tracked) -> None:
        """A module ends."""
        if not self._calls or self._calls[-1].tracked is not tracked:
            return  # an error came in between, and the calls around it are not learned
        call = self._calls.pop()
        call.stays = call.stays and self._has_hooks()
        call.n_places = self._packer.book.position - call.first
        self._ended.append(call)
        if self._calls:
            self._calls[-1].take(call)

    def pack(self, tensor: torch.Tensor) -> object:
        """Pack a tensor, and note it."""
        packed = self._engine.pack(tensor)
        remat = _remat_of(packed)
        if remat is not None:
            self._needed.update(map(id, remat.inputs))
        if self._calls:
            self._note(self._calls[-1], tensor, packed)
        return packed

    def end(self) -> list[Tracked]:
        """Say which modules are quiet from here on. Returns: all modules that were called."""
        found: dict[int, list[_Call]] = {}
        for call in self._ended:
            found.setdefault(id(call.tracked), []).append(call)
        for calls in found.values():
            call = calls[0]
            alone = len(calls) == 1 and self._needed.isdisjoint(call.kept)
            call.tracked.learn(call.stretch() if alone else None)
        return [calls[0].tracked for calls in found.values()]

    def _has_hooks(self) -> bool:
        return hook_stack.owner_of_top() is self._pair()

    def _note(self, call: _Call, tensor: torch.Tensor, packed: object) -> None:
        book = self._packer.book
        has_place = book.position > call.first + call.n_places
        place = book.last_place if has_place else None
        if isinstance(packed, KeptParameter):
            call.parameters.append(tensor.nbytes)
        elif not isinstance(packed, Kept):
            call.stays = False
        elif place is not None and place.choice is STAYS:
            call.by_goal.append(tensor.nbytes)
        elif place is not None and (rest := self._packer.rest_at(place)) is not None:
            call.until.append(rest.until)
            if place.shares:
                call.shared.append(0)
            else:
                call.rests.append(rest)
        elif not has_place and self._packer.is_small(tensor):
            call.small.append(tensor.nbytes)
        else:
            call.stays = False
        call.n_places = book.position - call.first
        call.kept.append(id(packed))


def _remat_of(packed: object) -> Remat | None:
    if isinstance(packed, PackedView):
        return packed.token.remat
    first = getattr(packed, "first", None) or packed
    return first.remat if isinstance(first, Recomputed) else None
