"""Fused attention, which runs again from its saved queries, keys and values.

Its result is as large as they are, and its node saves all four. With dropout it draws numbers, so
it does not run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from cswap.remat.operator import Operand, Operator

if TYPE_CHECKING:
    from collections.abc import Callable

_aten = torch.ops.aten

_INPUTS: Final = (Operand("query", 0), Operand("key", 1), Operand("value", 2))


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float, causal: bool, scale: float | None
) -> torch.Tensor:
    found: torch.Tensor = _aten._scaled_dot_product_flash_attention(  # noqa: SLF001
        q, k, v, p, causal, scale=scale
    )[0]
    return found


def _flash_on_a_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    found: torch.Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
        q, k, v, p, causal, attn_mask=mask, scale=scale
    )[0]
    return found


def _efficient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    found: torch.Tensor = _aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
        q, k, v, bias, True, p, causal, scale=scale
    )[0]
    return found


def _cudnn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    found: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
        q, k, v, bias, True, p, causal, False, scale=scale
    )[0]
    return found


def _row(function: Callable[..., torch.Tensor], mask: str | None) -> Operator:
    inputs = _INPUTS if mask is None else (*_INPUTS, Operand(mask, optional=True))
    constants = ("dropout_p", "is_causal", "scale")
    return Operator("attention", function, inputs, constants, "product", only=(("dropout_p", 0.0),))


ATTENTION: Final[dict[str, Operator]] = {
    "ScaledDotProductFlashAttentionBackward0": _row(_flash, None),
    "ScaledDotProductFlashAttentionForCpuBackward0": _row(_flash_on_a_cpu, "attn_mask"),
    "ScaledDotProductEfficientAttentionBackward0": _row(_efficient, "attn_bias"),
    "ScaledDotProductCudnnAttentionBackward0": _row(_cudnn, "attn_bias"),
}
"""Rows by the name of their autograd node."""
