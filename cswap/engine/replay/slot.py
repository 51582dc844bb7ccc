"""One saved tensor of each step, and the way that it goes: `Slot`.

`replay.py` says when a slot takes a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cswap.advisor.site_history import Advice

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.advisor.advisor import Advisor
    from cswap.codecs.base import Codec
    from cswap.engine.link.link_way import LinkWay
    from cswap.engine.order.chooser import Choice
    from cswap.engine.recipe import Recipe
    from cswap.engine.saved.without_handle import SharedUse, WithoutHandle
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.notes import Notes
    from cswap.remat.record import Formula


class SlotPlace(Protocol):
    """The part of a `Place` that its slot asks for."""

    recipe: Recipe
    shared_use: SharedUse | None
    saved_by: SharedUse | None
    codec: Codec | None
    notes: Notes | None
    choice: Choice | None
    way: LinkWay | None
    formula: Formula | None


class Slot:
    """What the next tensor of one place needs, if it looks like the last one.

    No abstract base class: `isinstance` would take a Python call for each tensor.

    Attributes:
        check: whether it does.
        scope, recipe, shared_use, lane, nbytes: of the last one.
        position: of that one among the tensors that were saved in its step.
        after: position of the next tensor.
        key: position and bytes, by which a budget knows the tensor.
    """

    __slots__ = (
        "after",
        "check",
        "key",
        "lane",
        "nbytes",
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
        check: Callable[[torch.Tensor], bool],
    ) -> None:
        """See the attributes."""
        assert recipe.lane is not None  # or such tensors would stay
        self.check = check
        self.recipe, self.scope, self.lane = recipe, recipe.scope, recipe.lane
        self.shared_use = shared_use
        self.nbytes, self.position, self.after = nbytes, position, position + 1
        self.key = position, nbytes

    def is_for(self, handle: Handle, place: SlotPlace) -> bool:
        """Whether the slot is for the next tensor, too, after one that had a handle of its own.

        Args:
            handle: of that one.
            place: where in the step.
        """
        return False

    def renew(self, shared_use: SharedUse, notes: Notes | None) -> None:
        """The last tensor of the place had a handle, and the next one is like it.

        Args:
            shared_use: of that tensor.
            notes: that were taken of it.
        """
        self.shared_use = shared_use

    def stands(self, place: SlotPlace, advisor: Advisor) -> bool:
        """Whether what was decided for the last tensor holds in the step that begins.

        No, if that one has gone another way than this slot, which gives its place another shared
        use, or none; or if somebody else asked for its memory.

        Args:
            place: of the slot.
            advisor: of the engine.
        """
        raise NotImplementedError

    def take(self, tensor: torch.Tensor, address: int, step: int) -> WithoutHandle | None:
        """The packed object of a tensor; None: it has to go another way.

        Args:
            tensor: as autograd saves it; it looks like the last one, and is at this position.
            address: of its memory.
            step: number of the step.
        """
        raise NotImplementedError


class CodecSlot(Slot):
    """Of tensors that a codec brings out.

    Attributes:
        codec: it.
        notes: that are taken of that.
        advice: the notes, if the advisor takes them: these wait until the next step begins, since
            with cold caches they take as long as a small encode.
        is_used: whether a tensor has gone by it since the advisor was told.
        encoded_bytes: of the last tensor of which the advisor was not told; 0: there is none.
        device_s: seconds that encode and decode of it took.
    """

    __slots__ = ("advice", "codec", "device_s", "encoded_bytes", "is_used", "notes")

    def __init__(
        self, handle: Handle, place: SlotPlace, check: Callable[[torch.Tensor], bool]
    ) -> None:
        """The slot of a place, whose last tensor had a handle.

        Args:
            handle: of that tensor, which may go without one.
            place: where in the step.
            check: see `Slot`.
        """
        shared_use, codec = place.shared_use, place.codec
        assert shared_use is not None  # the caller has looked
        assert codec is not None  # of a tensor that has left
        super().__init__(place.recipe, shared_use, handle.position, handle.raw_nbytes, check)
        self.codec: Codec = codec
        self.is_used = False
        self.encoded_bytes, self.device_s = 0, 0.0
        self.renew(shared_use, place.notes)

    def renew(self, shared_use: SharedUse, notes: Notes | None) -> None:
        """See `Slot.renew`."""
        self.shared_use, self.notes = shared_use, notes
        self.advice = notes if isinstance(notes, Advice) and notes.learns else None

    def is_for(self, handle: Handle, place: SlotPlace) -> bool:
        """See `Slot.is_for`."""
        return (
            self.recipe is place.recipe
            and self.codec is place.codec
            and (self.position, self.nbytes) == (handle.position, handle.raw_nbytes)
        )

    def stands(self, place: SlotPlace, advisor: Advisor) -> bool:
        """See `Slot.stands`."""
        if place.shared_use is not self.shared_use or self.shared_use.seen:
            return False
        kind = self.recipe.site.kind
        if place.choice is not None:
            return self.codec.lossless or advisor.milder.allows(kind, self.codec.name)
        notes = self.notes
        return isinstance(notes, Advice) and advisor.stands(notes, kind)

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
