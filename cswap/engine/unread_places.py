"""Places of a step whose tensors backward does not read: `UnreadPlaces`.

Note [nothing is held on a guess]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The pack hook is not told which operator saves a tensor, and the operator's node cannot be reached
before the operator has run. So this takes three moments.

* In backward, the node that asks for a tensor is known. If that is an unread slot of the node's
  (Note [slots that backward does not read] in cswap/remat/unread.py), the place of that tensor in
  the step is noted.
* The next tensor of the place is held as it is, by an object that no other save shares. That the
  step repeats the one before is a guess.
* When a later tensor is saved that was made by that operator, its node can be reached: it is among
  the newest. If the node's slot holds the very object, the guess is proven, and the memory is let
  go. An object belongs to one slot, so nobody else can ask for its values.

If no later tensor leads to the node, or if another node asks in the end, the tensor stays until
then, and its place goes the general way from the next step on. Either is remembered for the place
when the engine forgets its recipes (`known`): a goal's plan knows no unread tensor.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch

from cswap.advisor.live_costs import UNREAD
from cswap.engine.recipes import MOST_PLACES
from cswap.engine.saved.eligibility import is_wrapped
from cswap.engine.saved.unread import Unread, UnreadPlace
from cswap.recent import Recent
from cswap.remat.unread import node_below, unread_slot

if TYPE_CHECKING:
    from cswap.advisor.advisor import Advisor
    from cswap.engine.recipes import Place
    from cswap.engine.saved.module_stack import Scope
    from cswap.engine.saved.packed import PackedView
    from cswap.stats.counters import Counters

MOST_LOOKS: Final = 32
"""Tensors that are saved after an unread one, and may lead to its node."""

NEVER: Final = "never"
"""Of a place whose tensor was not proven to be unread."""

_Facts: TypeAlias = tuple[int, "Scope", torch.dtype, torch.Size]

_current_node = torch._C._current_autograd_node  # noqa: SLF001
_next_number = torch._C._autograd._get_sequence_nr  # noqa: SLF001


class _Unproven(NamedTuple):
    """A tensor that is held until its node is found.

    Attributes:
        packed: its object.
        thread: that saves it.
        number: sequence number of the node that saves it: the newest one meanwhile.
        last: number of looks after which it stays.
    """

    packed: weakref.ref[Unread]
    thread: int
    number: int
    last: int


class UnreadPlaces:
    """The unread tensors of one engine. Threads share it without a lock.

    Attributes:
        unproven: tensors whose nodes are to be found.
        seeks: whether places are noted.
        known: `Place.unread` of those that were noted, or `NEVER`.
    """

    __slots__ = ("_advisor", "_counters", "_n_looks", "known", "seeks", "unproven")

    def __init__(self, counters: Counters, advisor: Advisor) -> None:
        """Args: counters, advisor: the engine's."""
        self._counters, self._advisor, self.seeks = counters, advisor, False
        self.unproven: list[_Unproven] = []
        self.known: Recent[_Facts, str] = Recent(MOST_PLACES)
        self._n_looks = 0

    def begin_place(self, place: Place) -> None:
        """A place is new, or takes another tensor than before."""
        found = self.known.get(_facts_of(place))
        if found is not None:
            place.may_be_unread = found != NEVER
            place.unread = found if place.may_be_unread else None

    def note(self, packed: PackedView) -> None:
        """Backward asks for a tensor: note its place, if backward does not read it."""
        place, handle = packed.place, packed.token.handle
        if place is None or not place.may_be_unread or place.recipe.stays:
            return
        if not packed.token.lane.device.unified:
            return  # no run on a GPU has shown yet that its kernels read no values there
        if unread_slot(_current_node(), packed) is None:
            return
        # One that is alone keeps its number, so those of the tensors after it stay the same.
        place.unread = "numbered" if packed.token.users == 1 else "shared"
        self.known[_facts_of(place)] = place.unread
        place.forget_ways()
        if packed.token.users == 1 and handle.site is not None:
            self._advisor.unread(handle.site, handle.position, handle.raw_nbytes)

    def take(self, tensor: torch.Tensor, place: Place) -> Unread | None:
        """The object of a tensor that is being saved at a place that was noted; None: another way.

        Args:
            tensor: it looks like the last one.
            place: where in the step.
        """
        lane = place.recipe.lane
        if (
            not self.seeks
            or lane is None
            or is_wrapped(tensor)
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        packed = Unread(tensor, place)
        number, last = _next_number() - 1, self._n_looks + MOST_LOOKS
        self.unproven.append(_Unproven(weakref.ref(packed), get_ident(), number, last))
        return packed

    def look(self, tensor: torch.Tensor) -> None:
        """Find the nodes of unproven tensors. Args: tensor: that is saved after them."""
        if tensor.requires_grad and not tensor.is_leaf:
            self._n_looks += 1
        thread, newest = get_ident(), _next_number() - 1
        for one in self.unproven.copy():
            packed = one.packed()
            if packed is None:
                self._drop(one)
            elif one.thread == thread and one.number < newest:
                node = node_below(tensor, one.number, newest)
                if node is not None and unread_slot(node, packed) is not None:
                    if self._drop(one):
                        packed.let_go()
                        if packed.place.unread == "numbered":
                            nbytes = packed.place.nbytes
                            self._counters.moves.append((0, 0, 1, UNREAD, nbytes, 0, 0.0))
                        else:  # its bytes are counted where they were saved first
                            self._counters.share()
                elif node is not None or self._n_looks > one.last:
                    self._give_up(one, packed)

    def begin_step(self) -> None:
        """A step begins: nothing leads to nodes of the one before."""
        for one in self.unproven.copy():
            packed = one.packed()
            if packed is None:
                self._drop(one)
            else:
                self._give_up(one, packed)

    def asked(self, packed: Unread) -> None:
        """Somebody asks for a tensor whose node has not been found."""
        for one in self.unproven.copy():
            if one.packed() is packed:
                self._give_up(one, packed)

    def _give_up(self, one: _Unproven, packed: Unread) -> None:
        # The tensor stays, and its place goes the general way from here on.
        place = packed.place
        place.unread, place.may_be_unread = None, False
        self.known[_facts_of(place)] = NEVER
        if self._drop(one):
            self._counters.keep("unproven", place.nbytes)

    def _drop(self, one: _Unproven) -> bool:
        # Whether no other thread has done so.
        try:
            self.unproven.remove(one)
        except ValueError:
            return False
        return True


def _facts_of(place: UnreadPlace) -> _Facts:
    recipe = place.recipe
    return place.number, recipe.scope, recipe.dtype, recipe.sizes
