"""One standing order: what the next tensor of a place needs, if it looks like the last one.

`standing_orders.py` says when an order is followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.advisor.site_history import Advice
from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.tolerance import EXACT
from cswap.engine.saved.aliases import ALIGNMENT, flat_whole
from cswap.engine.saved.copied import Copied
from cswap.engine.saved.encoded import Encoded
from cswap.engine.saved.tensor_check import check_of
from cswap.stats.counters import SAVED

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Lock

    import torch

    from cswap.codecs.base import ByAddress, Codec
    from cswap.engine.order.step_order import StepOrder
    from cswap.engine.saved.reclaim import Reclaimer
    from cswap.engine.saved.without_handle import WithoutHandle
    from cswap.engine.transfer.link_copies import LinkCopies
    from cswap.engine.transfer.notes import Notes
    from cswap.stats.counters import Counters, Moved


class Order:
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
        last: WithoutHandle,
        codec: Codec,
        notes: Notes | None,
        check: Callable[[torch.Tensor], bool],
    ) -> None:
        """See the attributes. Args: last: tensor of the place, with its position."""
        self.check, self.codec, self.notes = check, codec, notes
        self.recipe, self.scope = last.recipe, last.recipe.scope
        self.shared_use, self.lane = last.shared_use, last.lane
        self.nbytes, self.position = last.nbytes, last.position
        self.is_used = False
        self.advice = notes if isinstance(notes, Advice) and notes.learns else None
        self.encoded_bytes, self.device_s = 0, 0.0

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

    def take(self, tensor: torch.Tensor, address: int, step: int) -> WithoutHandle | None:
        """The packed object of a tensor; None: it has to go another way.

        Args:
            tensor: as autograd saves it; it looks like the last one, and is at this position.
            address: of its memory.
            step: number of the step.
        """
        raise NotImplementedError


class EncodingOrder(Order):
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
        maker: OrderMaker,
    ) -> None:
        """See the attributes, and `Order`."""
        super().__init__(last, last.codec, notes, check)
        self.in_line, self.way, self.shelf = last.in_line, way, last.encoding[0].known.shelf
        self.moved: Moved = (self.nbytes, 0, *SAVED)
        self.moves, self.reclaimer = maker.counters.moves, maker.reclaimer

    def take(self, tensor: torch.Tensor, address: int, step: int) -> Encoded | None:
        """See `Order.take`."""
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


class CopyOrder(Order):
    """Of tensors that leave over a link.

    Attributes:
        copies: brings them to the host.
        as_it_is: whether one is copied in its own layout.
        maker: of the engine.
    """

    __slots__ = ("as_it_is", "copies", "maker")

    def __init__(
        self,
        last: Copied,
        codec: Codec,
        notes: Notes | None,
        check: Callable[[torch.Tensor], bool],
        copies: LinkCopies,
        maker: OrderMaker,
    ) -> None:
        """See the attributes, and `Order`."""
        super().__init__(last, codec, notes, check)
        self.copies, self.maker = copies, maker
        self.as_it_is = codec.verbatim and self.recipe.contiguous

    def take(self, tensor: torch.Tensor, address: int, step: int) -> Copied | None:
        """See `Order.take`."""
        maker, lane, codec = self.maker, self.lane, self.codec
        if lane.device.is_capturing():
            return None
        # A view of a view is one more tensor to make, and to let go.
        x = tensor.detach() if self.as_it_is else flat_whole(tensor)
        packed = Copied(tensor, self.recipe, x, lane, self.shared_use, codec)
        packed.aligned = not address % ALIGNMENT
        copy = maker.reclaimer.watch_copy(packed)
        notes = copy.notes = self.notes
        if not self.copies.send(copy, x, codec, DEFAULT_KEY):
            return None
        if lane.step_bytes is not None:
            lane.hold_step()
        if codec.verbatim and notes is not None and notes.learns:
            if self.advice is None:
                notes.note_encoded(codec.name, self.nbytes, self.nbytes)
            else:
                self.encoded_bytes = self.nbytes
        packed.position, packed.step = copy.position, copy.step = self.position, step
        with maker.lock:
            maker.steps.add_copy(copy)
        return packed


class OrderMaker:
    """Makes the orders of one engine."""

    __slots__ = ("counters", "lock", "reclaimer", "steps")

    def __init__(
        self, counters: Counters, reclaimer: Reclaimer, steps: StepOrder, lock: Lock
    ) -> None:
        """Args: counters, reclaimer, steps: the engine's; lock: for the steps."""
        self.counters, self.reclaimer = counters, reclaimer
        self.steps, self.lock = steps, lock

    def make(
        self, tensor: torch.Tensor, last: WithoutHandle, codec: Codec, notes: Notes | None
    ) -> Order | None:
        """The order of a place; None: its tensors need all questions.

        Args:
            tensor: the last one of the place, as autograd saves it.
            last: object of the tensor, with its position.
            codec: that has brought it out.
            notes: that are taken of that.
        """
        way = last.encoding[3] if isinstance(last, Encoded) else None
        copies = last.lane.executor.copies
        if not codec.lossless or (way is None and copies is None):
            return None
        check = check_of(tensor)
        if check is None:
            return None
        if isinstance(last, Encoded):
            return None if way is None else EncodingOrder(last, notes, check, way, self)
        if isinstance(last, Copied) and copies is not None:
            return CopyOrder(last, codec, notes, check, copies, self)
        return None
