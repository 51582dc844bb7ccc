"""Converts a strided tensor to the flat elements that codecs see, and back."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cswap.errors import UnsupportedError
from cswap.schema.tensor import DTYPES, TensorMeta, dtype_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORD_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name, one of `DTYPES`.

    Raises:
        UnsupportedError: this torch has no dtype of that name.
    """
    found = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"dtype={name!r}: unknown to torch {torch.__version__}.")
    return found


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Layout of a tensor, as if it stood alone (storage offset 0).

    Raises:
        UnsupportedError: the tensor is not a plain strided one of a known dtype.
    """
    name = dtype_name(tensor.dtype)
    # A nested tensor calls itself strided, but has no sizes.
    strided = tensor.layout == torch.strided and not tensor.is_nested
    if not strided or tensor.is_quantized or name not in DTYPES:
        raise UnsupportedError(
            f"tensor of dtype {name}, layout {tensor.layout}: only strided tensors of the dtypes "
            f"{', '.join(DTYPES)} can be encoded."
        )
    return TensorMeta(name, tuple(tensor.shape), tensor.stride(), 0, str(tensor.device))


def _dense_numel(meta: TensorMeta) -> int:
    # Number of elements at different places in memory, if only dimensions of stride 0 overlap.
    return math.prod(n for n, s in zip(meta.sizes, meta.strides, strict=True) if s != 0 or n == 0)


def flat_numel(meta: TensorMeta) -> int:
    """Elements in an encoding of ``meta``: those of the span, or fewer if the span has gaps."""
    return min(meta.span, _dense_numel(meta))


def has_gaps(meta: TensorMeta) -> bool:
    """Whether the span holds memory of other tensors. The elements are gathered then."""
    return meta.span > _dense_numel(meta)


def _narrow(meta: TensorMeta) -> tuple[list[int], list[int]]:
    # Sizes and strides, with every expanded dimension cut to one element.
    sizes = [1 if s == 0 and n > 0 else n for n, s in zip(meta.sizes, meta.strides, strict=True)]
    return sizes, list(meta.strides)


def _as_integers(x: torch.Tensor) -> torch.Tensor:
    # For copies: PyTorch warns of every new complex32.
    return x.view(_WORD_INT.get(x.itemsize, x.dtype))


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor, each once, as [flat_numel] contiguous; a view if it can be."""
    meta = meta_of(tensor)
    x = tensor.detach()
    # Lazy conjugation and negation are resolved on the flat elements. Resolving them here would
    # clone, and a clone of a tensor with expanded dimensions or gaps has another layout than meta.
    conjugated, negated = x.is_conj(), x.is_neg()
    x = x.conj() if conjugated else x
    x = torch._neg_view(x) if negated else x  # noqa: SLF001 (no public name clears the bit)
    if has_gaps(meta):
        sizes, strides = _narrow(meta)
        # contiguous() too: reshape returns a view of stride 2 for sizes (3, 1), strides (2, 1).
        same = _as_integers(x).as_strided(sizes, strides, x.storage_offset())
        flat = same.reshape(-1).contiguous().view(x.dtype)
    else:
        flat = x.as_strided((meta.span,), (1,), x.storage_offset())
    flat = flat.conj_physical() if conjugated else flat
    flat = flat.neg() if negated else flat
    # torch.frombuffer makes tensors at odd addresses, but kernels read whole words.
    return flat.clone() if flat.data_ptr() % DTYPES[meta.dtype].word else flat


def empty_flat(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[numel] uninitialised elements; a view of bytes, since PyTorch warns of new complex32."""
    return torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)


def restore(x: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A tensor of layout ``meta`` from its flat elements x; a view of x if there are no gaps."""
    if has_gaps(meta):
        return unflatten_into(x, meta, empty_strided(meta, x.device))
    return x.as_strided(meta.sizes, meta.strides, x.storage_offset())


def unflatten_into(x: torch.Tensor, meta: TensorMeta, out: torch.Tensor) -> torch.Tensor:
    """Write the tensor of layout ``meta`` with flat elements x to ``out``, and return ``out``."""
    if out.stride() != meta.strides:
        _as_integers(out).copy_(_as_integers(restore(x, meta)))
        return out
    if has_gaps(meta):
        sizes, strides = _narrow(meta)
        out.as_strided(sizes, strides, out.storage_offset()).copy_(x.view(sizes))
    else:
        out.as_strided((meta.span,), (1,), out.storage_offset()).copy_(x)
    return out


def empty_strided(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    """Uninitialised tensor of layout ``meta``, gaps included."""
    base = empty_flat(meta.span, torch_dtype(meta.dtype), device)
    return base.as_strided(meta.sizes, meta.strides)


def first_bytes(x: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` of a flat contiguous tensor, [nbytes] uint8, with few calls of torch."""
    if x.dtype is not torch.uint8:
        x = x.view(torch.uint8)
    return x if x.numel() == nbytes else x[:nbytes]


def copy_bytes(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
    """Copy the first ``nbytes`` of flat tensors; between CPU tensors with this thread only.

    torch would wake its whole thread team, which would compete with the computation's threads.
    """
    if target.is_cpu and source.is_cpu:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
    else:
        first_bytes(target, nbytes).copy_(first_bytes(source, nbytes), non_blocking=True)


def address_of(x: torch.Tensor, word: int = 1) -> int:
    """Address of the memory of a flat CPU tensor, for a kernel that reads words of it.

    Raises:
        UnsupportedError: the memory is not contiguous, or the address is no multiple of ``word``.
    """
    address = x.data_ptr()
    if address % word or not x.is_contiguous() or not x.is_cpu:
        raise UnsupportedError(
            f"tensor at address {address:#x} of {x.device}: must be contiguous on the CPU and "
            f"aligned to {word} bytes."
        )
    return address


_UNSIGNED = {word: np.dtype(f"u{word}").str for word in _WORD_INT}


class _Memory:
    # Tells numpy where a tensor's memory is, and keeps it. `Tensor.numpy` does so, too, but forbids
    # for ever to resize the storage, which is the program's.
    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, x: torch.Tensor, word: int) -> None:
        self._tensor = x
        self.__array_interface__ = {
            "data": (address_of(x, word), False),
            "shape": (x.nbytes // word,),
            "typestr": _UNSIGNED[word],
            "version": 3,
        }


def bytes_of(x: torch.Tensor) -> NDArray[Any]:
    """The bytes of a flat CPU tensor as a numpy array that shares its memory.

    Raises:
        UnsupportedError: the memory is not contiguous on the CPU.
    """
    return _array(x, 1)


def words_of(x: torch.Tensor) -> NDArray[Any]:
    """The words of a flat CPU tensor as unsigned numpy integers that share its memory.

    Raises:
        UnsupportedError: the memory is not contiguous on the CPU, or not aligned to words.
    """
    return _array(x, DTYPES[dtype_name(x.dtype)].word)


def _array(x: torch.Tensor, word: int) -> NDArray[Any]:
    # Without elements there is no address, which numpy before 2.4 does not take.
    return np.asarray(_Memory(x, word)) if x.nbytes else np.empty(0, _UNSIGNED[word])
