"""Modules in which no tensor leaves run without the hooks: `QuietModules`.

Note [quiet modules]
~~~~~~~~~~~~~~~~~~~~
torch calls Python twice for each tensor that is saved under hooks, also for a parameter. Where all
tensors that a module saves stay, that is for nothing. So the hooks are taken off torch's stack
while such a module runs, and autograd holds its tensors as it does without cswap.

Which modules are quiet is learned in calls of the model with all hooks on. In those, the tensors of
each module are noted. A module is quiet if it is called once, if two such calls of the model agree,
and if none of its tensors leaves or is the input of a tensor that is computed again: that is read
in autograd's node, and only the hooks' objects can be read there. Models may take turns (the
generator of a GAN does), so pairs of calls learn, at uneven intervals. A module that was not like
before needs more such calls each time.

A quiet module has its hooks on as soon as anything differs that can be seen where it begins: the
place in the step's sequence of saved tensors (Note [a step goes by position] in recipes.py), the
sizes, the dtype and the need of a gradient of its positional arguments, training mode, and which of
the model's parameters need a gradient. What cannot be seen there is seen in the next call that
learns. Until then a tensor stays that could have left; no value can be wrong by that.

If somebody's hooks are on top of ours, or below ours, nothing is taken off: the tensors would be
given to those.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from cswap.engine.order.chooser import STAYS
from cswap.engine.saved.packed import Kept, KeptParameter, PackedView
from cswap.engine.saved.recomputed import Recomputed
from cswap.stats.counters import SHARED

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from cswap.engine.engine import SwapEngine
    from cswap.engine.saved.rest import Rest
    from cswap.stats.counters import Unseen

    Arguments: TypeAlias = tuple[object, ...]

_push = torch._C._autograd._push_saved_tensors_default_hooks  # noqa: SLF001
_pop = torch._C._autograd._pop_saved_tensors_default_hooks  # noqa: SLF001
_top: Final[Callable[[bool], Any]] = torch._C._autograd._top_saved_tensors_default_hooks  # noqa: SLF001


FIRST_LEARNED: Final = 4
"""Calls of the model that learn at first."""

INTERVALS: Final = (14, 19, 16, 23, 11, 17, 21, 13)
"""Calls between the beginnings of two pairs that learn, in turns: see the Note."""

BACK_OFF: Final = 4
"""Factor by which the number of like calls grows that a module needs after it has changed."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one call of a module saves, if all of it stays.

    Attributes:
        first: number of the first tensor in the step's sequence of places.
        n_places: how many of the tensors have one.
        arguments: of its forward: sizes, dtypes, and whether they need a gradient.
        training: whether the module was in training mode.
        unseen: the tensors, for the counts.
        resting: of those that rest (Note [a tensor that rests] in rest.py).
    """

    first: int
    n_places: int
    arguments: Arguments
    training: bool
    unseen: Unseen
    resting: Resting | None


@dataclass(frozen=True, slots=True)
class Resting:
    """The tensors of a call that rest.

    Attributes:
        n: how many have a position.
        until: first step in which one of them no longer rests. Rests begin anew, and the module is
            the same, so this is not compared.
        limited: of those that stay for the limit of time: see `Rest`.
    """

    n: int
    until: int = field(compare=False)
    limited: frozenset[tuple[int, int]]


class Tracked:
    """A module whose calls are followed.

    Attributes:
        stretch: what its call saves, while the module is quiet; else None.
    """

    __slots__ = ("_last", "_like", "_wanted", "stretch")

    def __init__(self) -> None:
        self.stretch: Stretch | None = None
        self._last: Stretch | None = None  # of the last call of the model that learned
        self._like, self._wanted = 0, 1  # calls in a row that were like the one before

    def learn(self, stretch: Stretch | None) -> None:
        """Args: stretch: what the module saved in the last call; None: it is not quiet."""
        if stretch is not None and stretch == self._last:
            self._like += 1
        else:
            if self._like:
                self._wanted *= BACK_OFF
            self._like = 0
        self._last = stretch
        self.stretch = stretch if self._like >= self._wanted else None

    def forget(self) -> None:
        """The step has changed."""
        self.stretch = self._last = None
        self._like = 0


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
        limited = {rest.limited for rest in self.rests if rest.reason == "slowdown"}
        return Resting(len(self.rests), min(self.until), frozenset(limited))

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


class Pair(Protocol):
    """The hooks of one call of the model: `cswap.hooks.HookPair`."""

    def pack(self, tensor: torch.Tensor) -> object:
        """Autograd's hook."""
        ...

    def pack_by(self, pack: Callable[[torch.Tensor], object]) -> None:
        """Args: pack: is called instead of the engine's from here on, and calls that."""
        ...


