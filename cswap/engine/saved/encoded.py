"""`Encoded`: a saved tensor that was encoded where it was saved, without a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.tolerance import EXACT, needed_tolerance
from cswap.engine.saved.without_handle import SharedUse, WithoutHandle

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.engine.recipe import Recipe
    from cswap.engine.transfer.device_lanes import Lane
    from cswap.engine.transfer.in_line import Encoding
    from cswap.engine.transfer.notes import Notes


class Encoded(WithoutHandle):
    """One saved tensor, which is the whole of its storage, as an encoding in host memory.

    Attributes:
        codec: that encoded it.
        encoding: of the tensor.
        aligned: whether the tensor began at an address at which new memory may begin.
        notes: to be told how long the first round trip took; None: nobody asks.
    """

    __slots__ = ("aligned", "codec", "encoding", "notes")

    def __init__(
        self,
        tensor: torch.Tensor,
        recipe: Recipe,
        codec: Codec,
        encoding: Encoding,
        lane: Lane,
        shared_use: SharedUse,
    ) -> None:
        """See the attributes. Args: tensor: as autograd saves it."""
        tolerance = EXACT if codec.lossless else needed_tolerance(codec)
        super().__init__(tensor, recipe, lane, shared_use, tensor.nbytes, tolerance=tolerance)
        self.codec = codec
        self.encoding = encoding
        self.aligned = False
        self.notes: Notes | None = None

    @property
    def depth(self) -> int:
        """See `WithoutHandle.depth`."""
        return 0
