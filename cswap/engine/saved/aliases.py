"""Which saved tensors share memory: a storage saved several times is swapped once.

Note [when two saved tensors are one]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A handle holds a region of one storage as it was at one version. A tensor saved later may be served
from it if it lies inside that region and the memory has not changed in between. Equal versions
prove that only

* if both tensors count on the same counter, which Python cannot ask. They do if they are views of
  the same base, or the same tensor. They do not if an operator cut a storage into parts that count
  for themselves (unsafe_split, as LSTM cells do): such parts are never matched with each other, nor
  swapped as more than themselves. Tensors that each span the whole storage (detach, a custom
  function's outputs) are matched by number.
* and if whoever wrote the memory counted. BatchNorm does not when it updates its running
  statistics, nor does ``x.data.add_(1)``, with which gradcheck perturbs its inputs. Both write
  tensors without a history: leaves. Results of differentiable operators are written by nobody but
  in-place operators, which count. So an *encoding*, which is of an earlier moment, serves a second
  tensor only if that is such a result, or a view of one.

Masks, tables of angles and inputs are leaves, too, and saved again by layer after layer. A second
save of a leaf holds the leaf's own memory, as stock PyTorch does, and pins it there: a tensor
that holds its memory anyway gains nothing from an encoding. The engine remembers the place, and
from the next step on does not encode the first save either.

A storage is recognised by the address of its StorageImpl, which cannot be reused while a weak
reference to it is held; the address of its data can.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right, insort
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.codecs.layout import flat_numel, has_gaps, meta_of
from cswap.codecs.tolerance import EXACT
from cswap.engine.saved.packed import Token
from cswap.engine.transfer.handle import Handle, State
from cswap.schema.tensor import TensorMeta, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cswap.engine.saved.outer import Outer
    from cswap.engine.transfer.device_lanes import Lane

_free_weak_ref = torch.UntypedStorage._free_weak_ref  # noqa: SLF001

_channels_last = torch.channels_last

IMAGE: Final = 4
"""Dimensions of a batch of images."""

WHOLE_SHARE: Final = 4
"""A view that spans at least 1/WHOLE_SHARE of its storage is swapped as the whole storage."""

ALIGNMENT: Final = 64
"""Bytes to which torch aligns memory on a CPU; on a GPU it is more."""

LOOK_AT: Final = 4
"""Handles of the same region (at other versions, say) that are considered, the newest first."""


MOST_COUNTS: Final = 16
"""Wrappers of one storage whose writes are counted, before those that are gone are forgotten."""


class _Regions:
    """The handles of one storage, by where their region begins.

    A storage that is cut into n slices has n handles: a look-up may not visit them all. A weak
    reference keeps the key from being used for another storage.

    Attributes:
        whole: handles of all of it.
        counts: of the wrappers that were saved (apart.py), on which writes are counted alone.
    """

    _weak: Any = None  # until it is taken: an interrupt may come before

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = storage._weak_ref()  # noqa: SLF001
        self.whole: list[Handle] = []
        self._by_start: dict[int, list[Handle]] = {}
        self._starts: list[int] = []
        self.counts: list[_Count] = []

    def __del__(self) -> None:
        if self._weak is not None:
            _free_weak_ref(self._weak)  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Handle]:
        yield from self.whole
        for handles in self._by_start.values():
            yield from handles

    def add_part(self, handle: Handle) -> None:
        start = first_byte(handle)
        handles = self._by_start.get(start)
        if handles is None:
            handles = self._by_start[start] = []
            insort(self._starts, start)
        handles.append(handle)

    def discard(self, handle: Handle) -> bool:
        """Forget a handle; whether none is left."""
        if handle.whole:
            if handle in self.whole:
                self.whole.remove(handle)
        else:
            self._discard_part(handle)
        return not (self.whole or self._starts)

    def _discard_part(self, handle: Handle) -> None:
        start = first_byte(handle)
        handles = self._by_start.get(start, [])
        if handle not in handles:
            return
        handles.remove(handle)
        if not handles:
            del self._by_start[start]
            del self._starts[bisect_left(self._starts, start)]

    def note(self, outer: Outer | None) -> None:
        """A tensor is saved: if a wrapper may have written meanwhile, no handle serves it.

        Args:
            outer: of which the tensor is a part.
        """
        owner = None if outer is None else outer.owner()
        moved = [count for count in self.counts if count.moved()]
        is_new = outer is not None and all(count.owner() is not owner for count in self.counts)
        if outer is not None and is_new:
            self.counts.append(_Count(outer))
        forgets = len(self.counts) > MOST_COUNTS
        if moved or forgets or (outer is not None and is_new and outer.version):
            for handle in self:
                handle.is_older = True
        if forgets:
            self.counts = [count for count in self.counts if count.owner() is not None]

    def candidates(self, start: int) -> Iterator[Handle]:
        """Handles that may hold a tensor that begins at this byte; the newest first.

        They are of the whole storage, or of the last region that begins there or before.
        """
        yield from reversed(self.whole[-LOOK_AT:])
        before = bisect_right(self._starts, start) - 1
        if before >= 0:
            yield from reversed(self._by_start[self._starts[before]][-LOOK_AT:])


class _Count:
    # Of the writes of one wrapper, and of its views.

    def __init__(self, outer: Outer) -> None:
        self.owner, self._counter, self._version = outer.owner, outer.counter, outer.version

    def moved(self) -> bool:
        """Whether it has written since the last call."""
        before, self._version = self._version, self._counter._version  # noqa: SLF001
        return self._version != before


class AliasTable:
    """Handles by storage. Not thread-safe: the engine holds its lock."""

    def __init__(self) -> None:
        self._storages: dict[int, _Regions] = {}

    def find(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        *,
        tolerance: int,
        outer: Outer | None = None,
    ) -> Token | None:
        """The token of a handle that was made of this memory, or None.

        `is_result` says whether its encoding may serve this tensor, too.

        Args:
            tensor: the tensor.
            storage: its storage.
            tolerance: for errors.
            outer: of which it is a part (apart.py).
        """
        regions = self._storages.get(storage._cdata)  # noqa: SLF001
        if regions is None:
            return None
        if outer is not None or regions.counts:
            regions.note(outer)
        start = int(tensor.storage_offset()) * tensor.element_size()
        for handle in regions.candidates(start):
            token = handle.token()
            if (
                isinstance(token, Token)
                and _serves(handle, tensor, tolerance=tolerance)
                and (outer is None or _serves_part(handle, tensor, outer))
            ):
                return token
        return None

    def add(self, handle: Handle, storage: torch.UntypedStorage) -> None:
        """Remember a handle made of a tensor in this storage."""
        regions = self._storages.get(handle.storage_key)
        if regions is None:
            regions = self._storages[handle.storage_key] = _Regions(storage)
        if handle.outer is not None:
            regions.note(handle.outer)
        if handle.whole:  # as most are
            regions.whole.append(handle)
        else:
            regions.add_part(handle)

    def discard(self, handle: Handle) -> None:
        """Forget a handle."""
        regions = self._storages.get(handle.storage_key)
        if regions is not None and regions.discard(handle):
            del self._storages[handle.storage_key]

    def live(self) -> list[Token]:
        """Owners of all tensors that may still be asked for."""
        return [token for handle in self if isinstance(token := handle.token(), Token)]

    def __iter__(self) -> Iterator[Handle]:
        for regions in self._storages.values():
            yield from regions


def is_result(tensor: torch.Tensor) -> bool:
    """Whether the memory is a differentiable operator's result, which nobody writes uncounted."""
    base = tensor._base  # noqa: SLF001
    return (tensor if base is None else base).grad_fn is not None


