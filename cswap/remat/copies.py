"""Operators that repeat elements of their argument, by the name of their autograd node.

Note [an argument that is read off its copies]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A gather by edges, `repeat` and nearest upsampling write each element of their argument several
times. Their nodes do not save the argument, and nobody else has to hold it. But it can be read off
the result, of which it is a smaller part: of each row that was gathered the last copy, of a
repetition the first. This part is held, and the operator runs again on it. So nothing is asked of
other operators: the part has the result's bits, whatever the argument's memory holds by now.

Rows that were not gathered have no copy. In the part they have the bits of another row, which
nobody reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from cswap.remat.operators import Operand
from cswap.remat.reads import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEAST_REPEATED: Final = 2
"""The part is to have at most 1/LEAST_REPEATED of the result's bytes."""


@dataclass(frozen=True, slots=True)
class Copying:
    """One row of the table.

    Attributes:
        name: a name for display.
        function: takes the part, the operands, then the constants; returns the result.
        part: takes the result, the operands, then the constants; returns new memory.
        operands: tensor arguments besides the one that is read off, all saved.
        constants: names of saved numbers; the last one is the argument's sizes.
    """

    name: str
    function: Callable[..., torch.Tensor]
    part: Callable[..., torch.Tensor]
    operands: tuple[Operand, ...]
    constants: tuple[str, ...]


def _index_select(
    part: torch.Tensor, index: torch.Tensor, dim: int, _: Sequence[int]
) -> torch.Tensor:
    return part.index_select(dim, index)


def _selected(
    result: torch.Tensor, index: torch.Tensor, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    numbers = torch.arange(index.numel(), device=index.device)
    of_row = numbers.new_zeros(sizes[dim])
    # Of several copies any one will do: which is written last does not matter.
    of_row.scatter_(0, index.reshape(-1).long(), numbers)
    return result.index_select(dim, of_row)


def _repeat(part: torch.Tensor, repeats: Sequence[int], _: Sequence[int]) -> torch.Tensor:
    return part.repeat(*repeats)


def _repeated(result: torch.Tensor, _: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    while result.dim() > len(sizes):  # new dimensions come first
        result = result[0]
    for dim, size in enumerate(sizes):
        result = result.narrow(dim, 0, size)
    return result.clone(memory_format=torch.contiguous_format)


def _upsample_nearest(
    part: torch.Tensor,
    size: Sequence[int],
    scale_h: float | None,
    scale_w: float | None,
    _: Sequence[int],
) -> torch.Tensor:
    return torch.ops.aten.upsample_nearest2d(  # type: ignore[no-any-return]
        part, size, scale_h, scale_w
    )


def _upsampled(
    result: torch.Tensor, size: Sequence[int], _h: object, _w: object, sizes: Sequence[int]
) -> torch.Tensor:
    by_h, by_w = size[0] // sizes[-2], size[1] // sizes[-1]
    return result[..., ::by_h, ::by_w].clone(memory_format=torch.preserve_format)


_SIZES: Final = "self_sym_sizes"

_ROWS: Final[dict[str, Copying]] = {
    "IndexSelectBackward0": Copying(
        "index_select", _index_select, _selected, (Operand("index"),), ("dim", _SIZES)
    ),
    "RepeatBackward0": Copying("repeat", _repeat, _repeated, (), ("repeats", _SIZES)),
    "UpsampleNearest2DBackward0": Copying(
        "upsample",
        _upsample_nearest,
        _upsampled,
        (),
        ("output_size", "scales_h", "scales_w", _SIZES),
    ),
}


def copying_of(name: str) -> Copying | None:
    """The row of the autograd node of this name; None: its operator repeats nothing.

    >>> copying_of("RepeatBackward0").name
    'repeat'
    """
    return _ROWS.get(name)


@dataclass(frozen=True, slots=True)
class Part:
    """How an operator's argument is read off its result.

    Attributes:
        row: of the operator.
        inputs: numbers of its operands among the record's inputs.
        constants: its saved numbers.
    """

    row: Copying
    inputs: tuple[int, ...]
    constants: tuple[object, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the argument."""
        return self.constants[-1]  # type: ignore[return-value] # see `Copying`

    def of(self, result: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The part, in new memory, without a history.

        Args:
            result: the operator's.
            inputs: of the record, unpacked.

        Raises:
            NotFoundError: it cannot be read off by strides.
        """
        operands = [inputs[n] for n in self.inputs]
        with torch.no_grad():
            found = self.row.part(result.detach(), *operands, *self.constants)
        if found.shape != self.sizes:
            raise NotFoundError
        return found


def part_of(
    row: Copying, inputs: tuple[int, ...], constants: tuple[object, ...], numel: int
) -> Part:
    """How the argument of one operator is read off its result.

    Args:
        row: of the operator.
        inputs: see `Part`.
        constants: its saved numbers.
        numel: elements of the result.

    Raises:
        NotFoundError: the part would not be much smaller than the result.
    """
    found = Part(row, inputs, constants)
    if math.prod(found.sizes) * LEAST_REPEATED > numel:
        raise NotFoundError
    return found
