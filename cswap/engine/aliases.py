"""Which saved tensors share memory: a storage saved several times is swapped once.

Note [when two saved tensors are one]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A handle holds a region of one storage as it was at one version. A tensor saved later may be served
from it if it lies inside that region and the memory has not changed in between. Versions prove
that only if both tensors count on the same counter, which Python cannot ask. They do if they are
views of the same base, or the same tensor. They do not if an operator cut a storage into parts
that count for themselves (unsafe_split, as LSTM cells do): there the same number means nothing, so
such parts are never matched with each other, nor swapped as more than themselves. Tensors that
each span the whole storage (detach, a custom function's outputs) are matched by number.

A storage is recognised by the address of its StorageImpl, which cannot be reused while a weak
reference to it is held; the address of its data can.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cswap.codecs.layout import flat_numel, has_gaps, meta_of
from cswap.engine.eligibility import weak_storage
from cswap.engine.handle import Handle, State
from cswap.schema.tensor import TensorMeta, dtype_name

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

WHOLE_SHARE = 4
"""A view that spans at least 1/WHOLE_SHARE of its storage is swapped as the whole storage."""


@dataclass(slots=True)
class _Entry:
    storage: StorageWeakRef
    handles: list[Handle]


class AliasTable:
    """Handles by the storage that they were made of. Not thread-safe: the engine locks."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def find(self, tensor: torch.Tensor, *, lossy_ok: bool) -> Handle | None:
        """A handle that holds this very tensor's values, or None."""
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)  # noqa: SLF001
        if entry is None:
            return None
        for handle in reversed(entry.handles):
            if _serves(handle, tensor, storage.nbytes(), lossy_ok=lossy_ok):
                return handle
        return None

    def add(self, handle: Handle, tensor: torch.Tensor) -> None:
        """Remember a handle made of this tensor."""
        storage = tensor.untyped_storage()
        handle.storage_key = storage._cdata  # noqa: SLF001
        entry = self._entries.get(handle.storage_key)
        if entry is None:
            entry = self._entries[handle.storage_key] = _Entry(weak_storage(storage), [])
        entry.handles.append(handle)

    def discard(self, handle: Handle) -> None:
        """Forget a handle."""
        entry = self._entries.get(handle.storage_key)
        if entry is not None and handle in entry.handles:
            entry.handles.remove(handle)
            if not entry.handles:
                del self._entries[handle.storage_key]


def make_handle(tensor: torch.Tensor) -> Handle:
    """A handle, in state KEPT, for the region of storage that this tensor is to be swapped as."""
    x = tensor.detach()
    if x.is_conj():
        x = x.conj()
    if x.is_neg():
        x = torch._neg_view(x)  # noqa: SLF001
    base = tensor._base  # noqa: SLF001
    version = tensor._version  # noqa: SLF001
    whole = x.untyped_storage().nbytes()
    if x.nbytes == whole and x.is_contiguous():  # most are
        handle = _flat_handle(x, 0, x.numel(), version)
        handle.whole = True
    else:
        handle = _part_handle(x, whole, version, is_view=base is not None)
    handle.base = weakref.ref(tensor if base is None else base)
    return handle


def _part_handle(x: torch.Tensor, whole: int, version: int, *, is_view: bool) -> Handle:
    meta, itemsize = meta_of(x), x.element_size()
    span_bytes = meta.span * itemsize
    if span_bytes == whole or (is_view and span_bytes * WHOLE_SHARE >= whole):
        handle = _flat_handle(x, 0, whole // itemsize, version)
        handle.whole = True
    elif not has_gaps(meta):
        handle = _flat_handle(x, int(x.storage_offset()), meta.span, version)
    else:
        handle = Handle(x, meta, start=int(x.storage_offset()), gathered=True, version=version)
        handle.raw_nbytes = flat_numel(meta) * itemsize
    return handle


def _flat_handle(x: torch.Tensor, start: int, numel: int, version: int) -> Handle:
    source = x.as_strided((numel,), (1,), start)
    meta = TensorMeta(dtype_name(x.dtype), (numel,), (1,))
    return Handle(source, meta, start=start, gathered=False, version=version)


def _serves(handle: Handle, tensor: torch.Tensor, nbytes: int, *, lossy_ok: bool) -> bool:
    if handle.version != tensor._version or handle.state is State.RELEASED:  # noqa: SLF001
        return False
    if handle.modified() or (handle.lossy_ok and not lossy_ok):
        return False
    meta = meta_of(tensor)
    if handle.lossy_ok and meta.dtype != handle.meta.dtype:
        return False
    base = tensor._base  # noqa: SLF001
    same_base = handle.base is not None and handle.base() is (tensor if base is None else base)
    span_bytes = meta.span * tensor.element_size()
    if not same_base and not (handle.whole and span_bytes == nbytes):
        return False
    if handle.gathered:
        return _same_layout(handle, tensor, meta)
    start = tensor.storage_offset() * tensor.element_size()
    region_start = handle.start * (handle.raw_nbytes // max(handle.meta.numel, 1))
    inside = region_start <= start and start + span_bytes <= region_start + handle.raw_nbytes
    return inside and region_start % tensor.element_size() == 0


def _same_layout(handle: Handle, tensor: torch.Tensor, meta: TensorMeta) -> bool:
    mine = handle.meta
    same = (meta.dtype, meta.sizes, meta.strides) == (mine.dtype, mine.sizes, mine.strides)
    return same and handle.start == tensor.storage_offset()
