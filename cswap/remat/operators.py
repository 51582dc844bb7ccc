"""The operators that may run again, by the name of their autograd node.

A row names the attributes of a node that hold its operator's arguments. The rows come from
``torchgen/packaged/autograd/derivatives.yaml`` and from inspection of nodes; `tests/remat` checks
every row bit by bit. If a node of another version of torch lacks an attribute, its operator does
not run again.

Matrix products, convolutions and attention are in a table of their own: only a goal asks for them.

In no table: random draws, writes in place (except of operators that save their result), and
operators that are not deterministic on a GPU.

Note [dropout runs again with its mask]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`native_dropout` (used on GPUs) saves its mask, so nothing is drawn again: on a GPU, its backward
multiplies with the mask and the scale as its forward does. The node does not say whether it
trained. If it did not, the mask is full, and the result is the argument. A mask that was drawn is
never full if it is expected to drop `LEAST_DROPPED` elements: that has a probability of exp(-64).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from cswap.remat.attention import ATTENTION
from cswap.remat.copies import COPIES
from cswap.remat.norms import (
    batch_norm,
    cudnn_batch_norm,
    group_norm,
    group_norm_of_statistics,
    layer_norm,
    layer_norm_of_statistics,
    rms_norm,
    rms_norm_of_statistics,
)
from cswap.remat.operator import Operand, Operator
from cswap.remat.record import copy_with_strides

if TYPE_CHECKING:
    from collections.abc import Callable

_aten = torch.ops.aten


_SELF: Final = (Operand("self", 0),)
_UNSAVED: Final = (Operand(None, 0),)
_BOTH: Final = (Operand("self", 0), Operand("other", 1))
_NEITHER: Final = (Operand(None, 0), Operand(None, 1))


def _gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return functional.gelu(x, approximate=approximate)


def _add(
    a: torch.Tensor, b: torch.Tensor, alpha: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.add(a, b, alpha=alpha, out=out)


def _sub(
    a: torch.Tensor, b: torch.Tensor, alpha: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.sub(a, b, alpha=alpha, out=out)


def _addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: float) -> torch.Tensor:
    return torch.addcmul(x, a, b, value=value)


def _dropout(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    scale = 0.0 if p == 1 else 1 / (1 - p)
    if x.device.type == "cpu":  # its forward rounds the scale, too
        found = x.mul(mask).mul_(torch.tensor(scale, dtype=x.dtype))
    else:
        if x.dtype is not torch.float64 and p != 1:  # divided in float32
            scale = float(torch.tensor(1 - p, dtype=torch.float32).reciprocal())
        found = _aten.native_dropout_backward(x, mask, scale)
    return torch.where(mask.all(), x, found)


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float
) -> torch.Tensor:
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha)


def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch._softmax(x, dim, x.dtype != dtype)  # noqa: SLF001


def _log_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch._log_softmax(x, dim, x.dtype != dtype)  # noqa: SLF001


def _group_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> torch.Tensor:
    return torch.native_group_norm(x, weight, bias, n, c, hxw, group, eps)[0]


def _into(function: Callable[..., torch.Tensor], number: int) -> Callable[..., torch.Tensor]:
    # An operator of two operands that writes into one of them, if the result has its layout.
    def run(*arguments: Any) -> torch.Tensor:
        out, other = arguments[number], arguments[1 - number]
        if isinstance(other, torch.Tensor):
            fits = out.shape == other.shape and out.stride() == other.stride()
            fits = fits and out.dtype is other.dtype
        else:
            fits = not isinstance(other, complex)
        return function(*arguments, out=out if fits else None)

    return run


def _into_either(
    function: Callable[..., torch.Tensor],
) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    return _into(function, 0), _into(function, 1)


# A norm without a bias and a norm with a frozen bias have the same node. So the bias is required to
# be trained.
_AFFINE: Final = (Operand("input"), Operand("weight"), Operand(None, 2))
_STATISTICS: Final = (Operand("result1"), Operand("result2"))
_TRAINS: Final = (("training", True),)

_ROWS: Final[dict[str, Operator]] = {
    # Activations that save their input.
    "GeluBackward0": Operator("gelu", _gelu, _SELF, ("approximate",)),
    "SiluBackward0": Operator("silu", functional.silu, _SELF),
    "MishBackward0": Operator("mish", functional.mish, _SELF),
    "HardswishBackward0": Operator("hardswish", functional.hardswish, _SELF),
    "HardsigmoidBackward0": Operator("hardsigmoid", functional.hardsigmoid, _SELF),
    "HardtanhBackward0": Operator("hardtanh", functional.hardtanh, _SELF, ("min_val", "max_val")),
    "LeakyReluBackward0": Operator("leaky_relu", functional.leaky_relu, _SELF, ("negative_slope",)),
    "EluBackward0": Operator("elu", _aten.elu.default, _SELF, ("alpha", "scale", "input_scale")),
    "CeluBackward0": Operator("celu", torch.celu, _SELF, ("alpha",)),
    "SoftplusBackward0": Operator("softplus", functional.softplus, _SELF, ("beta", "threshold")),
    "GluBackward0": Operator("glu", functional.glu, (Operand("self"),), ("dim",)),
    "PreluKernelBackward0": Operator(
        "prelu",
        torch._prelu_kernel,  # noqa: SLF001
        (Operand("self"), Operand("weight")),
    ),
    # Operators that save their result.
    "ReluBackward0": Operator(
        "relu", torch.relu, _UNSAVED, saves_result=True, in_place=(torch.relu_,)
    ),
    "LeakyReluBackward1": Operator(
        "leaky_relu", functional.leaky_relu, _UNSAVED, ("negative_slope",), saves_result=True
    ),
    "EluBackward1": Operator(
        "elu", _aten.elu.default, _UNSAVED, ("alpha", "scale", "input_scale"), saves_result=True
    ),
    "TanhBackward0": Operator(
        "tanh", torch.tanh, _UNSAVED, saves_result=True, in_place=(torch.tanh_,)
    ),
    "SigmoidBackward0": Operator(
        "sigmoid", torch.sigmoid, _UNSAVED, saves_result=True, in_place=(torch.sigmoid_,)
    ),
    "ExpBackward0": Operator("exp", torch.exp, _UNSAVED, saves_result=True, in_place=(torch.exp_,)),
    "SqrtBackward0": Operator(
        "sqrt", torch.sqrt, _UNSAVED, saves_result=True, in_place=(torch.sqrt_,)
    ),
    "RsqrtBackward0": Operator(
        "rsqrt", torch.rsqrt, _UNSAVED, saves_result=True, in_place=(torch.rsqrt_,)
    ),
    "ReciprocalBackward0": Operator(
        "reciprocal", torch.reciprocal, _UNSAVED, saves_result=True, in_place=(torch.reciprocal_,)
    ),
    "SoftmaxBackward0": Operator(
        "softmax", _softmax, _UNSAVED, ("dim",), "reduction", "dtype", saves_result=True
    ),
    "LogSoftmaxBackward0": Operator(
        "log_softmax", _log_softmax, _UNSAVED, ("dim",), "reduction", "dtype", saves_result=True
    ),
    # Arithmetic.
    "AddBackward0": Operator("add", _add, _NEITHER, ("alpha",), in_place=_into_either(_add)),
    "SubBackward0": Operator("sub", _sub, _NEITHER, ("alpha",), in_place=_into_either(_sub)),
    "MulBackward0": Operator("mul", torch.mul, _BOTH, in_place=_into_either(torch.mul)),
    "MulBackward1": Operator(
        "mul", torch.mul, _UNSAVED, ("other",), in_place=(_into(torch.mul, 0),)
    ),
    "DivBackward0": Operator("div", torch.div, _BOTH, in_place=_into_either(torch.div)),
    "DivBackward1": Operator(
        "div", torch.div, _UNSAVED, ("other",), in_place=(_into(torch.div, 0),)
    ),
    "NegBackward0": Operator("neg", torch.neg, _UNSAVED),
    "AbsBackward0": Operator("abs", torch.abs, _SELF),
    "PowBackward0": Operator("pow", torch.pow, _SELF, ("exponent",)),
    "SinBackward0": Operator("sin", torch.sin, _SELF),
    "CosBackward0": Operator("cos", torch.cos, _SELF),
    "LogBackward0": Operator("log", torch.log, _SELF),
    "Log1PBackward0": Operator("log1p", torch.log1p, _SELF),
    "ErfBackward0": Operator("erf", torch.erf, _SELF),
    "MaximumBackward0": Operator("maximum", torch.maximum, _BOTH),
    "MinimumBackward0": Operator("minimum", torch.minimum, _BOTH),
    "ClampBackward1": Operator("clamp", torch.clamp, _SELF, ("min", "max")),
    "AddcmulBackward0": Operator(
        "addcmul",
        _addcmul,
        (Operand(None, 0), Operand("tensor1", 1), Operand("tensor2", 2)),
        ("value",),
    ),
    "WhereBackward0": Operator(
        "where", torch.where, (Operand("condition"), Operand(None, 0), Operand(None, 1))
    ),
    "NativeDropoutBackward0": Operator(
        "dropout", _dropout, (Operand(None, 0), Operand("result1")), ("p",), drops=True
    ),
    # Copies.
    "ToCopyBackward0": Operator("cast", copy_with_strides, _UNSAVED, (), "copy", "layout"),
    "CloneBackward0": Operator("clone", copy_with_strides, _UNSAVED, (), "copy", "layout"),
    **COPIES,
    # Norms.
    "NativeLayerNormBackward0": Operator(
        "layer_norm",
        layer_norm,
        (
            Operand("input"),
            Operand("weight", optional=True),
            Operand("bias", optional=True),
            Operand("result1"),
            Operand("result2"),
        ),
        ("normalized_shape",),
        "reduction",
        rounds_statistics=True,
        inexact=layer_norm_of_statistics,
    ),
    "FusedRmsNormBackward0": Operator(
        "rms_norm",
        rms_norm,
        (Operand("input"), Operand("weight", optional=True), Operand("result1")),
        ("normalized_shape",),
        "reduction",
        rounds_statistics=True,
        inexact=rms_norm_of_statistics,
    ),
    "NativeBatchNormBackward0": Operator(
        "batch_norm", batch_norm, (*_AFFINE, *_STATISTICS), ("eps",), "reduction", only=_TRAINS
    ),
    "CudnnBatchNormBackward0": Operator(
        "batch_norm", cudnn_batch_norm, _AFFINE, ("epsilon",), "reduction", only=_TRAINS
    ),
    "NativeGroupNormBackward0": Operator(
        "group_norm", _group_norm, _AFFINE, ("N", "C", "HxW", "group", "eps"), "reduction"
    ),
}

_WITHOUT_EPS: Final[dict[str, Operator]] = {
    "NativeGroupNormBackward0": Operator(
        "group_norm",
        group_norm,
        (*_AFFINE, *_STATISTICS),
        ("N", "C", "HxW", "group"),
        "reduction",
        rounds_statistics=True,
        inexact=group_norm_of_statistics,
    ),
}
"""Rows of nodes that do not save epsilon: see Note [the epsilon of a norm] in norms.py."""

LEAST_DROPPED: Final = 64.0
"""See Note [dropout runs again with its mask]."""

NO_SIZES: Final = (None, (0,))
"""Sizes of an argument that was not given."""

_PRODUCTS: Final[dict[str, Operator]] = {
    "AddmmBackward0": Operator(
        "addmm",
        _addmm,
        (Operand(None, 0), Operand("mat1", 1), Operand("mat2", 2)),
        ("beta", "alpha"),
        "product",
    ),
    "MmBackward0": Operator(
        "mm", torch.mm, (Operand("self", 0), Operand("mat2", 1)), (), "product"
    ),
    "BmmBackward0": Operator(
        "bmm", torch.bmm, (Operand("self", 0), Operand("mat2", 1)), (), "product"
    ),
    "ConvolutionBackward0": Operator(
        "convolution",
        torch.convolution,
        (
            Operand("input", 0),
            Operand("weight", 1),
            Operand(None, 2, sizes="bias_sym_sizes_opt"),
        ),
        ("stride", "padding", "dilation", "transposed", "output_padding", "groups"),
        "product",
    ),
    **ATTENTION,
}

RESULT_SLOTS: Final[dict[str, str]] = {
    **{name: "result" for name, row in _ROWS.items() if row.saves_result},
    "SafeSoftmaxBackward0": "result",
    "Expm1Backward0": "result",
    **dict.fromkeys(ATTENTION, "output"),
}
"""Names of the slot in which a node saves its first output."""


def operator_of(kind: type, *, products: bool = False) -> Operator | None:
    """The row of an autograd node; None: its operator does not run again.

    Args:
        kind: the node's type.
        products: whether matrix products and convolutions run again, too.
    """
    name = kind.__name__
    found = _ROWS.get(name)
    if found is not None and "eps" in found.constants and not hasattr(kind, "_saved_eps"):
        return _WITHOUT_EPS.get(name)
    return _PRODUCTS.get(name) if found is None and products else found