class Run:
    """One call of the model, in its thread. The hooks are off while a quiet module runs.

    Attributes:
        off: length of the stack of scopes in the outermost quiet module; 0: the hooks are on.
        ended: whether a rest has ended in a module, which will be quiet again when that is learned.
    """

    learns: Final = False
    """A `Learner` does."""

    def __init__(self, engine: SwapEngine, pair: Pair) -> None:
        """Args: engine: swaps; pair: the hooks."""
        self._engine, self._pair = engine, pair
        self.off = 0
        self.ended = False

    def enter(self, tracked: Tracked, module: torch.nn.Module, args: Any, depth: int) -> None:
        """A module begins, and the hooks are on.

        Args:
            tracked: it.
            module: it.
            args: of its forward.
            depth: length of the stack of scopes in it.
        """
        stretch, packer = tracked.stretch, self._engine.packer
        if stretch is None or packer.book.position != stretch.first:
            return
        resting = stretch.resting
        if resting is not None and not packer.may_rest(resting.until, resting.limited):
            self.ended = True
            return
        if module.training is not stretch.training or _facts(args) != stretch.arguments:
            return
        if not _is_on_top(self._pair):
            return
        _pop()
        self.off = depth
        packer.book.skip(stretch.n_places)
        if resting is not None and resting.n:
            packer.rest_unseen(resting.n)

    def leave(self, tracked: Tracked) -> None:
        """The outermost quiet module ends."""
        self.off = 0
        if tracked.stretch is not None:
            self._engine.counters.unseen.append(tracked.stretch.unseen)
        if _top(True) is None:  # else somebody has put hooks there, and will take off the top ones
            _push(self._pair.pack, self._engine.unpack)


class Learner:
    """One call of the model with all hooks on: notes the tensors of each module."""

    learns: Final = True
    off: Final = 0

    def __init__(self, engine: SwapEngine, pair: Pair) -> None:
        """Args: engine: swaps; pair: the hooks, which are to call `pack`."""
        self._engine, self._packer = engine, engine.packer
        self._is_on_top = partial(_is_on_top, weakref.proxy(pair))  # the pair refers to this
        self._calls: list[_Call] = []  # under way, outermost first
        self._ended: list[_Call] = []
        # Ids: one that an object has after another is dead makes a module seem needed, no more.
        self._needed: set[int] = set()

    def enter(self, tracked: Tracked, module: torch.nn.Module, args: Any, _depth: int) -> None:
        """See `Run`."""
        facts, first = _facts(args), self._packer.book.position
        has_tensor = bool(args) and isinstance(args[0], torch.Tensor)
        stays = has_tensor and torch.is_grad_enabled() and self._is_on_top()
        self._calls.append(_Call(tracked, first, facts, module.training, stays))

    def leave(self, tracked: Tracked) -> None:
        """A module ends."""
        if not self._calls or self._calls[-1].tracked is not tracked:
            return  # an error came in between, and the calls around it are not learned
        call = self._calls.pop()
        call.stays = call.stays and self._is_on_top()
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


def _facts(args: tuple[Any, ...]) -> Arguments:
    # Of a module's forward: numbers and objects that are no tensors only by their type.
    return (
        torch.is_grad_enabled(),
        *[
            (x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else type(x)
            for x in args
        ],
    )


def _is_on_top(pair: Pair) -> bool:
    top = _top(True)
    return top is not None and getattr(top[0], "__self__", None) == pair


def _remat_of(packed: object) -> Any:
    if isinstance(packed, PackedView):
        return packed.token.remat
    first = getattr(packed, "first", None) or packed
    return first.remat if isinstance(first, Recomputed) else None


class QuietModules:
    """Learns which modules of one installed model are quiet."""

    def __init__(self, model: torch.nn.Module, engine: SwapEngine) -> None:
        """Args: model: it; engine: swaps for it."""
        self._model, self._engine = weakref.ref(model), engine
        self._parameters: list[torch.nn.Parameter] = []
        self._trained: list[bool] = []
        self._thread: int | None = None
        self._known: list[Tracked] = []
        self._version = -1
        self._n_calls = 0
        self._next = 0  # call that begins to learn
        self._run: Run | None = None  # the last one
        self._intervals = cycle(INTERVALS)

    def run(self, pair: Pair) -> Run | Learner | None:
        """For the call of the model that begins, in this thread; None: all hooks stay on.

        Args:
            pair: the hooks, before they are pushed.
        """
        me = threading.get_ident()
        if self._thread is None:
            self._thread = me
        if me != self._thread or not self._engine.may_be_quiet or _top(True) is not None:
            return None
        version = self._engine.packer.book.version
        trained = [p.requires_grad for p in self._parameters]
        if version != self._version or trained != self._trained:
            self._version = version
            self._forget()
        before, self._run = self._run, None
        if before is not None and before.ended:
            self._next = self._n_calls
        if not self._is_due() and not self._engine.looks:
            self._run = Run(self._engine, pair)
            return self._run
        model = self._model()
        assert model is not None  # it is being called
        self._parameters = list(model.parameters())
        self._trained = [p.requires_grad for p in self._parameters]
        learner = Learner(self._engine, pair)
        pair.pack_by(learner.pack)
        return learner

    def _is_due(self) -> bool:
        n = self._n_calls
        self._n_calls = n + 1
        if n > self._next + 1:
            self._next += next(self._intervals)
        return n < FIRST_LEARNED or n >= self._next

    def learn(self, learner: Learner) -> None:
        """A call of the model has ended well. Args: learner: that noted its tensors."""
        before, self._known = self._known, learner.end()
        called = set(map(id, self._known))
        for tracked in before:
            if id(tracked) not in called:
                tracked.forget()

    def _forget(self) -> None:
        for tracked in self._known:
            tracked.forget()
        self._known = []
