"""Facts about a call site that need not be found out for each tensor again.

Note [a step goes by position]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Nearly every step saves the same tensors in the same order. So the recipe of the n-th tensor of a
step is expected to be that of the n-th tensor of the step before. A look at the tensor's module,
dtype, sizes and strides says whether it is. Where something may be lossy, or operators are
selected, the operator that made the tensor and the one that saves it have to be the same, too:
probabilities must not be rounded because a branch went another way. If it is another tensor, the
recipe is looked up by all of these, and if there is none, it is made.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cswap.engine.recipe import NO_ROLE, role_of
from cswap.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cswap.codecs.base import Codec
    from cswap.engine.link.link_way import LinkWay
    from cswap.engine.order.chooser import Choice
    from cswap.engine.order.looks import Stay
    from cswap.engine.recipe import Recipe, Role
    from cswap.engine.replay.slot import Slot
    from cswap.engine.saved.module_stack import Scope
    from cswap.engine.saved.without_handle import SharedUse
    from cswap.engine.transfer.notes import Notes
    from cswap.remat.record import Formula, Remat

MOST_RECIPES: Final = 1 << 12
"""Recipes that are remembered besides those of the places."""

MOST_PLACES: Final = 1 << 14
"""Places of a step that are remembered."""


@dataclass(slots=True, eq=False)
class Place:
    """One position in the sequence of tensors that a thread saves in a step.

    Attributes:
        recipe: of the tensor that was saved here last.
        nbytes: of that tensor.
        number: of the place.
        stay: of the last tensor; None: it has left, or nobody has asked the advisor.
        formula: by which the tensor could be computed again; None: it could not.
        shared_use: of the last tensor, if the next one may do without a handle.
        codec: that encoded that tensor; None: it was computed again.
        notes: that were taken of its encoding.
        saved_by: of the place that saves this place's tensors first, if they have no handles.
        choice: of a goal, for the last tensor; None: there is none.
        way: of the last tensor over a link (engine/link/); None: it took none.
        slot: that may take the next tensor (replay/replay.py).
        unread: backward does not read the last tensor (engine/unread_places.py), which is
            ``"numbered"`` among those of the step, or else ``"shared"``; None: it may.
        may_be_unread: whether that may be set.
    """

    recipe: Recipe
    nbytes: int
    number: int = -1
    stay: Stay | None = None
    formula: Formula | None = None
    shared_use: SharedUse | None = None
    codec: Codec | None = None
    notes: Notes | None = None
    saved_by: SharedUse | None = None
    choice: Choice | None = None
    way: LinkWay | None = None
    slot: Slot | None = None
    unread: str | None = None
    may_be_unread: bool = True

    def forget_ways(self) -> None:
        """Forget how the last tensor went: the next one goes another way."""
        self.stay = self.slot = self.way = self.shared_use = self.saved_by = None

    def note(self, remat: Remat | None) -> None:
        """The tensor that is saved here now can be computed again like this; None: it cannot."""
        formula = None if remat is None else remat.formula
        if formula is not self.formula:
            self.formula, self.shared_use = formula, None


class ThreadPlaces:
    """The places of one thread's steps.

    Attributes:
        next: number of the one that comes next.
        places: in order.
    """

    __slots__ = ("next", "places")

    def __init__(self) -> None:
        self.next = 0
        self.places: list[Place] = []


class RecipeBook:
    """Recipes by position in the step, and by call site. One sequence per thread.

    Attributes:
        learned: whether a recipe was made since somebody set this to False.
        by_role: whether call sites are told apart by operators, too.
        begun: sequence of the thread that has begun a step last.
        slots: of its places, those that take tensors in this step (replay/replay.py); None: nobody
            has asked.
    """

    __slots__ = ("_here", "_known", "begun", "by_role", "learned", "slots")

    def __init__(self, *, by_role: bool) -> None:
        """Args: by_role: see above."""
        self.learned = True
        self.by_role = by_role
        self._known: Recent[tuple[object, ...], Recipe] = Recent(MOST_RECIPES)
        self._here = _Here()
        self.begun = self._here.sequence
        self.slots: Sequence[Slot | Place | None] | None = None

    def begin_step(self) -> None:
        """Expect the first tensor of a step in this thread."""
        self.begun = here = self._here.sequence
        here.next = 0
        self.slots = None

    def next_place(self) -> Place | None:
        """The place that comes next in this thread; counts it. It may be another tensor's."""
        here = self._here.sequence
        n, places = here.next, here.places
        here.next = n + 1
        return places[n] if n < len(places) else None

    def place_at(self, number: int) -> Place | None:
        """The n-th place of a step in this thread."""
        places = self._here.sequence.places
        return places[number] if number < len(places) else None

    def is_of(self, place: Place, tensor: torch.Tensor, scope: Scope, operator: str) -> bool:
        """Whether this tensor is the one that is expected at a place."""
        recipe = place.recipe
        return (
            recipe.scope is scope
            and recipe.dtype is tensor.dtype
            and recipe.sizes == tensor.shape
            and recipe.strides == tensor.stride()
            and recipe.device == tensor.device
            and (not self.by_role or recipe.role == role_of(tensor, operator))
        )

    def known(self, tensor: torch.Tensor, scope: Scope, operator: str) -> Recipe | None:
        """The recipe of such a tensor, wherever in a step it comes."""
        return self._known.get(self._key(tensor, scope, operator))

    def learn(self, recipe: Recipe, tensor: torch.Tensor, operator: str) -> Place:
        """Remember the recipe of the tensor that was asked for last."""
        self._known[self._key(tensor, recipe.scope, operator)] = recipe
        self.learned = True
        return self.place(recipe, tensor.nbytes)

    def place(self, recipe: Recipe, nbytes: int) -> Place:
        """This recipe is the one to be expected where the last tensor was, of so many bytes."""
        here = self._here.sequence
        n = here.next - 1
        place = Place(recipe, nbytes, n)
        if 0 <= n < len(here.places):
            here.places[n] = place
        elif n >= 0 and n == len(here.places) and n < MOST_PLACES:
            here.places.append(place)
        return place

    def role(self, tensor: torch.Tensor, operator: str) -> Role:
        """See `Recipe`."""
        return role_of(tensor, operator) if self.by_role else NO_ROLE

    def forget(self) -> None:
        """Make every recipe anew."""
        self.learned = True
        self._known.clear()
        self._here = _Here()
        self.begun, self.slots = self._here.sequence, None

    def _key(self, tensor: torch.Tensor, scope: Scope, operator: str) -> tuple[object, ...]:
        role = self.role(tensor, operator)
        return (scope, tensor.dtype, tensor.shape, tensor.stride(), tensor.device, role)


class _Here(threading.local):
    def __init__(self) -> None:
        self.sequence = ThreadPlaces()
