"""`HostCopy`: what is left of a tensor that was copied over a link, when it has no handle.

Note [a copy outlives its owner]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd holds the owner, and lets it go at any time. The streams of the device may touch the memory
of the tensor for longer. So the owner holds the tensor's own memory only; the host's memory, and
memory that the tensor is copied into ahead of its use, are held here, until they have been joined.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from threading import Lock

    import torch

    from cswap.codecs.base import Codec
    from cswap.devices.base import Device, Event
    from cswap.engine.transfer.ahead import Ahead
    from cswap.engine.transfer.notes import Notes
    from cswap.errors import CorruptEncodingError


NOWHERE: Final = -1
"""Position and step of a tensor that has not been given one."""


class Shape(Protocol):
    """Of a tensor.

    Attributes:
        sizes: its sizes.
        strides: its strides.
        contiguous: whether a new tensor of these sizes has the same strides.
    """

    sizes: torch.Size
    strides: tuple[int, ...]
    contiguous: bool


class CopyOwner(Protocol):
    """Stands for the tensor in autograd's graph.

    Attributes:
        recipe: the tensor's shape.
        source: the tensor's own memory, as it is or [n] flat; None once it has been let go.
        copy: on the host, or on its way there.
        dtype: of the tensor.
        nbytes: of the tensor.
        uses: how often it was asked for.
    """

    @property
    def recipe(self) -> Shape:
        """See above."""
        ...

    source: torch.Tensor | None
    copy: HostCopy
    dtype: torch.dtype
    nbytes: int
    uses: int


class HostCopy(weakref.ref[CopyOwner]):
    """A weak reference to the owner, which is put on a list when the owner dies.

    Written by `LinkCopies`, under the executor's lock.

    Attributes:
        raw_nbytes: bytes of the tensor.
        position: index of the tensor among those saved in its step.
        step: number of that step.
        codec: that encodes it; None: it is copied as it is. What follows up to ``notes`` is of an
            encoding.
        encoded: fires when it has been encoded.
        nbytes: of the encoding, once it ``is_stored``.
        kept: scratch memory that holds the encoding: the host has none.
        error: why there is no encoding, and the tensor's own memory is gone.
        stays: there is no encoding, and the tensor's own memory is to stay.
        notes: to be told how long it is.
        safe: whether the tensor's own memory is not needed any more.
        buffer: of the host store; None: nothing has been copied, or it has been given back.
        out: fires when the buffer holds the tensor, or its encoding.
        back: fires when the buffer has been read for the last time; None: it was not.
        released: nobody can ask for it any more.
        ahead: memory that it is copied into ahead of its use.
        fetching: a thread is about to set ``ahead``.
        held_bytes: of the device's memory, as counted.
    """

    __hash__ = object.__hash__  # a dead owner has none
    __eq__ = object.__eq__

    raw_nbytes = 0
    position = step = NOWHERE
    codec: Codec | None = None
    encoded: Event | None = None
    nbytes = 0
    kept: torch.Tensor | None = None
    error: CorruptEncodingError | None = None
    stays = False
    notes: Notes | None = None
    safe = True
    released = False
    buffer: torch.Tensor | None = None
    out: Event | None = None
    back: Event | None = None
    ahead: Ahead | None = None
    fetching = False
    held_bytes = 0

    def is_read_until(self, back: Event, device: Device, lock: Lock) -> None:
        """Note the event after which a thread has read the host's memory.

        Another one may have read it, too, and come here in another order than to the device.

        Args:
            back: the event.
            device: of the copy.
            lock: the executor's.
        """
        with lock:
            earlier, self.back = self.back, back
        if earlier is not None:
            self.back = device.submit(lambda _: None, role="h2d", after=(earlier, back))

    @property
    def is_stored(self) -> bool:
        """Whether it is known where the tensor is, or about to be in the device's order."""
        return self.buffer is not None or self.kept is not None
