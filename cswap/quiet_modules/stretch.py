"""What a call of a quiet module saves: `Stretch`, and the modules that are followed: `Tracked`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from typing import TypeAlias

    from cswap.stats.counters import Unseen

    Arguments: TypeAlias = tuple[object, ...]

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
        tensors: position in the step and bytes of each, in order.
        until: first step in which one of them no longer rests. Rests begin anew, and the module is
            the same, so this is not compared.
        limited: of those that stay because of the limit of time: see `Rest`.
    """

    tensors: tuple[tuple[int, int], ...]
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


def facts_of(args: tuple[Any, ...]) -> Arguments:
    """What is compared of a forward's arguments: of those that are no tensors, only the type."""
    return (
        torch.is_grad_enabled(),
        *[
            (x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else type(x)
            for x in args
        ],
    )
