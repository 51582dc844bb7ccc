"""A tensor that codecs are measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

OWN: Final = "own"
"""Family of the user's own tensors."""


@dataclass(frozen=True, slots=True)
class Case:
    """One tensor to measure on.

    Attributes:
        family: `OWN`, or one of those that `python -m bench codecs` measures.
        data: kind of its content.
        nbytes: bytes of the tensor.
        make: makes the tensor, [n], contiguous.
        codecs: names; empty for all that take the dtype, and blosc2.
        zeros: share of zero elements, in the sparsity sweep.
        saved_bytes: bytes that the tensor is a sample of; None: its own.
    """

    family: str
    data: str
    nbytes: int
    make: Callable[[], Tensor]
    codecs: tuple[str, ...] = ()
    zeros: float | None = None
    saved_bytes: int | None = None


def case_of(data: str, x: Tensor, saved_bytes: int | None = None, *, family: str = OWN) -> Case:
    """The case of an existing tensor, [n], contiguous."""
    return Case(family, data, x.nbytes, lambda: x, saved_bytes=saved_bytes)
