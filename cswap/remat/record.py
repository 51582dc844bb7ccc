"""The record of a saved tensor that is computed again: `Remat`.

Note [the contents of a Remat]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A Remat holds packed objects of the inputs, copies of small leaves, and numbers. It never holds a
node of the graph or a tensor with a history. So it makes no cycle: an operator's saved input cannot
refer to a result computed from it. A Remat keeps its inputs alive, and it lives no longer than the
node that saved the tensor. Backward runs that node before the node that saved the inputs. So the
inputs do not live longer because of the Remat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from cswap.errors import InternalError
from cswap.remat.reads import HeldLeaf
from cswap.remat.settings import SameBits, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.remat.reads import Constant
    from cswap.remat.recognition import Recognition

Kind: TypeAlias = Literal["copy", "elementwise", "reduction", "product"]

VIEW: Final = "view"
"""Name of the operator in steps that only make a view."""

BIT_PATTERNS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes of an element, to compare bits instead of values."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operator to run again.

    Attributes:
        operator: name for display.
        function: runs the operator; takes the tensors, then ``constants``.
        operands: numbers of the tensors. Inputs are numbered first, then the record's constants,
            then the results of steps. None for an argument that was not given.
        constants: the other arguments.
        last_use: operands that no later step needs.
        inexact: runs instead of ``function`` if the bits of inputs have changed.
    """

    operator: str
    function: Callable[..., torch.Tensor]
    operands: tuple[int | None, ...]
    constants: tuple[object, ...]
    last_use: tuple[int, ...] = ()
    inexact: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes, strides, dtype and device of a tensor.

    Attributes:
        sizes: per dimension.
        strides: per dimension, in elements.
        dtype: dtype of the elements.
        device: device of the tensor.
    """

    sizes: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.sizes.numel() * self.dtype.itemsize

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        return Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@dataclass(slots=True, eq=False)
class Formula:
    """How a call site's tensor is computed again, whatever its inputs are.

    Attributes:
        steps: operators in the order in which they run; the last one gives the result.
        layout: layout of the result.
        depth: number of operators in a row, including those that compute the inputs again.
        passes: approximate number of reads and writes of memory of the result's size.
        version: autograd's version of the tensor when it was saved.
        root: type of the node that made it.
        recognition: of another tensor that it computes again.
        product: whether a step is a matrix product or a convolution.
        operator: name of the chain, without its views: ``"silu>mul"``.
        nbytes: bytes of the result.
    """

    steps: tuple[Step, ...]
    layout: Layout
    depth: int
    passes: int
    version: int
    root: type
    recognition: Recognition
    product: bool = False
    operator: str = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.operator = ">".join(step.operator for step in self.steps if step.operator != VIEW)
        self.nbytes = self.layout.nbytes


# Not frozen: one is made for each tensor in each step, and a frozen one takes twice the time.
@dataclass(slots=True, eq=False)
class Remat:
    """The operators and inputs that compute a saved tensor again, bit by bit.

    The result is the *whole memory* of the saved tensor: of the tensor itself, or of its base if it
    is a view. It begins at the storage's first byte, as the original does. So a saved view has the
    same sizes, strides and offset in it.

    Attributes:
        formula: the operators.
        inputs: packed objects, which autograd holds for the operators that saved them.
        constants: copies of small leaves, numbers, and parameters of which there are casts.
            Operands number them after the inputs.
        settings: settings of torch under which the result has the same bits.
    """

    formula: Formula
    inputs: tuple[object, ...]
    constants: tuple[Constant, ...]
    settings: Settings

    @property
    def distances(self) -> tuple[int, ...]:
        """By input, the most operators in a row from it to the result."""
        return self._distances()[: len(self.inputs)]

    @property
    def own_depth(self) -> int:
        """`Formula.depth` if all inputs were held. Constants may be further away: a bias's cast."""
        return max(self._distances(), default=1)

    def _distances(self) -> tuple[int, ...]:
        # Of the inputs, then of the constants.
        n_leaves, steps = len(self.inputs) + len(self.constants), self.formula.steps
        distances = [0] * (n_leaves + len(steps))
        for k in reversed(range(len(steps))):
            step, result = steps[k], len(distances) - len(steps) + k
            above = distances[result] + (step.operator != VIEW)
            for n in step.operands:
                if n is not None:
                    distances[n] = max(distances[n], above)
        return tuple(distances[:n_leaves])

    def run(self, inputs: Sequence[torch.Tensor], exact: bool = True) -> torch.Tensor:
        """Compute the tensor again.

        Args:
            inputs: the tensors of `inputs`, unpacked, in the same order. They are only read.
            exact: whether the inputs have their original bits. False after a lossy codec: then
                norms use their saved statistics, which are not those of the changed input.

        Returns:
            A new tensor without a history, with the formula's layout, at the beginning of its own
            storage.

        Raises:
            InternalError: the result has another shape, dtype or device.
            RuntimeError: a parameter was written since forward.
        """
        if self.settings.are_set():  # as in most backwards
            return self._run(inputs, exact)
        with SameBits(self.settings):
            return self._run(inputs, exact)

    def _run(self, inputs: Sequence[torch.Tensor], exact: bool) -> torch.Tensor:
        values: list[torch.Tensor | complex | None] = [*inputs]
        values += [c.unpack() if isinstance(c, HeldLeaf) else c for c in self.constants]
        formula = self.formula
        for step in formula.steps:
            operands = [None if n is None else values[n] for n in step.operands]
            function = step.function if exact or step.inexact is None else step.inexact
            values.append(function(*operands, *step.constants))
            for n in step.last_use:
                values[n] = None
            del operands
        result = values[-1]
        assert isinstance(result, torch.Tensor)  # the last step's
        return _checked(result, formula)

    def agrees(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the result has the same bits as the memory of the saved tensor.

        A chain that agrees once at a call site agrees until the model's code takes another path.
        Only this check finds ``y.data = other``, which autograd does not see.

        Args:
            tensor: memory of the formula's layout.
            inputs: see `run`.
        """
        return same_bits(self.run(inputs), tensor)


def _checked(result: torch.Tensor, formula: Formula) -> torch.Tensor:
    expected = formula.layout
    if (
        result.shape != expected.sizes
        or result.dtype != expected.dtype
        or result.device != expected.device
    ):
        raise InternalError(
            f"{formula.operator} gave {result.dtype} {tuple(result.shape)} on {result.device} "
            f"for {expected.dtype} {tuple(expected.sizes)} on {expected.device}"
        )
    if result.stride() == expected.strides and not result.storage_offset():
        return result
    return copy_with_strides(result, expected.dtype, expected.strides)


def copy_with_strides(
    x: torch.Tensor, dtype: torch.dtype, strides: tuple[int, ...] | None
) -> torch.Tensor:
    """Copy a tensor into new memory.

    Args:
        x: a tensor with any strides.
        dtype: dtype of the copy.
        strides: strides of the copy, in elements; None: those of ``x.to(dtype, copy=True)``.
    """
    if strides is None:
        return x.to(dtype, copy=True)
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device).copy_(x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits; NaN equals itself."""
    dtype = a.dtype
    if a.shape != b.shape or dtype is not b.dtype:
        return False
    if dtype.is_complex:
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        dtype = a.dtype
    pattern = BIT_PATTERNS[dtype.itemsize]
    return torch.equal(a.view(pattern), b.view(pattern))
