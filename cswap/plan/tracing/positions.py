"""Positions of saved tensors: the keys of plans, counted by the engine's rules.

Note [positions are the engine's]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A plan names a saved tensor by its position among the tensors that the engine could swap, in the
order in which autograd saves them. This file repeats the engine's rules (`SwapEngine.pack`,
`cswap.engine.saved.aliases`), because planning may not import the engine.
`tests/plan/test_estimate.py` checks that both agree. A tensor that is saved again while its memory
is unchanged keeps its position. The engine does this only if it swaps or has swapped the tensor
that was saved first.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import Parameter

from cswap.codecs.layout import flat_numel, has_gaps, meta_of
from cswap.schema.tensor import DTYPES, dtype_name

if TYPE_CHECKING:
    from cswap.schema.tensor import TensorMeta

WHOLE_SHARE: Final = 4
"""A view that spans at least 1/WHOLE_SHARE of its storage is swapped as the whole storage."""

_CASTS: Final = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0"})


@dataclass(slots=True)
class SavedRegion:
    """A part of one storage that the engine swaps as a unit.

    Attributes:
        position: position among the saved tensors of the step.
        start: first byte in the storage.
        span: bytes from the first to the last.
        nbytes: raw bytes; fewer than the span if the region has gaps.
        whole: whether the region is the whole storage.
        layout: layout of a view with gaps, whose elements are gathered; else None.
        writes: number of writes to the storage before the tensor was saved.
        base: the base of the saved view, or the saved tensor itself.
    """

    position: int
    start: int
    span: int
    nbytes: int
    whole: bool
    layout: TensorMeta | None
    writes: int
    base: weakref.ref[torch.Tensor]


class Positions:
    """Counts the saved tensors of one step.

    Attributes:
        count: of those that have a position.
    """

    def __init__(self, min_bytes: int) -> None:
        """Args: min_bytes: smaller tensors are not swapped, as in `SwapConfig`."""
        self._min_bytes = min_bytes
        self.count = 0

    def add(self, tensor: torch.Tensor, regions: list[SavedRegion], writes: int) -> bool:
        """Count a saved tensor; append its region unless one of ``regions`` serves it.

        Args:
            tensor: the tensor that autograd saves; neither a parameter nor a buffer.
            regions: the regions of its storage so far.
            writes: number of writes to its storage so far.

        Returns:
            Whether a region was appended.
        """
        if not self._is_eligible(tensor) or any(_serves(r, tensor, writes) for r in regions):
            return False
        region = _region(tensor, self.count, writes)
        self.count += 1
        if region.nbytes >= self._min_bytes:
            regions.append(region)
        return region.nbytes >= self._min_bytes

    def _is_eligible(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or dtype_name(tensor.dtype) not in DTYPES:
            return False
        if tensor.nbytes < self._min_bytes or not tensor.numel():
            return False
        return not _derives_from_parameter(tensor)


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte in the storage, and bytes from the first to the last."""
    itemsize = tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) * itemsize, (int(last) + 1) * itemsize


def _derives_from_parameter(tensor: torch.Tensor) -> bool:
    base = tensor._base  # noqa: SLF001
    if base is not None and isinstance(base, Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), Parameter)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor._base  # noqa: SLF001
    return tensor if base is None else base


def _region(tensor: torch.Tensor, position: int, writes: int) -> SavedRegion:
    base, whole = weakref.ref(_base(tensor)), tensor.untyped_storage().nbytes()
    meta, (start, span) = meta_of(tensor), byte_range(tensor)
    is_view = tensor._base is not None  # noqa: SLF001
    if span == whole or (is_view and span * WHOLE_SHARE >= whole):
        return SavedRegion(position, 0, whole, whole, True, None, writes, base)
    if not has_gaps(meta):
        return SavedRegion(position, start, span, span, False, None, writes, base)
    nbytes = flat_numel(meta) * tensor.element_size()
    return SavedRegion(position, start, span, nbytes, False, meta, writes, base)


def _serves(region: SavedRegion, tensor: torch.Tensor, writes: int) -> bool:
    start, span = byte_range(tensor)
    spans_all = region.whole and span == tensor.untyped_storage().nbytes()
    if region.writes != writes or not (spans_all or region.base() is _base(tensor)):
        return False
    if region.layout is not None:
        return region.layout == meta_of(tensor) and region.start == start
    inside = region.start <= start and start + span <= region.start + region.nbytes
    return inside and region.start % tensor.element_size() == 0
