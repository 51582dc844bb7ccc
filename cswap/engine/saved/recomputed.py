"""`Recomputed`: a saved tensor that is computed again, without a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.saved.without_handle import WithoutHandle

if TYPE_CHECKING:
    import torch

    from cswap.remat.record import Remat


class Recomputed(WithoutHandle):
    """One saved tensor that is computed again. It holds no bytes.

    Attributes:
        remat: how it is computed.
        is_memory: whether the tensor has the layout of its memory.
    """

    __slots__ = ("depth", "is_memory", "remat")

    remat: Remat
    is_memory: bool

    def rebuild(self, memory: torch.Tensor, *, own: bool) -> torch.Tensor:
        """See `WithoutHandle.rebuild`."""
        return memory if self.is_memory else super().rebuild(memory, own=own)
