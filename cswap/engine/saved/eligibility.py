"""May this saved tensor be swapped at all? Every "no" has a name that the stats count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cswap.schema.tensor import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001
_strided = torch.strided

_CASTS: Final = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0"})
"""Nodes that autocast and `nn.Linear` put between a parameter and the tensor that is saved."""

_NAMES: Final = {getattr(torch, n): n for n in DTYPES if hasattr(torch, n)}


def is_tracing() -> bool:
    """Whether operators are being recorded rather than run: nothing may be inserted then."""
    if torch._C._is_tracing() or torch.compiler.is_compiling():  # noqa: SLF001
        return True
    if torch._C._len_torch_dispatch_stack() == 0:  # noqa: SLF001
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for another one inside of vmap, jvp or their relatives."""
    return bool(_is_wrapped(tensor))


def reason_to_keep(tensor: torch.Tensor) -> str | None:
    """Why a plain tensor of sufficient size cannot be swapped; None if it can."""
    if tensor.is_quantized or tensor.dtype not in _NAMES:
        return "layout"
    if is_tracing():
        return "tracing"
    if is_wrapped(tensor):
        return "wrapped"
    if tensor._is_zerotensor():  # noqa: SLF001 - of forward-mode AD: it has no memory
        return "storage"
    if derives_from_parameter(tensor):
        return "parameter"
    return None


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that stays, for the stats; 0 if it does not say."""
    try:
        nbytes = tensor.nbytes
    except Exception:  # COO tensors have none; a subclass may raise anything, pack may not
        return 0
    return nbytes if type(nbytes) is int else 0  # symbolic while something is traced


def derives_from_parameter(tensor: torch.Tensor) -> bool:
    """A view of a parameter, or a cast of one.

    `nn.Linear` saves ``weight.t()``, a plain tensor; under autocast a cast of it, which must not be
    encoded lossily any more than the weight itself.
    """
    base = tensor._base  # noqa: SLF001
    if base is not None and isinstance(base, Parameter):  # the second test takes a quarter of a us
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), Parameter)


def is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a copy of a parameter in another dtype, or a view of one."""
    base = tensor._base  # noqa: SLF001
    copied = tensor if base is None else base
    return copied.grad_fn is not None and derives_from_parameter(copied)


def weak_storage(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A reference that keeps the storage's identity from being reused, not its memory."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of a wrapper subclass (apart.py); of any other tensor, none."""
    if type(tensor) is Parameter or type(tensor) is torch.Tensor:
        return []
    try:
        if not is_traceable_wrapper_subclass(tensor):
            return []
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
    except Exception:  # a subclass may raise anything
        return []
    return [part for part in parts if type(part) is torch.Tensor]


class OwnedStorages:
    """Storages of a model's parameters and buffers: they outlive the step, whatever is saved.

    Attributes:
        known: whether a model has named its parameters and buffers.
    """

    known = False

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def refresh(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Take the storages of these tensors, and no others, as owned; whether they are others."""
        self.known = True
        found: dict[int, StorageWeakRef] = {}
        for tensor in (x for one in tensors for x in (one, *plain_parts(one))):
            kind = type(tensor)
            plain = (kind is Parameter or kind is torch.Tensor) and tensor.layout is _strided
            if plain and not _is_wrapped(tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata  # noqa: SLF001
                found[key] = self._storages.get(key) or weak_storage(storage)
        changed = found.keys() != self._storages.keys()
        self._storages = found
        return changed

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return (
            bool(self._storages) and tensor.untyped_storage()._cdata in self._storages  # noqa: SLF001
        )
