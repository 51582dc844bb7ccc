"""`Copied`: a saved tensor that was brought over a link, without a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.tolerance import EXACT, needed_tolerance
from cswap.engine.saved.without_handle import SharedUse, WithoutHandle

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.engine.recipe import Recipe
    from cswap.engine.transfer.device_lanes import Lane
    from cswap.engine.transfer.host_copy import HostCopy


class Copied(WithoutHandle):
    """One saved tensor, which is the whole of its storage, with a copy or an encoding on the host.

    Attributes:
        source: the tensor's own memory, in its layout or [n] flat, until it has been read.
        copy: on the host, or on its way.
        aligned: whether the tensor began at an address at which new memory may begin.
    """

    __slots__ = ("aligned", "copy", "source")

    copy: HostCopy

    def __init__(
        self,
        tensor: torch.Tensor,
        recipe: Recipe,
        source: torch.Tensor,
        lane: Lane,
        shared_use: SharedUse,
        codec: Codec,
    ) -> None:
        """See the attributes. Args: tensor: as autograd saves it; codec: that encodes it."""
        tolerance = EXACT if codec.lossless else needed_tolerance(codec)
        super().__init__(tensor, recipe, lane, shared_use, source.nbytes, tolerance=tolerance)
        self.source: torch.Tensor | None = source
        self.aligned = False

    @property
    def depth(self) -> int:
        """See `WithoutHandle.depth`."""
        return 0
