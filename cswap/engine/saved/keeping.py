"""Tensors that stay where they are, as the objects that autograd holds."""

from __future__ import annotations

import torch

from cswap.engine.saved.eligibility import is_tracing, reason_to_keep
from cswap.engine.saved.packed import Kept, KeptParameter

_len_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001


def pass_through(tensor: torch.Tensor, kind: type[Kept] = Kept) -> Kept:
    """Keep a tensor where it is, uncounted. Args: kind: of the object that keeps it."""
    try:
        version = tensor._version  # noqa: SLF001
        kept = tensor if tensor.is_leaf or is_tracing() else tensor.detach()
    except RuntimeError:  # inference tensors have no version; some subclasses cannot detach
        version, kept = -1, tensor
    return kind(kept, version)


def keep(tensor: torch.Tensor, kind: type[Kept] = Kept) -> Kept:
    """`pass_through` for a strided tensor of no special class, with fewer calls."""
    if _len_dispatch_modes():  # one of them may record operators
        return pass_through(tensor, kind)
    try:
        return kind(tensor if tensor.is_leaf else tensor.detach(), tensor._version)  # noqa: SLF001
    except RuntimeError:
        return pass_through(tensor, kind)


def keep_unhooked(tensor: torch.Tensor) -> Kept:
    """Of a tensor that autograd holds without hooks."""
    return keep(tensor, KeptParameter if reason_to_keep(tensor) == "parameter" else Kept)
