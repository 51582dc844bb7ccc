"""Operators that repeat elements of their argument, by the name of their autograd node.

Note [an argument that is read off its copies]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A gather by edges, a look-up in a table, `repeat` and nearest upsampling write each element of their
argument several times. Their nodes do not save the argument, and nobody else has to hold it as it
was. But it can be read off the result, of which it is a smaller part: of each row that was gathered
the last copy, of a repetition the first. This part is held, and the operator runs again on it. So
nothing is asked of other operators: the part has the result's bits, whatever the argument's memory
holds by now.

Rows that were not gathered have no copy. In the part they have the bits of another row, which
nobody reads. An embedding bag of one row for each bag is a gather, whatever it does with a row: the
same row gives the same result. Of several rows it is a sum, and its part cannot be read off.

Of a stack, each operand is read off where it lies. An operand that is neither held nor the result
of such an operator is copied as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.remat.operators import Operand
from cswap.remat.reads import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEAST_REPEATED: Final = 2
"""The parts are to have at most 1/LEAST_REPEATED of the result's bytes."""


@dataclass(frozen=True, slots=True)
class Copying:
    """One row of the table.

    Attributes:
        name: a name for display.
        function: takes the part, the operands, then the constants; returns the result.
        part: takes the result, the operands, then the constants; returns new memory.
        operands: tensor arguments besides the one that is read off, all saved.
        constants: names of saved numbers.
        sizes: takes the result's sizes, then the constants; returns those of the part.
        absent: slots that have to be empty.
        of_rows: whether the result has, for each number in the first operand, a row of the part.
    """

    name: str
    function: Callable[..., torch.Tensor]
    part: Callable[..., torch.Tensor]
    operands: tuple[Operand, ...]
    constants: tuple[str, ...]
    sizes: Callable[..., Sequence[int]]
    absent: tuple[str, ...] = ()
    of_rows: bool = False


def _last(_: Sequence[int], *constants: Any) -> Sequence[int]:
    return constants[-1]  # type: ignore[no-any-return] # the argument's sizes


def _of_table(result: Sequence[int], n_rows: int) -> Sequence[int]:
    return n_rows, result[-1]


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


def _embedding(part: torch.Tensor, index: torch.Tensor, _: int) -> torch.Tensor:
    return part.index_select(0, index.reshape(-1)).view(*index.shape, part.shape[-1])


def _embedded(result: torch.Tensor, index: torch.Tensor, n_rows: int) -> torch.Tensor:
    return _selected(result.reshape(-1, result.shape[-1]), index, 0, (n_rows,))


def _bag(part: torch.Tensor, index: torch.Tensor, _offsets: object, _: int) -> torch.Tensor:
    return part.index_select(0, index)


def _bagged(
    result: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, n_rows: int
) -> torch.Tensor:
    n_bags = len(result)
    # There may be one offset more, of the end.
    if index.numel() != n_bags or not torch.equal(
        offsets, torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
    ):
        raise NotFoundError
    return _selected(result, index, 0, (n_rows,))


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
    result: torch.Tensor,
    size: Sequence[int],
    scale_h: float | None,
    scale_w: float | None,
    sizes: Sequence[int],
) -> torch.Tensor:
    by_h, by_w = size[0] // sizes[-2], size[1] // sizes[-1]
    if scale_h not in (None, by_h) or scale_w not in (None, by_w):  # other elements are first
        raise NotFoundError
    return result[..., ::by_h, ::by_w].clone(memory_format=torch.preserve_format)


_SIZES: Final = "self_sym_sizes"
_N_ROWS: Final = "weight_sym_argsize_0"

_ROWS: Final[dict[str, Copying]] = {
    "IndexSelectBackward0": Copying(
        "index_select", _index_select, _selected, (Operand("index"),), ("dim", _SIZES), _last
    ),
    "EmbeddingBackward0": Copying(
        "embedding",
        _embedding,
        _embedded,
        (Operand("indices"),),
        (_N_ROWS,),
        _of_table,
        of_rows=True,
    ),
    "EmbeddingBagBackward0": Copying(
        "embedding_bag",
        _bag,
        _bagged,
        (Operand("indices"), Operand("offsets")),
        (_N_ROWS,),
        _of_table,
        absent=("per_sample_weights",),
        of_rows=True,
    ),
    "RepeatBackward0": Copying("repeat", _repeat, _repeated, (), ("repeats", _SIZES), _last),
    "UpsampleNearest2DBackward0": Copying(
        "upsample",
        _upsample_nearest,
        _upsampled,
        (),
        ("output_size", "scales_h", "scales_w", _SIZES),
        _last,
    ),
}

STACK: Final = "StackBackward0"


def copying_of(name: str) -> Copying | None:
    """The row of the autograd node of this name; None: its operator repeats nothing.

    >>> copying_of("RepeatBackward0").name
    'repeat'
    """
    return _ROWS.get(name)


def may_be_read_off(name: str) -> bool:
    """Whether arguments of the operator of this node may be read off its result.

    >>> may_be_read_off("StackBackward0"), may_be_read_off("MulBackward0")
    (True, False)
    """
    return name == STACK or name in _ROWS


def stacked_rows(*arguments: Any) -> torch.Tensor:
    """A stack of rows of tables, [..., width], in one gather: no operand gets memory of its own.

    Args:
        arguments: of each operand, the table, [n, width], and the numbers of its rows, or the
            operand itself; then the dimension of the stack, and by operand how many these are.
    """
    *given, dim, groups = arguments
    tables, numbers = [], []
    rest, before = iter(given), 0
    for n in groups:
        table = next(rest)
        if n == 1:
            number = torch.arange(table[..., 0].numel(), device=table.device)
            number = number.view(table.shape[:-1])
            table = table.reshape(-1, table.shape[-1])
        else:
            number = next(rest)
        tables.append(table)
        numbers.append(number + before)
        before += len(table)
    index = torch.stack(numbers, dim)
    rows = torch.cat(tables).index_select(0, index.view(-1))
    return rows.view(*index.shape, rows.shape[-1])