def is_saved_again(
    tensor: torch.Tensor, base: weakref.ref[torch.Tensor] | None, dtype: torch.dtype
) -> bool:
    """Whether a tensor is a view of this base, or it, so that the base's memory serves it.

    Args:
        tensor: as autograd saves it.
        base: of the tensor that was saved before, or that tensor itself.
        dtype: of the memory.
    """
    own = tensor._base  # noqa: SLF001
    known = None if base is None else base()
    if known is not (tensor if own is None else own) or tensor.dtype is not dtype:
        return False
    return is_result(tensor) and not tensor.is_conj() and not tensor.is_neg()


def whole_address(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory if it is the whole of its storage and has no gaps; else 0."""
    try:
        whole = tensor.untyped_storage().nbytes()
    except RuntimeError:  # it stands for another one, inside of vmap or jvp
        return 0
    if tensor.nbytes == whole and (tensor.is_contiguous() or _is_image(tensor)):
        return tensor.data_ptr()
    return 0


def flat_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The elements, [n] flat, of a tensor that has a `whole_address`.

    Args:
        tensor: neither conjugated nor negated.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,), 0)


def _is_image(x: torch.Tensor) -> bool:
    # Whether its elements lie side by side, in the other usual order.
    return x.dim() == IMAGE and x.is_contiguous(memory_format=_channels_last)


def make_token(
    tensor: torch.Tensor, lane: Lane, storage: torch.UntypedStorage | None = None
) -> Token:
    """The token of a new handle, in state KEPT, for the region that this tensor is swapped as.

    Args:
        tensor: the tensor.
        lane: of its device.
        storage: its storage, if that is at hand.

    Raises:
        RuntimeError: the tensor has no memory, or less than it says.
    """
    x = tensor.detach()
    if x.is_conj():
        x = x.conj()
    if x.is_neg():
        x = torch._neg_view(x)  # noqa: SLF001
    base = tensor._base  # noqa: SLF001
    version = tensor._version  # noqa: SLF001
    storage = x.untyped_storage() if storage is None else storage
    whole = storage.nbytes()
    address = storage.data_ptr()
    if not address:
        raise RuntimeError("the tensor has no memory")
    if x.nbytes == whole and (x.is_contiguous() or _is_image(x)):  # most are
        meta = _flat_meta(x.dtype, x.numel())
        handle = Handle(meta, start=0, gathered=False, version=version, raw_nbytes=whole)
        handle.whole = True
        token = Token(handle, x, lane)
    else:
        token = _part_token(x, whole, version, lane, is_view=base is not None)
    handle = token.handle
    handle.aligned = (address + handle.start * x.element_size()) % ALIGNMENT == 0
    handle.storage_key = storage._cdata  # noqa: SLF001
    handle.base = weakref.ref(tensor if base is None else base)
    return token


def _part_token(x: torch.Tensor, whole: int, version: int, lane: Lane, *, is_view: bool) -> Token:
    meta, itemsize = meta_of(x), x.element_size()
    span_bytes = meta.span * itemsize
    if span_bytes == whole or (is_view and span_bytes * WHOLE_SHARE >= whole):
        token = _flat_token(x, 0, whole // itemsize, version, lane)
        token.handle.whole = True
        return token
    start = int(x.storage_offset())
    if not has_gaps(meta):
        return _flat_token(x, start, meta.span, version, lane)
    nbytes = flat_numel(meta) * itemsize
    handle = Handle(meta, start=start, gathered=True, version=version, raw_nbytes=nbytes)
    return Token(handle, x, lane)


def _flat_token(x: torch.Tensor, start: int, numel: int, version: int, lane: Lane) -> Token:
    source = x.as_strided((numel,), (1,), start)
    meta = _flat_meta(x.dtype, numel)
    nbytes = numel * x.element_size()
    handle = Handle(meta, start=start, gathered=False, version=version, raw_nbytes=nbytes)
    return Token(handle, source, lane)


@lru_cache(maxsize=4096)
def _flat_meta(dtype: torch.dtype, numel: int) -> TensorMeta:
    return TensorMeta(dtype_name(dtype), (numel,), (1,))


def first_byte(handle: Handle) -> int:
    """Bytes of the storage before the handle's region."""
    elements = flat_numel(handle.meta) if handle.gathered else handle.meta.numel
    return handle.start * (handle.raw_nbytes // max(elements, 1))


def _serves(handle: Handle, tensor: torch.Tensor, *, tolerance: int) -> bool:
    if handle.version != tensor._version or handle.state is State.RELEASED:  # noqa: SLF001
        return False
    if handle.error is not None or handle.modified() or handle.tolerance > tolerance:
        return False
    if handle.is_older:
        return False
    meta = meta_of(tensor)
    if handle.tolerance != EXACT and meta.dtype != handle.meta.dtype:
        return False
    base = tensor._base  # noqa: SLF001
    same_base = handle.base is not None and handle.base() is (tensor if base is None else base)
    span_bytes = meta.span * tensor.element_size()
    whole_bytes = tensor.untyped_storage().nbytes()
    if not same_base and not (handle.whole and span_bytes == whole_bytes):
        return False
    if handle.gathered:
        return _same_layout(handle, tensor, meta)
    start, region_start = tensor.storage_offset() * tensor.element_size(), first_byte(handle)
    inside = region_start <= start and start + span_bytes <= region_start + handle.raw_nbytes
    return inside and region_start % tensor.element_size() == 0


def _serves_part(handle: Handle, part: torch.Tensor, outer: Outer) -> bool:
    # A part with a base is a view of a plain tensor, and is matched like that. Any other may lie in
    # the memory of a parameter, which another wrapper of it writes: only the same wrapper is sure.
    if part._base is not None:  # noqa: SLF001
        return True
    return handle.outer is not None and handle.outer.owner() is outer.owner()


def _same_layout(handle: Handle, tensor: torch.Tensor, meta: TensorMeta) -> bool:
    mine = handle.meta
    same = (meta.dtype, meta.sizes, meta.strides) == (mine.dtype, mine.sizes, mine.strides)
    return same and handle.start == tensor.storage_offset()
