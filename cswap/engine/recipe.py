"""The facts about one call site that are known once and for all: `Recipe`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from cswap.advisor.call_site import Site
from cswap.codecs.tolerance import EXACT

if TYPE_CHECKING:
    from cswap.engine.saved.module_stack import Scope
    from cswap.engine.transfer.device_lanes import Lane

NOWHERE: Final = Site()

_next_number = torch._C._autograd._get_sequence_nr  # noqa: SLF001


class Role(NamedTuple):
    """The operators of a saved tensor.

    Attributes:
        operator: the torch function that saves it, if that is recorded.
        producer: see `producer`.
        is_result: whether that node saves it, as its own result.
    """

    operator: str = ""
    producer: str = ""
    is_result: bool = False


NO_ROLE: Final = Role()


def producer(tensor: torch.Tensor) -> str:
    """Name of the autograd node that made a tensor, "" for a leaf."""
    node = tensor.grad_fn
    return "" if node is None else node.name()


def role_of(tensor: torch.Tensor, operator: str) -> Role:
    """The role of a tensor that is being saved. Args: operator: of the scopes."""
    node = tensor.grad_fn
    if node is None:
        return Role(operator)
    # An operator's node is made before it saves: the newest one of this thread is the saver's.
    newest = _next_number() - 1
    return Role(operator, node.name(), node._sequence_nr() == newest)  # noqa: SLF001


def is_as_new(tensor: torch.Tensor) -> bool:
    """Whether a new tensor of its sizes has its strides: those of sizes of one, too.

    The way of a matrix product depends on these, and so the last bit.
    """
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


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
        role: see `Role`; `NO_ROLE` where nobody asks.
        keep: why such tensors stay, or None.
        is_cast: they may be copies of parameters in another dtype.
        lane: of its device; None if they stay.
        site: for the advisor.
        tolerance: for errors (cswap/codecs/tolerance.py).
        stays: why, if by a selector of operators (cswap/engine/saved/operators.py).
        nothing: no elements, of that dtype and device. Of tensors that may leave.
    """

    scope: Scope
    dtype: torch.dtype
    sizes: torch.Size
    strides: tuple[int, ...]
    device: torch.device
    contiguous: bool
    role: Role
    keep: str | None = None
    is_cast: bool = False
    lane: Lane | None = None
    site: Site = NOWHERE
    tolerance: int = EXACT
    stays: str = ""
    nothing: torch.Tensor = field(init=False)
