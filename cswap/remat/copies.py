"""Operators that copy, repeat or pad. Their results are often larger than the source.

A model with grouped heads repeats keys and values; a U-Net upsamples; a window attention pads. All
of them save the copies, for the operator after them. tables.py has those that select rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from cswap.remat.operator import Operand, Operator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_aten = torch.ops.aten

_UNSAVED: Final = (Operand(None, 0),)


def _cat(*arguments: torch.Tensor | int) -> torch.Tensor:
    *tensors, dim = arguments
    return torch.cat(tensors, dim)  # type: ignore[arg-type] # the last one is the number


def _stack(*arguments: torch.Tensor | int) -> torch.Tensor:
    *tensors, dim = arguments
    return torch.stack(tensors, dim)  # type: ignore[arg-type] # the same


def _by_name(name: str) -> Callable[..., torch.Tensor]:
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
            _by_name(f"{'_' * bool(exact)}upsample_nearest{exact.lower() and '_exact'}{name}"),
            _UNSAVED,
            ("output_size", *scales),
            "copy",
        )
        for exact in ("", "Exact")
    }


def _pad(kind: str, name: str) -> dict[str, Operator]:
    # Their nodes save the argument, too, but its values may be gone: unread.py.
    function = _by_name(f"{name}_pad{kind.lower()}")
    return {
        f"{name.capitalize()}Pad{kind}Backward0": Operator(
            "pad", function, _UNSAVED, ("padding",), "copy"
        )
    }


_POOL: Final = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

COPIES: Final[dict[str, Operator]] = {
    "RepeatBackward0": Operator("repeat", torch.Tensor.repeat, _UNSAVED, ("repeats",), "copy"),
    "RollBackward0": Operator("roll", torch.roll, _UNSAVED, ("shifts", "dims"), "copy"),
    "FlipBackward0": Operator("flip", torch.flip, _UNSAVED, ("dims",), "copy"),
    "CatBackward0": Operator("cat", _cat, (), ("dim",), "copy", every_edge=True),
    "StackBackward0": Operator("stack", _stack, (), ("dim",), "copy", every_edge=True),
    "ConstantPadNdBackward0": Operator(
        "pad", torch.constant_pad_nd, _UNSAVED, ("pad",), "copy", "fill"
    ),
    **_pad("1D", "reflection"),
    **_pad("2D", "reflection"),
    **_pad("3D", "reflection"),
    **_pad("1D", "replication"),
    **_pad("2D", "replication"),
    **_pad("3D", "replication"),
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
