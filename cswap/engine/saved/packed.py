"""The objects that autograd holds instead of saved tensors."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from cswap.engine.saved.modified import modified_error
from cswap.errors import InternalError
from cswap.remat.reads import CLONE, Packed

if TYPE_CHECKING:
    from cswap.engine.link.passage import Passage
    from cswap.engine.order.looks import Stay
    from cswap.engine.saved.unread import UnreadPlace
    from cswap.engine.saved.without_handle import SharedUse
    from cswap.engine.transfer.device_lanes import Lane
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.stored import Stored
    from cswap.remat.record import Remat


class Kept(Packed):
    """A tensor left where it is.

    Note [kept tensors are checked and detached]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    With hooks installed autograd no longer compares versions itself, so an in-place change between
    forward and backward would silently give wrong gradients: we compare. And an operator that
    saves its own output would own itself through us (output -> grad_fn -> us -> output), a cycle
    that Python's collector cannot see: non-leaf tensors are kept detached, which shares memory
    and version, not history.
    """

    __slots__ = ("__weakref__", "tensor", "version")
    depth = tolerance = 0

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self.tensor = tensor
        self.version = version

    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: autograd's own, if it was modified in place since.
        """
        if self.version >= 0 and self.tensor._version != self.version:  # noqa: SLF001
            raise modified_error(self.tensor, self.tensor.shape, self.version)
        return self.tensor


class KeptClone(Kept):
    """The result of a clone, which stays."""

    __slots__ = ()
    is_clone = True


class KeptParameter(Kept):
    """A parameter, or a view of one. Its memory is its model's, which may free it meanwhile."""

    __slots__ = ()


class Token:
    """Owned by the packed views of a handle; owns the tensors, so these go with the last view.

    Attributes:
        handle: its accounts.
        lane: of its device.
        users: number of the packed views.
        uses: how often they were asked for.
        took_s: seconds in the hooks so far, in which it left and came back.
        source: the tensor's own memory, with any layout; `Handle.elements` makes it flat. None once
            it is let go.
        remat: how it can be computed again, if it can.
        stored: the way that it has left; None: it has not.
        stay: its tensor stays (engine/order/looks.py); None: it leaves, or nobody has decided.
        shared_use: set if the next tensor of its place may do without a handle; told of other users
            of the memory.
        result: see `Waiting`, as the next two.
    """

    __slots__ = (
        "__weakref__",
        "handle",
        "lane",
        "ready",
        "remat",
        "result",
        "result_version",
        "shared_use",
        "source",
        "stay",
        "stored",
        "took_s",
        "users",
        "uses",
    )

    ready: Any
    result_version: int

    def __init__(self, handle: Handle, source: torch.Tensor, lane: Lane) -> None:
        self.handle = handle
        self.lane = lane
        self.source: torch.Tensor | None = source
        self.result: torch.Tensor | None = None
        self.remat: Remat | None = None
        self.stored: Stored | Passage | None = None
        self.stay: Stay | None = None
        self.shared_use: SharedUse | None = None
        self.users, self.uses, self.took_s = 1, 0, 0.0
        handle.token = weakref.ref(self)

    @property
    def nbytes(self) -> int:
        """Of the tensor's memory."""
        return self.handle.raw_nbytes

    @property
    def position(self) -> int:
        """See `Handle`."""
        return self.handle.position

    @property
    def tolerance(self) -> int:
        """See `Handle`."""
        return self.handle.tolerance

    @property
    def over_link(self) -> bool:
        """Whether it has left over a link."""
        return self.stored is not None and not self.lane.device.unified

    @property
    def stays(self) -> bool:
        """Whether it is in its own memory."""
        return self.source is not None


class PackedView(Packed):
    """One saved tensor: its exact layout, as a view of a handle's memory.

    Attributes:
        place: where in the step it was saved; None: nobody wants to know.

    Note [modified in place]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    A tensor that was modified after it was saved raises, as it does without hooks, even where its
    encoding was made before. An operator counts the version up when it is done: while it runs on
    one thread, an encode on another would read half of its work and see no new version. So what
    an encoding is worth is known only when it is asked for, and handles keep the counter when
    they let the memory go.
    """

    __slots__ = (
        "__weakref__",
        "conj",
        "dtype",
        "is_clone",
        "neg",
        "offset",
        "place",
        "sizes",
        "strides",
        "token",
    )

    def __init__(self, token: Token, tensor: torch.Tensor) -> None:
        self.token = token
        self.place: UnreadPlace | None = None
        self.dtype = tensor.dtype
        self.is_clone = type(tensor.grad_fn).__name__ == CLONE
        self.sizes = tensor.shape
        self.strides = tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()

    @property
    def depth(self) -> int:  # type: ignore[override] # slots have no defaults
        """See `Packed`."""
        remat = self.token.remat
        return remat.formula.depth if remat is not None and self.token.handle.recomputed else 0

    @property
    def tolerance(self) -> int:  # type: ignore[override]
        """See `Packed`."""
        return self.token.handle.tolerance

    def owner(self) -> Token:
        """Of the memory; see Note [modified in place].

        Raises:
            RuntimeError: autograd's own: the tensor was modified in place since it was saved.
        """
        handle = self.token.handle
        if handle.modified():
            counter = handle.counter
            assert counter is not None  # this view keeps it
            raise modified_error(counter, self.sizes, handle.version)
        return self.token

    def rebuild(self, memory: torch.Tensor, *, own: bool) -> torch.Tensor:
        """The saved tensor with its exact sizes and strides, as a view of ``memory``.

        The storage offset is the original one, too, unless only a small part of the storage was
        saved (then it counts from the start of that part).

        Args:
            memory: of the handle, with any layout.
            own: whether it is the memory that the tensor was saved from.

        Raises:
            InternalError: this view was made of other memory.
        """
        handle = self.token.handle
        if handle.gathered:
            x = memory.detach()
        else:
            offset = self.offset
            if not own:  # counted from the start of the part that was saved
                offset -= handle.start * memory.element_size() // self.dtype.itemsize
            x = memory if memory.dtype == self.dtype else self._reinterpret(memory)
            if x.shape != self.sizes or x.stride() != self.strides or x.storage_offset() != offset:
                x = x.as_strided(self.sizes, self.strides, offset)
        if self.conj:
            x = x.conj()
        if self.neg:
            x = torch._neg_view(x)  # noqa: SLF001
        if x.shape != self.sizes or x.stride() != self.strides or x.dtype != self.dtype:
            raise InternalError(
                f"swap-in gave {x.dtype} {tuple(x.shape)} with strides {x.stride()} for "
                f"{self.dtype} {tuple(self.sizes)} with strides {self.strides}"
            )
        return x

    def _reinterpret(self, memory: torch.Tensor) -> torch.Tensor:
        flat = memory.as_strided((memory.numel(),), (1,), memory.storage_offset())
        whole = flat.nbytes // self.dtype.itemsize * self.dtype.itemsize
        return flat.view(torch.uint8)[:whole].view(self.dtype)
