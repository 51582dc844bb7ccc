"""Views in the middle of a chain, rebuilt from the autograd nodes that made them.

For a saved tensor that is a view, its base tells the origin of its memory. Between two operators of
a chain there is only the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.remat.reads import Reader


@dataclass(frozen=True, slots=True)
class View:
    """One kind of view.

    Attributes:
        function: takes the tensor, then the constants.
        constants: names of saved numbers.
        sizes: whether the sizes of the view come before the constants.
        number: whether the number of the view comes last, such as the number of a chunk.
        fresh: whether its memory is always a copy made for the view.
    """

    function: Callable[..., torch.Tensor]
    constants: tuple[str, ...] = ()
    sizes: bool = False
    number: bool = False
    fresh: bool = False


def _slice(x: torch.Tensor, dim: int, start: int, end: int, step: int) -> torch.Tensor:
    return torch.ops.aten.slice.Tensor(x, dim, start, end, step)  # type: ignore[no-any-return]


def _squeeze_all(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze()


def _squeeze(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    return x.squeeze(dim)


def _chunk(x: torch.Tensor, dim: int, size: int, number: int) -> torch.Tensor:
    return torch.split(x, size, dim)[number]


def _part(x: torch.Tensor, dim: int, sizes: Sequence[int], number: int) -> torch.Tensor:
    return torch.split(x, list(sizes), dim)[number]


def _unbind(x: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    return x.select(dim, number)


_VIEW: Final = View(torch.Tensor.view, sizes=True)

_ROWS: Final[dict[str, View]] = {
    "ViewBackward0": _VIEW,
    "ReshapeAliasBackward0": _VIEW,
    "UnsafeViewBackward0": View(torch.Tensor.view, sizes=True, fresh=True),
    "ExpandBackward0": View(torch.Tensor.expand, sizes=True),
    "TBackward0": View(torch.t),
    "TransposeBackward0": View(torch.transpose, ("dim0", "dim1")),
    "PermuteBackward0": View(torch.permute, ("dims",)),
    "SliceBackward0": View(_slice, ("dim", "start", "end", "step")),
    "SelectBackward0": View(torch.select, ("dim", "index")),
    "UnsqueezeBackward0": View(torch.unsqueeze, ("dim",)),
    "SqueezeBackward0": View(_squeeze_all),
    "SqueezeBackward1": View(_squeeze, ("dim",)),
    "SqueezeBackward2": View(_squeeze, ("dim",)),
    "SplitBackward0": View(_chunk, ("dim", "split_size"), number=True),
    "SplitWithSizesBackward0": View(_part, ("dim", "split_sizes"), number=True),
    "UnbindBackward0": View(_unbind, ("dim",), number=True),
}


def view_of(name: str) -> View | None:
    """The view made by the autograd node of this name; None: the node makes no view."""
    return _ROWS.get(name)


def constants_of(view: View, read: Reader, node: Any, number: int) -> tuple[object, ...]:
    """The arguments of a view's function after the tensor.

    Args:
        view: the row of the node.
        read: reads nodes.
        node: the node that made the view.
        number: number of the view among the node's outputs.

    Raises:
        AttributeError: in this version of torch the node has no such attribute.
    """
    found: list[object] = []
    if view.sizes:
        found.append(read.output(node, number)[2])
    found += [read.argument(node, name) for name in view.constants]
    if view.number:
        found.append(number)
    return tuple(found)
