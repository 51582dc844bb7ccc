"""The codec that the options, the module or a plan name for a tensor, where they name one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.advisor.options import static_codec
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec
from cswap.codecs.tolerance import needed_tolerance
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    import torch

    from cswap.advisor.call_site import Site
    from cswap.advisor.lossy_fallback import Milder
    from cswap.config import SwapConfig

_WORDS: Final = ("exactly", "almost exactly")
"""By tolerance."""


def named_codec(
    config: SwapConfig, x: torch.Tensor, site: Site, planned: str | None
) -> tuple[str | None, str]:
    """The codec's name and who says so; None and "" if the choice is the advisor's.

    A codec that the user's own function would name is not among them.

    Args:
        config: the options.
        x: the values.
        site: the call site.
        planned: codec that a plan names.
    """
    name, why, option = static_codec(config.policy), f"policy {config.policy}", config.codec
    if planned is not None:
        name, why = planned, "the plan says so"
    elif site.codec is not None:
        name, why = site.codec, "forced for this module or operator"
    elif isinstance(option, dict) and (key := _key(option, x)) is not None:
        name, why = option[key], "forced for this dtype"
    elif isinstance(option, str) and option != "auto":
        name, why = option, "forced"
    return (None, "") if name in (None, "auto") else (name, why)


def _key(option: dict[object, str], x: torch.Tensor) -> object | None:
    keys = (x.dtype, str(x.dtype), dtype_name(x.dtype))
    return next((key for key in keys if key in option), None)


def admissible(
    name: str, x: torch.Tensor, kind: str, milder: Milder, *, tolerance: int
) -> tuple[str | None, str]:
    """The codec to be used for a named one.

    Args:
        name: of the codec.
        x: the values.
        kind: of module.
        milder: lossy codecs that the guard has forbidden.
        tolerance: that a codec may need.

    Returns:
        Its name and "", or None and the reason why it cannot serve.
    """
    allowed = milder.instead(name, x, kind)
    if allowed is None:
        return None, f"{name} harmed gradients; "
    codec = get_codec(allowed)
    if not takes(codec, x.dtype, x.device.type):
        return None, f"{allowed} does not take this dtype; "
    if needed_tolerance(codec) > tolerance:
        return None, f"{allowed} is lossy and this tensor must come back {_WORDS[tolerance]}; "
    return allowed, ""
