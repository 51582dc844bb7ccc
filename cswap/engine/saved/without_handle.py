"""`WithoutHandle`: a saved tensor that is held without a handle (see replay/).

Note [saved again without a handle]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An activation such as relu saves its result, and the next operator saves the same tensor as its
input. The second one gets an object of its own, with the layout of its view, which refers to the
first. Backward asks for both, one soon after the other, so the first keeps the memory that was
computed or decoded until all of them have asked. The same holds where another tensor was computed
again from it before.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from cswap.engine.saved.modified import modified_error
from cswap.remat.reads import CLONE, Packed

if TYPE_CHECKING:
    import torch

    from cswap.engine.recipe import Recipe
    from cswap.engine.transfer.device_lanes import Lane


class SharedUse:
    """Other users of the memory of a saved tensor at a known place (see replay/).

    Attributes:
        seen: one of them needs the tensor's handle.
        again: another place saves the same tensor once more.
        last: the object that autograd got for the last such tensor, if that has no handle and
            ``again`` is set.
    """

    __slots__ = ("again", "last", "seen")

    def __init__(self) -> None:
        self.seen = self.again = False
        self.last: weakref.ref[WithoutHandle] | None = None


class WithoutHandle(Packed):
    """One saved tensor without a handle, with the dtype of its memory.

    Attributes:
        depth: number of operators in a row that compute it again; 0 if it holds bytes.
        recipe: of its place in the step; it has the tensor's layout.
        offset: of the tensor in its memory, in elements.
        lane: of its device.
        over_link: whether it has left over a link.
        stays: whether it is in its own memory.
        shared_use: of its place in the step.
        position: index of this tensor among those saved in its step.
        step: number of that step.
        dtype: of the tensor's memory.
        nbytes: of the tensor's memory.
        tolerance: for errors (cswap/codecs/tolerance.py).
        version: at which the tensor was saved.
        counter: counts the versions with the tensor.
        first: of those that were saved of this tensor; None: this one. All below is the first's.
        users: how many there are.
        uses: how often they were asked for.
        result: see `Waiting` in results.py, as the next two.
        took_s: seconds in the hooks so far.
        base: of which the tensor is a view, or the tensor itself, if it is expected to be saved
            again.
    """

    __slots__ = (
        "__weakref__",
        "base",
        "counter",
        "dtype",
        "first",
        "is_clone",
        "lane",
        "nbytes",
        "offset",
        "position",
        "ready",
        "recipe",
        "result",
        "result_version",
        "shared_use",
        "step",
        "tolerance",
        "took_s",
        "users",
        "uses",
        "version",
    )

    depth: int
    over_link = stays = False
    ready: Any
    result_version: int

    def __init__(
        self,
        tensor: torch.Tensor,
        recipe: Recipe,
        lane: Lane,
        shared_use: SharedUse,
        nbytes: int,
        *,
        tolerance: int,
    ) -> None:
        """See the attributes. Args: tensor: as autograd saves it."""
        self.recipe = recipe
        self.is_clone = type(tensor.grad_fn).__name__ == CLONE
        self.offset = 0
        self.lane = lane
        self.shared_use = shared_use
        self.dtype = recipe.dtype
        self.nbytes = nbytes
        self.tolerance = tolerance
        self.position = self.step = self.uses = 0
        self.users = 1
        self.first: WithoutHandle | None = None
        self.result: torch.Tensor | None = None
        self.took_s = 0.0
        self.base: weakref.ref[torch.Tensor] | None = None
        self.version = tensor._version  # noqa: SLF001
        self.counter = counter = tensor.detach()  # see `version_counter`
        counter.data = recipe.nothing

    def expect_others(self, tensor: torch.Tensor) -> None:
        """The same tensor will be saved again. Args: tensor: as autograd saves it now."""
        base = tensor._base  # noqa: SLF001
        self.base = weakref.ref(tensor if base is None else base)
        self.shared_use.last = weakref.ref(self)

    def owner(self) -> WithoutHandle:
        """Of the memory: the first one that was saved of this tensor.

        Raises:
            RuntimeError: autograd's own: the tensor was modified in place since it was saved.
        """
        if self.counter._version != self.version:  # noqa: SLF001
            raise modified_error(self.counter, self.recipe.sizes, self.version)
        return self.first or self

    def rebuild(self, memory: torch.Tensor, *, own: bool) -> torch.Tensor:
        """The saved tensor in its memory. Args: memory, own: see `PackedView.rebuild`."""
        sizes, strides = self.recipe.sizes, self.recipe.strides
        if (
            memory.shape == sizes
            and memory.stride() == strides
            and memory.storage_offset() == self.offset
        ):
            return memory
        return memory.as_strided(sizes, strides, self.offset)


class Again(WithoutHandle):
    """A tensor that another place has saved before: ``first`` brings it back."""

    __slots__ = ("depth",)

    def __init__(
        self, tensor: torch.Tensor, recipe: Recipe, first: WithoutHandle, shared_use: SharedUse
    ) -> None:
        """A user of memory that another one holds.

        Args:
            tensor: as autograd saves it.
            recipe: of its place.
            first: which holds it.
            shared_use: of the place of that one.
        """
        super().__init__(
            tensor, recipe, first.lane, shared_use, first.nbytes, tolerance=first.tolerance
        )
        self.offset = int(tensor.storage_offset())
        self.first, self.depth = first, first.depth
        self.position, self.step = first.position, first.step
        first.users += 1
