"""`Recomputed`: a saved tensor that is computed again, without a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.saved.without_handle import SharedUse, WithoutHandle

if TYPE_CHECKING:
    import torch

    from cswap.engine.transfer.device_lanes import Lane
    from cswap.remat.record import Remat


class Recomputed(WithoutHandle):
    """One saved tensor that is computed again. It holds no bytes.

    Attributes:
        remat: how it is computed.
    """

    __slots__ = ("remat",)

    def __init__(
        self,
        tensor: torch.Tensor,
        remat: Remat,
        lane: Lane,
        shared_use: SharedUse,
        *,
        tolerance: int,
    ) -> None:
        """See the attributes. Args: tensor: as autograd saves it."""
        super().__init__(tensor, lane, shared_use, remat.formula.nbytes, tolerance=tolerance)
        self.remat = remat

    @property
    def depth(self) -> int:
        """See `WithoutHandle.depth`."""
        return self.remat.formula.depth
