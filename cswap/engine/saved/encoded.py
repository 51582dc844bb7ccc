"""`Encoded`: a saved tensor that was encoded where it was saved, without a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.saved.without_handle import WithoutHandle

if TYPE_CHECKING:
    from cswap.codecs.base import Codec
    from cswap.engine.transfer.in_line import Encoding, InLine
    from cswap.engine.transfer.notes import TripNotes


class Encoded(WithoutHandle):
    """One saved tensor, which is the whole of its storage, as an encoding in host memory.

    Attributes:
        codec: that encoded it.
        encoding: of the tensor.
        in_line: that has encoded it, and decodes it.
        aligned: whether the tensor began at an address at which new memory may begin.
        notes: to be told how long the first round trip took; None: nobody asks.
    """

    __slots__ = ("aligned", "codec", "encoding", "in_line", "notes")
    depth = 0

    codec: Codec
    encoding: Encoding
    in_line: InLine
    aligned: bool
    notes: TripNotes | None
