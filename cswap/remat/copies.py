"""Operators that copy, repeat or select elements. Their results are often larger than the source.

A graph net selects a row of its nodes for every edge; a model with grouped heads repeats keys and
values; a U-Net upsamples. All of them save the copies, for the operator after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from cswap.remat.operator import Operand, Operator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_aten = torch.ops.aten

_UNSAVED: Final = (Operand(None, 0),)


def _index_select(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.index_select(x, dim, index)


def _index(x: torch.Tensor, *indices: torch.Tensor | None) -> torch.Tensor:
    return _aten.index.Tensor(x, indices)  # type: ignore[no-any-return]


def _cat(*arguments: torch.Tensor | int) -> torch.Tensor:
    *tensors, dim = arguments
    return torch.cat(tensors, dim)  # type: ignore[arg-type] # the last one is the number


def _stack(*arguments: torch.Tensor | int) -> torch.Tensor:
    *tensors, dim = arguments
    return torch.stack(tensors, dim)  # type: ignore[arg-type] # the same


def _upsampled(name: str) -> Callable[..., torch.Tensor]:
    return getattr(_aten, name).default  # type: ignore[no-any-return]


def _max_pool(name: str) -> Callable[..., torch.Tensor]:
    function = getattr(_aten, name).default

    def run(x: torch.Tensor, *arguments: Sequence[int] | bool) -> torch.Tensor:
        found: torch.Tensor = function(x, *arguments)[0]
        return found

    return run


def _nearest(name: str, scales: tuple[str, ...]) -> dict[str, Operator]:
    return {
        f"UpsampleNearest{exact}{len(scales)}DBackward0": Operator(
            "upsample",
            _upsampled(f"{'_' * bool(exact)}upsample_nearest{exact.lower() and '_exact'}{name}"),
            _UNSAVED,
            ("output_size", *scales),
            "copy",
        )
        for exact in ("", "Exact")
    }


_POOL: Final = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

COPIES: Final[dict[str, Operator]] = {
    "IndexSelectBackward0": Operator(
        "index_select", _index_select, (Operand(None, 0), Operand("index")), ("dim",), "copy"
    ),
    "IndexBackward0": Operator("index", _index, _UNSAVED, (), "copy", every_item="indices"),
    "RepeatBackward0": Operator("repeat", torch.Tensor.repeat, _UNSAVED, ("repeats",), "copy"),
    "RollBackward0": Operator("roll", torch.roll, _UNSAVED, ("shifts", "dims"), "copy"),
    "FlipBackward0": Operator("flip", torch.flip, _UNSAVED, ("dims",), "copy"),
    "CatBackward0": Operator("cat", _cat, (), ("dim",), "copy", every_edge=True),
    "StackBackward0": Operator("stack", _stack, (), ("dim",), "copy", every_edge=True),
    **_nearest("1d", ("scales",)),
    **_nearest("2d", ("scales_h", "scales_w")),
    **_nearest("3d", ("scales_d", "scales_h", "scales_w")),
    "MaxPool2DWithIndicesBackward0": Operator(
        "max_pool", _max_pool("max_pool2d_with_indices"), _UNSAVED, _POOL, "reduction"
    ),
    "MaxPool3DWithIndicesBackward0": Operator(
        "max_pool", _max_pool("max_pool3d_with_indices"), _UNSAVED, _POOL, "reduction"
    ),
}
"""Rows by the name of the autograd node."""
