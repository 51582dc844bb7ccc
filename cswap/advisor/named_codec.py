"""The codec that the options, the module or a plan name for a tensor, where they name one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec
from cswap.codecs.tolerance import needed_tolerance
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    import torch

    from cswap.advisor.call_site import Site
    from cswap.advisor.lossy_fallback import Milder
    from cswap.config import SwapConfig

AUTO: Final = (None, "auto")
"""Names that leave the choice to the advisor."""

_WORDS: Final = ("exactly", "almost exactly")
"""By tolerance."""


class NamedCodecs:
    """The codecs that are named."""

    def __init__(self, config: SwapConfig, static: str | None, milder: Milder) -> None:
        """Args: config, milder: the advisor's; static: the codec of `policy="static"`."""
        self._option, self._static, self._milder = config.codec, static, milder

    def name(self, x: torch.Tensor, site: Site, planned: str | None) -> tuple[str | None, str]:
        """The codec's name, one of `AUTO` if none is named; and who says so.

        A codec that the user's own function would name is not among them.

        Args:
            x: the values.
            site: the call site.
            planned: codec that a plan names.
        """
        if planned is not None:
            return planned, "the plan says so"
        if site.codec is not None:
            return site.codec, "forced for this module or operator"
        option = self._option
        if isinstance(option, dict):
            for key in (x.dtype, str(x.dtype), dtype_name(x.dtype)):
                if key in option:
                    return option[key], "forced for this dtype"
        if isinstance(option, str) and option != "auto":
            return option, "forced"
        return self._static, "policy static"

    def admissible(
        self, name: str, x: torch.Tensor, kind: str, *, tolerance: int
    ) -> tuple[str | None, str]:
        """The codec to be used for a named one.

        Args:
            name: of the codec.
            x: the values.
            kind: of module.
            tolerance: that a codec may need.

        Returns:
            Its name and "", or None and the reason why it cannot serve.
        """
        milder = self._milder.instead(name, x, kind)
        if milder is None:
            return None, f"{name} harmed gradients; "
        name, codec = milder, get_codec(milder)
        if not takes(codec, x.dtype, x.device.type):
            return None, f"{name} does not take this dtype; "
        if needed_tolerance(codec) > tolerance:
            return None, f"{name} is lossy and this tensor must come back {_WORDS[tolerance]}; "
        return name, ""
