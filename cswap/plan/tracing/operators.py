"""The cost of one operator, derived from its arguments: kind, FLOPs, bytes moved."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KINDS: Final = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("conv", r"conv"),
        ("pool", r"pool"),
        ("attention", r"attention"),
        ("norm", r"(batch|layer|group|instance|rms|response)_norm"),
        ("linear", r"^_?(mm|addmm|bmm|baddbmm|linear|scaled_mm)(_backward)?$"),
        ("loss", r"_loss|log_softmax|binary_cross_entropy|kl_div"),
        (
            "activation",
            r"relu|threshold|gelu|silu|elu|hardtanh|hardswish|sigmoid|tanh|softplus|mish|softmax",
        ),
    )
)

_GATHERS: Final = frozenset({"embedding", "nll_loss_forward", "index_select", "gather", "index"})
"""Operators that read only a few elements of their first argument."""

_OVERWRITES: Final = frozenset({"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_"})
"""Operators that write their first argument without reading it."""


@cache
def kind_of(func: torch._ops.OpOverload) -> str:
    """One of `cswap.schema.trace.KINDS`.

    >>> kind_of(torch.ops.aten.convolution_backward.default)
    'conv'
    """
    name = func._opname  # noqa: SLF001
    for kind, pattern in _KINDS:
        if pattern.search(name):
            return kind
    return "elementwise" if torch.Tag.pointwise in func.tags else "other"


@cache
def mutated_arguments(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Index and name of the arguments that the operator writes to."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def compute_dtype(tensors: Sequence[torch.Tensor]) -> str:
    """Name of the first floating dtype, in which the arithmetic is assumed to run."""
    return next((dtype_name(t.dtype) for t in tensors if t.is_floating_point()), "float32")


def flops_of(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> float:
    """Floating-point operations: torch's formula, or one per element for elementwise operators."""
    formula = flop_registry.get(func._overloadpacket)  # noqa: SLF001
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    if torch.Tag.pointwise in func.tags:
        return float(sum(t.numel() for t in tensors_in(out)))
    return 0.0


def bytes_moved(
    func: torch._ops.OpOverload,
    read: Sequence[torch.Tensor],
    mutated: Sequence[torch.Tensor],
    produced: Sequence[torch.Tensor],
) -> float:
    """Bytes read and written if each byte is read only once.

    Args:
        func: the operator.
        read: all tensor arguments, mutated ones included.
        mutated: arguments that the operator writes to.
        produced: results with memory of their own.
    """
    name = func._opname  # noqa: SLF001
    written = sum(map(_extent, produced)) + sum(map(_extent, mutated))
    if name in _GATHERS:
        return float(written + sum(map(_extent, read[1:])) + sum(map(_extent, produced)))
    if name in _OVERWRITES:
        return float(written + sum(map(_extent, read[1:])))
    return float(written + sum(map(_extent, read)))


def _extent(tensor: torch.Tensor) -> int:
    # The elements of an expanded tensor may need more bytes than its storage has.
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
