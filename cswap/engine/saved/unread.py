"""`Unread`: a saved tensor whose values backward does not read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

import torch

from cswap.codecs.tolerance import COARSE
from cswap.engine.saved.modified import modified_error
from cswap.errors import ValuesGoneError
from cswap.remat.reads import Packed
from cswap.remat.unread import asked_by_engine

if TYPE_CHECKING:
    from cswap.engine.recipe import Recipe

NO_VALUES: Final = COARSE + 1
"""Tolerance of these objects: no tensor is computed again from them."""

_current_backward = torch._C._current_graph_task_id  # noqa: SLF001
_NO_BACKWARD: Final = -1


class UnreadPlace(Protocol):
    """The part of a `Place` that its unread tensors ask for, and whoever notes that they are."""

    recipe: Recipe
    nbytes: int
    number: int
    unread: str | None
    may_be_unread: bool

    def forget_ways(self) -> None:
        """Forget how the last tensor went."""
        ...


class Unread(Packed):
    """One saved tensor of which backward needs nothing but the layout.

    Attributes:
        tensor: shares the memory of the saved tensor; None: it was let go.
        counter: counts the versions with that.
        version: at which it was saved.
        place: in the step; its recipe has the tensor's layout.
    """

    __slots__ = ("__weakref__", "counter", "place", "tensor", "version")
    depth = 0
    tolerance = NO_VALUES

    def __init__(self, tensor: torch.Tensor, place: UnreadPlace) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.counter = counter = tensor.detach()
        counter.data = place.recipe.nothing
        self.version = tensor._version  # noqa: SLF001
        self.place = place

    def let_go(self) -> None:
        """Hold nothing from here on."""
        self.tensor = None

    def unpack(self) -> torch.Tensor:
        """A tensor with the layout of the saved one: that one, while its memory is held.

        Raises:
            RuntimeError: autograd's own: the tensor was modified in place since it was saved.
            ValuesGoneError: there is no backward: somebody looks at the node.
        """
        recipe, tensor = self.place.recipe, self.tensor
        if self.counter._version != self.version:  # noqa: SLF001
            raise modified_error(self.counter, recipe.sizes, self.version)
        if tensor is not None:
            return tensor
        if _current_backward() == _NO_BACKWARD:
            raise ValuesGoneError(recipe.sizes, recipe.dtype)
        found = torch.empty_strided(
            recipe.sizes, recipe.strides, dtype=recipe.dtype, device=recipe.device
        )
        # Nobody who looks at the values inside of a backward is to take them for the tensor's.
        return found if asked_by_engine() else found.fill_(math.nan)
