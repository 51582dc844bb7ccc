"""The facts about one call site that are known once and for all: `Recipe`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from cswap.advisor.call_site import Site
from cswap.codecs.tolerance import EXACT

if TYPE_CHECKING:
    import torch

    from cswap.engine.saved.module_stack import Scope
    from cswap.engine.transfer.device_lanes import Lane

NOWHERE: Final = Site()


@dataclass(slots=True, eq=False)
class Recipe:
    """One call site, as far as it can be told from a saved tensor.

    Attributes:
        scope: the module that saves it.
        dtype: its dtype.
        sizes: its sizes.
        strides: its strides.
        device: where it is.
        contiguous: whether a new tensor of these sizes has the same strides.
        role: operator that saves it, and the one that made it; empty where nothing may be lossy.
        keep: why such tensors stay, or None.
        lane: of its device; None if they stay.
        site: for the advisor.
        tolerance: for errors (cswap/codecs/tolerance.py).
        nothing: no elements, of that dtype and device. Of tensors that may leave.
    """

    scope: Scope
    dtype: torch.dtype
    sizes: torch.Size
    strides: tuple[int, ...]
    device: torch.device
    contiguous: bool
    role: tuple[str, str]
    keep: str | None = None
    lane: Lane | None = None
    site: Site = NOWHERE
    tolerance: int = EXACT
    nothing: torch.Tensor = field(init=False)
