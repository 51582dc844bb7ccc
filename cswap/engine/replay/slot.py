"""One saved tensor of each step, and the way that it goes: `Slot`.

`replay.py` says when a slot takes a tensor.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from cswap.advisor.site_history import Advice
from cswap.codecs.tolerance import EXACT
from cswap.engine.saved.aliases import ALIGNMENT
from cswap.engine.saved.encoded import Encoded
from cswap.engine.saved.tensor_check import check_of
from cswap.stats.counters import SAVED

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.codecs.base import ByAddress, Codec
    from cswap.engine.recipe import Recipe
    from cswap.engine.saved.reclaim import Reclaimer
    from cswap.engine.saved.without_handle import SharedUse, WithoutHandle
    from cswap.engine.transfer.notes import Notes
    from cswap.stats.counters import Counters, Moved


class Slot(abc.ABC):
    """What the next tensor of one place needs, if it looks like the last one.

    Attributes:
        check: whether it does.
        codec: that brings it out.
        notes: that are taken of that.
        scope, recipe, shared_use, lane, nbytes: of the last one.
        position: of that one among the tensors that were saved in its step.
        is_used: whether a tensor has gone by it since the advisor was told.
        advice: the notes, if the advisor takes them: these wait until the next step begins, since
            with cold caches they take as long as a small encode.
        encoded_bytes: of the last tensor of which the advisor was not told; 0: there is none.
        device_s: seconds that encode and decode of it took.
    """

    __slots__ = (
        "advice",
        "check",
        "codec",
        "device_s",
        "encoded_bytes",
        "is_used",
        "lane",
        "nbytes",
        "notes",
        "position",
        "recipe",
        "scope",
        "shared_use",
    )

    def __init__(
        self,
        recipe: Recipe,
        shared_use: SharedUse,
        position: int,
        nbytes: int,
        codec: Codec,
        notes: Notes | None,
        check: Callable[[torch.Tensor], bool],
    ) -> None:
        """See the attributes."""
        assert recipe.lane is not None  # or such tensors would stay
        self.check, self.codec = check, codec
        self.recipe, self.scope, self.lane = recipe, recipe.scope, recipe.lane
        self.nbytes, self.position = nbytes, position
        self.is_used = False
        self.encoded_bytes, self.device_s = 0, 0.0
        self.renew(shared_use, notes)

    def renew(self, shared_use: SharedUse, notes: Notes | None) -> None:
        """The last tensor of the place has gone another way, with the same result. Args: its."""
        self.shared_use, self.notes = shared_use, notes
        self.advice = notes if isinstance(notes, Advice) and notes.learns else None

    def note_round_trip(self, codec: str, device_s: float) -> None:
        """See `TripNotes`."""
        self.device_s = device_s

    def tell(self) -> None:
        """Tell the advisor how the swap of the last tensor went."""
        encoded_bytes, device_s, advice = self.encoded_bytes, self.device_s, self.advice
        self.encoded_bytes, self.device_s = 0, 0.0
        if advice is not None and encoded_bytes:
            advice.note_encoded(self.codec.name, self.nbytes, encoded_bytes)
            if device_s:
                advice.note_round_trip(self.codec.name, device_s)

    @abc.abstractmethod
    def take(self, tensor: torch.Tensor, address: int, step: int) -> WithoutHandle | None:
        """The packed object of a tensor; None: it has to go another way.

        Args:
            tensor: as autograd saves it; it looks like the last one, and is at this position.
            address: of its memory.
            step: number of the step.
        """


class InLineSlot(Slot):
    """Of tensors that are encoded in the thread that saves them.

    Attributes:
        in_line: encodes them.
        way: of the codec for such tensors, by address.
        moved: counts one that has been saved and not encoded yet.
        moves: see `Counters`.
        reclaimer: of the engine.
        shelf: on which the last one's memory lay.
    """

    __slots__ = ("in_line", "moved", "moves", "reclaimer", "shelf", "way")

    def __init__(
        self,
        last: Encoded,
        notes: Notes | None,
        check: Callable[[torch.Tensor], bool],
        way: ByAddress,
        counters: Counters,
        reclaimer: Reclaimer,
    ) -> None:
        """See the attributes, and `Slot`. Args: last: tensor of the place."""
        super().__init__(
            last.recipe, last.shared_use, last.position, last.nbytes, last.codec, notes, check
        )
        self.in_line, self.way, self.shelf = last.in_line, way, last.encoding[0].known.shelf
        self.moved: Moved = (self.nbytes, 0, *SAVED)
        self.moves, self.reclaimer = counters.moves, reclaimer

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        last: Encoded,
        notes: Notes | None,
        counters: Counters,
        reclaimer: Reclaimer,
    ) -> InLineSlot | None:
        """The slot of a place; None: its tensors need all questions.

        Args:
            tensor: the last one of the place, as autograd saves it.
            last: packed object of the tensor, with its position.
            notes: that are taken of its encoding.
            counters: the engine's.
            reclaimer: the engine's.
        """
        way = last.encoding[3]
        if way is None or not last.codec.lossless:
            return None
        check = check_of(tensor)
        return None if check is None else cls(last, notes, check, way, counters, reclaimer)

    def take(self, tensor: torch.Tensor, address: int, step: int) -> Encoded | None:
        """See `Slot.take`."""
        in_line, way, nbytes, codec = self.in_line, self.way, self.nbytes, self.codec
        try:
            encoding = in_line.encode_at(address, way, self.shelf)
        except Exception:  # the whole way meets it again, and counts it
            return None
        if encoding is None:
            return None
        loan, used, seconds, _ = encoding
        known = loan.known
        self.shelf = known.shelf
        packed = Encoded(tensor, self.recipe, self.lane, self.shared_use, nbytes, tolerance=EXACT)
        packed.codec, packed.encoding, packed.notes = codec, encoding, None
        packed.in_line = in_line
        packed.aligned = not address % ALIGNMENT
        packed.position, packed.step = self.position, step
        moves = self.moves
        moves.append(self.moved)  # until it was encoded
        moves.append((-nbytes, known.size, 0, codec.name, nbytes, used, seconds))
        self.reclaimer.watch_encoding(packed, loan, in_line.host)
        notes = self.notes
        if self.advice is not None:
            self.encoded_bytes, packed.notes = used, self
        elif notes is not None and notes.learns:
            notes.note_encoded(codec.name, nbytes, used)
            packed.notes = notes
        return packed
