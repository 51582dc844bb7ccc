"""`InLineSlot`: one saved tensor of each step that is encoded in the thread that saves it.

Note [encoded without a handle]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The encoding is made before pack returns, so there is no state between two threads. The tensor has
to be the whole of its storage, and its encoding goes to the host store.
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
        reclaimer: of the engine.
    """

    __slots__ = ("in_line", "moved", "moves", "reclaimer", "tolerance")

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
        self.moves, self.reclaimer = state.counters.moves, state.reclaimer

    def take(self, tensor: torch.Tensor, address: int, step: int) -> Encoded | None:
        """See `Slot.take`."""
        in_line, nbytes, codec = self.in_line, self.nbytes, self.codec
        key = DEFAULT_KEY if codec.lossless else EncodeKey(in_line.seed, self.position, step)
        try:
            encoding = in_line.encode(flat_whole(tensor), codec, key)
        except Exception:  # the general way meets it again, and counts it
            return None
        if encoding is None:
            return None
        loan, used, seconds, _ = encoding
        packed = Encoded(
            tensor, self.recipe, self.lane, self.shared_use, nbytes, tolerance=self.tolerance
        )
        packed.codec, packed.encoding, packed.notes = codec, encoding, None
        packed.in_line = in_line
        packed.aligned = not address % ALIGNMENT
        packed.position, packed.step = self.position, step
        moves = self.moves
        moves.append(self.moved)  # until it was encoded
        moves.append((-nbytes, loan.known.size, 0, codec.name, nbytes, used, seconds))
        self.reclaimer.watch_encoding(packed, loan, in_line.host)
        notes = self.notes
        if self.advice is not None:
            self.encoded_bytes, packed.notes = used, self
        elif notes is not None and notes.learns:
            notes.note_encoded(codec.name, nbytes, used)
            packed.notes = notes
        return packed
