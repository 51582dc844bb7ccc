"""A call of the model with all hooks on, which notes where modules begin and end: `Recorder`."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from cswap import hook_stack
from cswap.dynamo import leave_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from typing import TypeAlias

    from cswap.engine.engine import SwapEngine
    from cswap.engine.recipe import Recipe
    from cswap.engine.recipes import Place

    Facts: TypeAlias = tuple[object, ...]


class Pair(Protocol):
    """The hooks of one call of the model: `cswap.hooks.HookPair`."""

    def pack(self, tensor: torch.Tensor) -> object:
        """Autograd's hook."""
        ...

    def pack_by(self, pack: Callable[[torch.Tensor], object]) -> None:
        """Args: pack: is called instead of the engine's from here on, and calls that."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a call in which all tensors stay, between two boundaries.

    Attributes:
        first: number of its first place.
        places: where its tensors are saved that are neither parameters nor small.
    """

    first: int
    places: Sequence[Place]


class Boundary:
    """A moment in a call of the model: it begins, or a module begins or ends.

    Attributes:
        span: for which the hooks are taken off here, in the call that runs; else None.
        wakes: number of the next place, where the hooks are put back here; else -1.
        turns: whether either is to happen.
    """

    __slots__ = ("span", "turns", "wakes")

    def __init__(self) -> None:
        self.span: Span | None = None
        self.wakes, self.turns = -1, False

    def turn_off(self, span: Span) -> None:
        """The hooks are to be taken off here."""
        self.span, self.turns = span, True

    def turn_on(self, place: int) -> None:
        """The hooks are to be put back here. Args: place: number of the next one."""
        self.wakes, self.turns = place, True

    def reset(self) -> None:
        """The hooks are to be as they were."""
        self.span, self.wakes, self.turns = None, -1, False


class Event(NamedTuple):
    """A boundary, as a call came to it.

    Attributes:
        boundary: it.
        place: number of the next one in the step's sequence of saved tensors.
        n_saved: tensors that the call had saved.
        ours: whether our hooks were on top, and gradients were wanted.
    """

    boundary: Boundary
    place: int
    n_saved: int
    ours: bool


class Record(NamedTuple):
    """A call with all hooks on.

    Attributes:
        events: in order.
        places: recipe of each place of the step that it came to, and bytes of the tensor.
    """

    events: list[Event]
    places: list[tuple[Recipe, int]]


class Recorder:
    """One call of the model, in its thread. Attributes: key: of the kind of call."""

    records: Final = True

    def __init__(self, engine: SwapEngine, pair: Pair, key: Hashable) -> None:
        """Args: engine: swaps; pair: the hooks, which are to call `pack`; key: see the class."""
        self.key, self._events = key, list[Event]()
        self._engine, self._n_saved = engine, 0
        self._pair = weakref.ref(pair)  # which refers to this
        pair.pack_by(self.pack)

    def pack(self, tensor: torch.Tensor) -> object:
        """Pack a tensor, and count it."""
        self._n_saved += 1
        return self._engine.pack(tensor)

    @leave_alone
    def at(self, boundary: Boundary) -> None:
        """See `ModuleCalls`."""
        ours = torch.is_grad_enabled() and hook_stack.owner_of_top() is self._pair()
        place = self._engine.packer.book.position
        self._events.append(Event(boundary, place, self._n_saved, ours))

    def record(self) -> Record:
        """The record, when the call ends."""
        book = self._engine.packer.book
        places = book.begun.places[: book.position]
        return Record(self._events, [(place.recipe, place.nbytes) for place in places])


def facts_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
    """The facts of a model's arguments, and of those in lists, tuples and dicts among them.

    Sizes, dtype and need of a gradient of a tensor; the type of another object.
    """
    values: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        else:
            values.append(value)
    return tuple(map(_facts, values))


def _facts(x: Any) -> object:
    if not isinstance(x, torch.Tensor):
        return type(x)
    try:
        sizes: object = x.shape
    except RuntimeError:  # nested tensors have no shape
        sizes = tuple(part.shape for part in x.unbind())
    return sizes, x.dtype, x.requires_grad
