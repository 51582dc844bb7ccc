"""What is kept of a saved tensor that is computed again: `Remat`.

Note [what a Remat holds]
~~~~~~~~~~~~~~~~~~~~~~~~~
It holds packed objects of the inputs, copies of small leaves, numbers, and nothing else. It never
holds a node of the graph or a tensor with a history. So it makes no cycle: an operator's saved
input cannot refer to what is computed from it. It keeps its inputs as long as it lives, and it
lives no longer than the node that saved the tensor. Backward runs that node before the one that
saved the inputs, so inputs live no longer than they would without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from cswap.errors import InternalError
from cswap.remat.settings import SameBits, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Constant: TypeAlias = torch.Tensor | complex
"""A copy of a small leaf, or a number."""

Kind: TypeAlias = Literal["copy", "elementwise", "reduction"]

VIEW: Final = "view"
"""Operator of a step that touches no memory."""

BIT_PATTERNS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of an element, to compare bits rather than values."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operator to run again.

    Attributes:
        operator: its name, for people.
        function: runs it: tensors first, then ``constants``.
        operands: indices of the tensors: an input's, or the number of inputs plus a step's;
            None for an argument that was not given.
        constants: the other arguments.
        kind: what it does with memory.
        last_use: operands that no later step needs.
        inexact: runs instead of ``function`` if inputs are not bit by bit what they were.
    """

    operator: str
    function: Callable[..., torch.Tensor]
    operands: tuple[int | None, ...]
    constants: tuple[object, ...]
    kind: Kind
    last_use: tuple[int, ...] = ()
    inexact: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor lies in its storage, and of what it is.

    Attributes:
        sizes: per dimension.
        strides: per dimension, in elements.
        dtype: of the elements.
        device: where it is.
    """

    sizes: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """That of a tensor."""
        return Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True, eq=False)
class Remat:
    """How to compute a saved tensor again, bit by bit.

    The result is the *whole memory* of the saved tensor: that of the tensor itself, or of its base
    if it is a view. It begins at the storage's first byte, as in the original, so a saved view has
    the same sizes, strides and offset in it.

    Attributes:
        steps: operators in the order in which they run; the last one gives the result.
        inputs: packed objects, as autograd holds them for the operators that saved them.
        constants: copies of small leaves, and numbers. Operands count them after the inputs.
        layout: of the result.
        settings: under which the result has the same bits.
        depth: operators one after the other, those inside of the inputs included.
        passes: how often memory of the result's size is read or written, about.
        unseen: values in between that no operator saved. Nobody can see whether something wrote
            into them without telling autograd, see `Remat.agrees`.
    """

    steps: tuple[Step, ...]
    inputs: tuple[object, ...]
    constants: tuple[Constant, ...]
    layout: Layout
    settings: Settings
    depth: int
    passes: int
    unseen: int

    @property
    def operator(self) -> str:
        """Name of the chain, without its views: ``"silu>mul"``."""
        return ">".join(step.operator for step in self.steps if step.operator != VIEW)

    @property
    def kind(self) -> Kind:
        """The dearest kind of its operators."""
        kinds = {step.kind for step in self.steps}
        if "reduction" in kinds:
            return "reduction"
        return "elementwise" if "elementwise" in kinds else "copy"

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.layout.sizes.numel() * self.layout.dtype.itemsize

    def run(self, inputs: Sequence[torch.Tensor], *, exact: bool = True) -> torch.Tensor:
        """Compute the tensor again.

        Args:
            inputs: the tensors of `inputs`, unpacked, in the same order. They are only read.
            exact: whether they have the bits that they had. False after a lossy codec: norms are
                then computed from their saved statistics, which no longer are the input's own.

        Returns:
            A new tensor without a history, with `layout`, at the beginning of its own storage.

        Raises:
            InternalError: the operators gave something else.
        """
        values: list[Constant | None] = [*inputs, *self.constants]
        with SameBits(self.settings):
            for step in self.steps:
                operands = [None if n is None else values[n] for n in step.operands]
                function = step.function if exact or step.inexact is None else step.inexact
                values.append(function(*operands, *step.constants))
                for n in step.last_use:
                    values[n] = None
                del operands
            result = values[-1]
            assert isinstance(result, torch.Tensor)  # the last step's
            return self._checked(result)

    def agrees(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the result has the bits of the memory that the tensor was saved from.

        A chain that agrees at a call site once does so until the model's code goes another way.
        Only this finds ``y.data = other``, which autograd does not see.

        Args:
            tensor: memory of `layout`.
            inputs: see `run`.
        """
        return same_bits(self.run(inputs), tensor)

    def _checked(self, result: torch.Tensor) -> torch.Tensor:
        expected = self.layout
        if (
            result.shape != expected.sizes
            or result.dtype != expected.dtype
            or result.device != expected.device
        ):
            raise InternalError(
                f"{self.operator} gave {result.dtype} {tuple(result.shape)} on {result.device} "
                f"for {expected.dtype} {tuple(expected.sizes)} on {expected.device}"
            )
        if result.stride() == expected.strides and not result.storage_offset():
            return result
        return copy_with_strides(result, expected.dtype, expected.strides)


def copy_with_strides(
    x: torch.Tensor, dtype: torch.dtype, strides: tuple[int, ...] | None
) -> torch.Tensor:
    """A copy of these values in memory of its own.

    Args:
        x: any strides.
        dtype: of the copy.
        strides: of the copy, in elements; None: those that ``x.to(dtype, copy=True)`` gives.
    """
    if strides is None:
        return x.to(dtype, copy=True)
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device).copy_(x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    pattern = BIT_PATTERNS[a.element_size()]
    return torch.equal(a.view(pattern), b.view(pattern))
