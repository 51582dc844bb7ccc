"""Finds out how a saved tensor can be computed again: `Finder`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.remat.search import Limits, NotFoundError, Search, is_hopeless, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.remat.record import Remat

DEFAULT_DEPTH: Final = 3
"""Operators one after the other; recomputation must not cascade (a lesson of Coop, 2023)."""

DEFAULT_PASSES: Final = 24
"""Reads and writes of memory of the result's size."""


class Finder:
    """Looks at tensors inside of the pack hook. Has no state but its limits; thread-safe."""

    def __init__(
        self,
        depth_of: Callable[[object], int | None],
        *,
        max_depth: int = DEFAULT_DEPTH,
        max_passes: int = DEFAULT_PASSES,
        through_unsaved: bool = True,
    ) -> None:
        """A finder for one engine.

        Args:
            depth_of: says of a packed object how many operators stand between it and bytes that
                are held: 0 for a tensor that is kept or swapped, `Remat.depth` for one that is
                computed again, None for an object of somebody else.
            max_depth: operators one after the other; costs time at unpack.
            max_passes: reads and writes of memory of the tensor's size, at most.
            through_unsaved: whether values in between may be ones that nobody saved; see
                `Remat.unseen`.
        """
        self._limits = Limits(depth_of, max_depth, max_passes, through_unsaved)

    def find(self, tensor: torch.Tensor) -> Remat | None:
        """How to compute again the memory of a tensor that autograd is about to save.

        A tensor whose operator cannot run again costs about a microsecond, since nothing but the
        types of two nodes is looked at.

        Args:
            tensor: as autograd gives it to the pack hook, a plain `torch.Tensor`.

        Returns:
            None: it has to be stored.
        """
        base = tensor._base  # noqa: SLF001
        if base is None:
            base = tensor
        node = base.grad_fn
        if node is None:
            return None
        row = row_of(node)
        if row is None:
            return None
        if is_hopeless(node, row):
            return None
        try:
            return Search(self._limits, base).remat(node, row)
        except (NotFoundError, AttributeError):  # another torch's nodes have other attributes
            return None
