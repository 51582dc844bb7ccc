"""One row of the tables of operators that may run again: `Operator`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.remat.record import Kind


@dataclass(frozen=True, slots=True)
class Operand:
    """The source of one tensor argument of a node.

    Attributes:
        slot: name of the saved tensor; None: the node never saves it.
        edge: index into `next_functions` of the node that computes an unsaved argument; None: the
            argument has to be saved.
        optional: whether an empty slot means that the argument was not given.
        sizes: name of the saved sizes of the argument, which are empty if it was not given.
    """

    slot: str | None
    edge: int | None = None
    optional: bool = False
    sizes: str | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """One row of the table.

    Attributes:
        name: a name for display.
        function: takes the operands, then the constants, then ``extra``.
        operands: tensor arguments.
        constants: names of saved numbers.
        kind: class of its memory traffic.
        extra: arguments that follow from the result: its dtype, or its dtype and strides.
        saves_result: whether the node saves its result, and so may have written in place.
        rounds_statistics: whether it is a norm whose statistics have the weights' dtype on a CPU.
        only: names of saved arguments, with the values with which alone it runs again.
        drops: whether it is dropout: see the Note.
        inexact: replaces ``function`` if inputs come from a lossy codec.
        in_place: by operand, the same as ``function``, written into that operand, which nobody else
            uses.
        every_edge: whether there is an operand at each of the node's edges, and no other.
        every_item: name of a saved list of tensors, which are operands after the others; some may
            not have been given.
    """

    name: str
    function: Callable[..., torch.Tensor]
    operands: tuple[Operand, ...]
    constants: tuple[str, ...] = ()
    kind: Kind = "elementwise"
    extra: Literal["", "dtype", "layout"] = ""
    saves_result: bool = False
    rounds_statistics: bool = False
    only: tuple[tuple[str, object], ...] = ()
    drops: bool = False
    inexact: Callable[..., torch.Tensor] | None = None
    in_place: tuple[Callable[..., torch.Tensor], ...] = ()
    every_edge: bool = False
    every_item: str = ""

    def operands_of(self, node: Any) -> tuple[Operand, ...]:
        """The tensor arguments of a node that was not freed."""
        if self.every_edge:
            return tuple([Operand(None, n) for n in range(len(node.next_functions))])
        if self.every_item:
            items = range(len(getattr(node, f"_raw_saved_{self.every_item}")))
            listed = [Operand(f"{self.every_item}[{n}]", optional=True) for n in items]
            return (*self.operands, *listed)
        return self.operands

    def unsaved(self, node: Any) -> list[int]:
        """Edges of the arguments that the node never saves."""
        operands = self.operands_of(node) if self.every_edge else self.operands
        return [o.edge for o in operands if o.slot is None and o.edge is not None]

    @property
    def keeps_strides(self) -> bool:
        """Whether a dense argument has the strides of the result."""
        return self.kind == "elementwise" and len(self.operands) == 1
