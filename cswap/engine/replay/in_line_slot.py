"""`InLineSlot`: one saved tensor of each step that is encoded in the thread that saves it.

Note [encoded without a handle]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The tensor has to be the whole of its storage. Its encoding is made as that of a tensor with a
handle is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.base import DEFAULT_KEY, EncodeKey
from cswap.codecs.tolerance import EXACT, needed_tolerance
from cswap.engine.replay.slot import CodecSlot
from cswap.engine.saved.aliases import ALIGNMENT, flat_whole
from cswap.engine.saved.encoded import Encoded
from cswap.stats.counters import SAVED

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.engine.replay.slot import SlotPlace
    from cswap.engine.state import EngineState
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.in_line import InLine
    from cswap.stats.counters import Moved


class InLineSlot(CodecSlot):
    """See the top, and `Slot`.

    Attributes:
        in_line: encodes them.
        tolerance: of the codec.
        moved: counts one that has been saved and not encoded yet.
        moves: see `Counters`.
    """

    __slots__ = ("in_line", "moved", "moves", "tolerance")

    def __init__(
        self,
        handle: Handle,
        place: SlotPlace,
        check: Callable[[torch.Tensor], bool],
        in_line: InLine,
        state: EngineState,
    ) -> None:
        """See the attributes, and `CodecSlot`. Args: state: the engine's."""
        super().__init__(handle, place, check)
        codec = self.codec
        self.in_line = in_line
        self.tolerance = EXACT if codec.lossless else needed_tolerance(codec)
        self.moved: Moved = (self.nbytes, 0, *SAVED)
        self.moves = state.counters.moves

    def take(self, tensor: torch.Tensor, address: int, step: int) -> Encoded | None:
        """See `Slot.take`."""
        in_line, nbytes, codec, key = self.in_line, self.nbytes, self.codec, DEFAULT_KEY
        if not codec.lossless:
            key = EncodeKey(in_line.seed, self.position, step)
        try:
            stored = in_line.encode(flat_whole(tensor), codec, key)
        except Exception:  # the general way meets it again, and counts it
            return None
        used = stored.nbytes
        packed = Encoded(
            tensor, self.recipe, self.lane, self.shared_use, nbytes, tolerance=self.tolerance
        )
        packed.stored, packed.in_line, packed.notes = stored, in_line, None
        packed.aligned = not address % ALIGNMENT
        packed.position, packed.step = self.position, step
        moves = self.moves
        moves.append(self.moved)  # until it was encoded
        moves.append((-nbytes, stored.host_bytes, 0, codec.name, nbytes, used, stored.encode_s))
        notes = self.notes
        if self.advice is not None:
            self.encoded_bytes, packed.notes = used, self
        elif notes is not None and notes.learns:
            notes.note_encoded(codec.name, nbytes, used)
            packed.notes = notes
        return packed
