"""Fused attention, which runs again from its saved queries, keys and values.

Its result is as large as they are, and its node saves all four. With dropout it draws numbers, so
it does not run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.remat.operator import Operand, Operator

if TYPE_CHECKING:
    from collections.abc import Callable

_aten = torch.ops.aten

_INPUTS: Final = (Operand("query", 0), Operand("key", 1), Operand("value", 2))


def _flash(name: str) -> Callable[..., torch.Tensor]:
    # Takes queries, keys, values, on a CPU a mask, and the constants of `_row`.
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        *mask, p, causal, scale = rest
        named = {"attn_mask": mask[0]} if mask else {}
        found: torch.Tensor = getattr(_aten, name)(q, k, v, p, causal, scale=scale, **named)[0]
        return found

    return run


def _biased(name: str) -> Callable[..., torch.Tensor]:
    # Takes queries, keys, values, a bias, and the constants of `_row`.
    def run(*inputs: Any) -> torch.Tensor:
        *tensors, p, causal, scale = inputs
        found: torch.Tensor = getattr(_aten, name)(*tensors, True, p, causal, scale=scale)[0]
        return found

    return run


def _row(function: Callable[..., torch.Tensor], *mask: Operand) -> Operator:
    constants = ("dropout_p", "is_causal", "scale")
    return Operator(
        "attention", function, (*_INPUTS, *mask), constants, "product", only=(("dropout_p", 0.0),)
    )


_BIAS: Final = Operand("attn_bias", optional=True)

ATTENTION: Final[dict[str, Operator]] = {
    "ScaledDotProductFlashAttentionBackward0": _row(_flash("_scaled_dot_product_flash_attention")),
    "ScaledDotProductFlashAttentionForCpuBackward0": _row(
        _flash("_scaled_dot_product_flash_attention_for_cpu"), Operand("attn_mask", optional=True)
    ),
    "ScaledDotProductEfficientAttentionBackward0": _row(
        _biased("_scaled_dot_product_efficient_attention"), _BIAS
    ),
    "ScaledDotProductCudnnAttentionBackward0": _row(
        _biased("_scaled_dot_product_cudnn_attention"), _BIAS
    ),
}
"""Rows by the name of their autograd node."""
