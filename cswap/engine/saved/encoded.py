"""`Encoded`: a saved tensor that was encoded where it was saved, without a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.saved.without_handle import WithoutHandle

if TYPE_CHECKING:
    import torch

    from cswap.engine.transfer.in_line import InLine
    from cswap.engine.transfer.notes import TripNotes
    from cswap.engine.transfer.stored import Stored


class Encoded(WithoutHandle):
    """One saved tensor, which is the whole of its storage, as an encoding in host memory.

    Attributes:
        stored: the encoding.
        in_line: that has encoded it, and decodes it.
        aligned: whether the tensor began at an address at which new memory may begin.
        notes: to be told how long the first round trip took; None: nobody asks.
    """

    __slots__ = ("aligned", "in_line", "notes", "stored")
    depth = 0

    stored: Stored
    in_line: InLine
    aligned: bool
    notes: TripNotes | None

    def decode(self) -> torch.Tensor:
        """The tensor's memory, in its layout.

        Raises:
            CorruptEncodingError: the codec cannot decode it.
            MemoryError: no memory to decode into.
        """
        dtype, recipe, notes = self.dtype, self.recipe, self.notes
        out, decode_s = self.in_line.decode(self.stored, dtype, self.nbytes // dtype.itemsize)
        if notes is not None:
            self.notes = None
            notes.note_round_trip(self.stored.codec.name, self.stored.encode_s + decode_s)
        return out.as_strided(recipe.sizes, recipe.strides)
