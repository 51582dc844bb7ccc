"""The stretches of a model's call between two boundaries of modules: `Stretch`, `Boundary`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from cswap.stats.counters import Unseen

    Arguments: TypeAlias = tuple[object, ...]

BACK_OFF: Final = 4
"""Factor by which the number of like calls grows that a stretch needs after it has changed."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The tensors that a call of the model saves between two boundaries that follow each other.

    Attributes:
        first: number of the first one in the step's sequence of places.
        n_places: how many have one.
        sizes: bytes of each, in order.
        arguments: of the module that begins, or the result of the one that ends: sizes, dtypes, and
            whether they need a gradient.
        training: whether that module was in training mode.
        ends: the boundary at the other end; None: the call of the model ends there.
    """

    first: int
    n_places: int
    sizes: tuple[int, ...]
    arguments: Arguments
    training: bool
    ends: Boundary | None

    @property
    def begins_with_a_tensor(self) -> bool:
        """Whether a change of sizes would be seen where they begin."""
        return any(isinstance(fact, tuple) for fact in self.arguments)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Such tensors, if all of them stay.

    Attributes:
        saved: the tensors.
        unseen: those that do not rest, for the counts.
        resting: numbers of the places that rest (Note [a tensor that rests] in rest.py).
    """

    saved: Saved
    unseen: Unseen
    resting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Stretches in a row: the hooks are off.

    Attributes:
        first: the tensors of the first one.
        ends: the boundary at the other end; None: the call of the model ends there.
        n_places: of all tensors.
        unseen: all tensors, for the counts.
        resting: position in the step and bytes of those that rest, each memory once, in order.
    """

    first: Saved
    ends: Boundary | None
    n_places: int
    unseen: Unseen
    resting: tuple[tuple[int, int], ...]


class Boundary:
    """A moment in a call of the model: it begins, or a module begins or ends.

    Attributes:
        module_ends: if a module begins here, the boundary where it ends; else None.
        stretch: that begins here, if all of its tensors stay; else None.
        span: for which the hooks are taken off here, in the call that runs; else None.
        wakes: number of the next place, where the hooks are put back here; else -1.
        turns: whether either is to happen.
    """

    __slots__ = ("_last", "_like", "_wanted", "module_ends", "span", "stretch", "turns", "wakes")

    def __init__(self, module_ends: Boundary | None = None) -> None:
        """Args: module_ends: see the class."""
        self.module_ends = module_ends
        self.stretch: Stretch | None = None
        self._last: Saved | None = None  # in the last call of the model that learned
        self._like, self._wanted = 0, 1  # calls in a row that were like the one before
        self.span: Span | None = None
        self.wakes, self.turns = -1, False

    def learn(self, saved: Saved, stretch: Stretch | None) -> bool:
        """Note what was saved from here on; whether that is as before.

        Args:
            saved: the tensors.
            stretch: the same, if all of them stay; else None.
        """
        before, alike = self.stretch, saved == self._last
        if alike:
            self._like += 1
        else:
            if self._like:
                self._wanted *= BACK_OFF
            self._like = 0
        self._last = saved
        self.stretch = stretch if self._like >= self._wanted else None
        return alike and (before is None) == (self.stretch is None)

    def forget(self) -> None:
        """The step has changed."""
        self.stretch = self._last = None
        self._like = 0
        self.stay()

    def turn_off(self, span: Span) -> None:
        """The hooks are to be taken off here."""
        self.span, self.turns = span, True

    def turn_on(self, place: int) -> None:
        """The hooks are to be put back here. Args: place: number of the next one."""
        self.wakes, self.turns = place, True

    def stay(self) -> None:
        """The hooks are to be as they were."""
        self.span = None
        self.wakes, self.turns = -1, False


def facts_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """The facts of a model's arguments, and of those in lists, tuples and dicts among them."""
    values: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        else:
            values.append(value)
    return facts_of(tuple(values))


def facts_of(values: Any) -> Arguments:
    """The facts of arguments, or of a result, that are compared; of other objects, the type."""
    if not isinstance(values, tuple):
        values = (values,)
    try:
        if len(values) == 1 and type(x := values[0]) is torch.Tensor:  # as most: fewer calls
            return torch.is_grad_enabled(), (x.shape, x.dtype, x.requires_grad)
        facts = [
            (x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else type(x)
            for x in values
        ]
    except RuntimeError:  # nested tensors have no shape
        facts = [_facts_if_nested(x) for x in values]
    return (torch.is_grad_enabled(), *facts)


def _facts_if_nested(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return type(x)
    sizes = tuple(part.shape for part in x.unbind()) if x.is_nested else x.shape
    return sizes, x.dtype, x.requires_grad
