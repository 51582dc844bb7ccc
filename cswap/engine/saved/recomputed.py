"""`Recomputed`: a saved tensor that is computed again, without a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.saved.without_handle import SharedUse, WithoutHandle

if TYPE_CHECKING:
    import torch

    from cswap.engine.recipe import Recipe
    from cswap.engine.transfer.device_lanes import Lane
    from cswap.remat.record import Remat


class Recomputed(WithoutHandle):
    """One saved tensor that is computed again. It holds no bytes.

    Attributes:
        remat: how it is computed.
        is_memory: whether the tensor has the layout of its memory.
    """

    __slots__ = ("is_memory", "remat")

    def __init__(
        self,
        tensor: torch.Tensor,
        recipe: Recipe,
        remat: Remat,
        lane: Lane,
        shared_use: SharedUse,
        *,
        tolerance: int,
    ) -> None:
        """See the attributes. Args: tensor: as autograd saves it."""
        nbytes = remat.formula.nbytes
        super().__init__(tensor, recipe, lane, shared_use, nbytes, tolerance=tolerance)
        self.remat = remat
        self.is_memory = tensor._base is None  # noqa: SLF001
        if not self.is_memory:
            self.offset = int(tensor.storage_offset())

    @property
    def depth(self) -> int:
        """See `WithoutHandle.depth`."""
        return self.remat.formula.depth

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """See `WithoutHandle.view_of`."""
        return memory if self.is_memory else super().view_of(memory)
