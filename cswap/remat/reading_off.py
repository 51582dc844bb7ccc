"""The search for a result whose arguments are read off it: `ReadingOff`. See copies.py."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from cswap.remat.chain import PlannedStep, Value
from cswap.remat.copies import LEAST_REPEATED, copying_of, stacked_rows
from cswap.remat.part import Part
from cswap.remat.reads import NotFoundError
from cswap.remat.search import Search, has_own_memory

if TYPE_CHECKING:
    from cswap.remat.copies import Copying
    from cswap.remat.record import Remat

STACK_PASSES: Final = 4
"""Passes of a stack: its rows are read and written, and their numbers."""


class ReadingOff(Search):
    """One search for one tensor, with parts that are read off it."""

    def remat_of_copies(self) -> Remat:
        """Find the record for the result of the node.

        Raises:
            NotFoundError: no record exists within the limits, or the parts would not be much
                smaller than the result.
        """
        node, base = self._node, self._base
        if not has_own_memory(base) or base._version or base.output_nr:  # noqa: SLF001
            raise NotFoundError
        self._parts: list[Part] = []
        row = copying_of(type(node).__name__)
        if row is not None:
            value = self._copies(node, row)
        else:
            value = self._stacked(node)
        held = sum(math.prod(part.sizes) for part in self._parts)
        if not self._parts or held * LEAST_REPEATED > self._layout.sizes.numel():
            raise NotFoundError
        if value.depth > self._limits.max_depth:
            raise NotFoundError
        if self._unseen and not self._limits.through_unsaved:
            raise NotFoundError
        return self._found(value.depth, tuple(self._parts))

    def _copies(self, node: Any, row: Copying) -> Value:
        argument, operands, constants = self._read_off(node, row, tuple(self._layout.sizes), None)
        self._passes += 2 + len(operands)
        step = PlannedStep(row.name, row.function, (argument, *operands), constants)
        return self._chain.add_step(step, _depth(operands), computed=True)

    def _read_off(
        self, node: Any, row: Copying, result: tuple[int, ...], place: tuple[int, int] | None
    ) -> tuple[Value, tuple[Value, ...], tuple[object, ...]]:
        # The part, the operands and the constants of a node. Args: result: its sizes; place: in a
        # stack, see `Part`.
        if any(self._read.slot(node, name) is not None for name in row.absent):
            raise NotFoundError
        argument = self._part(node)
        found = [self._operand(node, o, None, 0) for o in row.operands]
        operands = tuple([o for o in found if o is not None and o.place == "input"])
        if len(operands) < len(found):
            raise NotFoundError
        constants = tuple([self._read.argument(node, name) for name in row.constants])
        sizes = tuple(row.sizes(result, *constants))
        inputs = tuple([o.index for o in operands])
        self._parts.append(Part(row.part, sizes, inputs, constants, place))
        return argument, operands, constants

    def _part(self, node: Any) -> Value:
        self._read.part(node)
        return self._chain.add_constant(None)

    def _stacked(self, node: Any) -> Value:
        rows = [copying_of(type(below).__name__) for below, _ in node.next_functions]
        dim = self._read.argument(node, "dim")
        assert isinstance(dim, int)
        sizes = list(self._layout.sizes)
        dim %= len(sizes)
        n_of_rows = sum(row is not None and row.of_rows for row in rows)
        if n_of_rows * LEAST_REPEATED < len(rows) or dim == len(sizes) - 1:
            raise NotFoundError
        del sizes[dim]
        self._passes += STACK_PASSES
        groups = [self._group(node, tuple(sizes), (dim, n), row) for n, row in enumerate(rows)]
        operands = tuple([value for group in groups for value in group])
        constants = dim, tuple([len(group) for group in groups])
        step = PlannedStep("stack", stacked_rows, operands, constants)
        return self._chain.add_step(step, _depth(operands), computed=True)

    def _group(
        self, node: Any, sizes: tuple[int, ...], place: tuple[int, int], row: Copying | None
    ) -> tuple[Value, ...]:
        # The values of one operand: a part and the numbers of its rows; or itself, if that is held
        # or computed; or else a copy of it.
        reads, chain = self._read.mark(), self._chain.mark()
        counts = self._unseen, self._passes
        try:
            below, output = self._read.below(node, place[1])
            if row is None or not row.of_rows or output:
                return (self._value(below, output, None, 1),)
            part, operands, _ = self._read_off(below, row, sizes, place)
            return part, operands[0]
        except NotFoundError:
            self._read.back_to(reads)
            self._chain.back_to(chain)
            self._unseen, self._passes = counts
        self._parts.append(Part(None, sizes, place=place))
        return (self._part(node),)


def _depth(operands: tuple[Value, ...]) -> int:
    return 1 + max([o.depth for o in operands], default=0)
