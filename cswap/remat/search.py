"""One search for one tensor: `Search`.

Note [values, not memory]
~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd's nodes are functions of values. A node's inputs are the values at the time when the node
ran; later writes into their memory do not change them. So an operator that wrote in place counts
like any other. A tensor is the result of its node if three conditions hold:

* No unknown write came after the node: the tensor's version is 0, or its node is saving it at this
  moment, or its node has written in place and nobody else has. An address proves nothing, because
  it is reused after a tensor is freed.
* The inputs have their values of that time. For saved inputs this holds, because their unpack
  compares versions. Unsaved inputs are computed again themselves, and `Formula.unseen` counts them.
* The result has memory of its own, from the first byte of a storage to the last.

Note [an operator that clones what it overwrites]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In place, SiLU and its relatives save a clone of their argument, and then write. Its node's edge
leads past the clone to the node that gave the argument. Not in place, a node's edge leads to the
very node that made the saved tensor. So a node that has saved a clone, and whose edge leads to no
clone, has written in place. If the version is 1, nobody else has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.remat.chain import Chain, PlannedStep, Value
from cswap.remat.norms import FULL
from cswap.remat.operator import Operator
from cswap.remat.operators import LEAST_DROPPED, NO_SIZES, RESULT_SLOTS
from cswap.remat.reads import (
    CLONE,
    NotFoundError,
    NotYetError,
    Packed,
    Reader,
    facts_of,
    fills,
    is_number,
)
from cswap.remat.recognition import Recognition
from cswap.remat.record import VIEW, Formula, Layout, Remat
from cswap.remat.settings import Settings
from cswap.remat.upstream import find_holder
from cswap.remat.views import View, constants_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.remat.operator import Operand
    from cswap.remat.reads import HoldLeaf, Keep
    from cswap.remat.rows import Rows

REDUCTION_PASSES: Final = 4
"""Number of passes of a reduction: over its input three times, and over its result. Weights and
statistics are small."""

PARTS_PASSES: Final = 2
"""Passes of an operator that joins its operands."""

DROPOUT_PASSES: Final = 4
"""Passes of dropout, besides those of a product: over the mask, and a choice of two tensors."""


@dataclass(frozen=True, slots=True)
class Limits:
    """See `Finder`."""

    rows: Rows
    tolerance: int
    keep: Keep | None
    hold: HoldLeaf | None
    max_depth: int
    max_passes: int
    through_unsaved: bool


class Search:
    """One search for one tensor."""

    def __init__(self, limits: Limits, base: torch.Tensor, node: Any) -> None:
        """Args: limits: of the search; base: owns the memory; node: made it."""
        self._limits = limits
        self._base, self._node = base, node
        self._layout = Layout.of(base)
        self._version = base._version  # noqa: SLF001
        self._chain = Chain()
        self._read = Reader(node)
        self._unseen = 0
        self._passes = 0.0
        self._share = 1.0  # of the result's size: the values that are being computed
        self._product = self._not_yet = False

    def remat(self, row: Operator | View) -> Remat:
        """Find the record for the result of the node, whose row this is.

        Raises:
            NotFoundError: no record exists within the limits.
        """
        node = self._node
        if not (has_own_memory(self._base) and is_result(self._base, node, row)):
            raise NotFoundError
        value = self._made_by(node, 0, row, self._layout.strides, 0)
        if self._not_yet or not value.computed or self._version > value.depth:
            raise NotFoundError
        if self._unseen and not self._limits.through_unsaved:
            raise NotFoundError
        formula = Formula(
            self._chain.steps(),
            self._layout,
            value.depth,
            math.ceil(self._passes),
            self._unseen,
            self._version,
            type(node),
            Recognition(self._read.reads),
            self._product,
        )
        chain, settings = self._chain, Settings.current(product=self._product)
        return Remat(formula, tuple(chain.inputs), tuple(chain.constants), settings)

    # ----------------------------------------------------------------- values

    def _made_by(
        self,
        node: Any,
        number: int,
        row: Operator | View,
        strides: tuple[int, ...] | None,
        level: int,
    ) -> Value:
        """Add a node's operator as a step. Args: strides: strides of its result, if known."""
        if isinstance(row, View):
            return self._viewed(node, number, row, level)
        if level >= self._limits.max_depth:
            raise NotFoundError
        for name, value in row.only:
            if self._read.argument(node, name) != value:
                raise NotFoundError
        if row.rounds_statistics:
            self._check_statistics(node, number, level)
        if row.every_edge:
            operands = self._parts(node, row, level)
        else:
            operands = self._operands(node, number, row, strides, level)
        constants = tuple([self._read.argument(node, name) for name in row.constants])
        if row.drops:
            self._check_dropped(node, number, *constants)
        if row.kind == "product":
            self._product = True
            if row.name == "convolution" and self._is_on("cuda") and torch.backends.cudnn.benchmark:
                raise NotFoundError  # another kernel may be the fastest next time
        if row.extra:
            constants += self._extra(node, number, row, strides, level, constants)
        self._passes += _passes(row, len(operands)) * self._share
        if self._passes > self._limits.max_passes:
            raise NotFoundError
        depth = 1 + max([0 if o is None else o.depth for o in operands])
        if depth > self._limits.max_depth:
            raise NotFoundError
        return self._chain.add_step(
            PlannedStep(row.name, row.function, operands, constants, row.inexact, row.in_place),
            depth,
            computed=True,
        )

    def _operands(
        self,
        node: Any,
        number: int,
        row: Operator,
        strides: tuple[int, ...] | None,
        level: int,
    ) -> tuple[Value | None, ...]:
        below = strides if row.keeps_strides else None
        joins = len(row.unsaved(node)) > 1
        found: list[Value | None] = []
        for operand in row.operands:
            held = self._held_parameter(node, number, operand, level)
            found.append(held or self._operand(node, operand, below, level, joins))
        return tuple(found)

    def _parts(self, node: Any, row: Operator, level: int) -> tuple[Value | None, ...]:
        # In another step there may be more of them, or others in size.
        operands, read = row.operands_of(node), self._read
        sizes = [read.output(*read.below(node, n))[2] for n in range(len(operands))]
        numels = [math.prod(of_part) for of_part in sizes]
        whole, found = self._share, list[Value | None]()
        for operand, numel in zip(operands, numels, strict=True):
            self._share = whole * numel / max(1, sum(numels))
            found.append(self._operand(node, operand, None, level, len(operands) > 1))
        self._share = whole
        return tuple(found)

    def _held_parameter(self, node: Any, number: int, operand: Operand, level: int) -> Value | None:
        # See Note [a parameter may change before backward] in engine/saved/leaves.py.
        hold = self._limits.hold
        if hold is None or not operand.parameter or operand.edge is None:
            return None
        if type(node.next_functions[operand.edge][0]).__name__ != "AccumulateGrad":
            return None
        dtype = self._dtype(node, number, level)
        leaf, _ = self._read.below(node, operand.edge)
        try:
            return self._chain.add_constant(self._read.parameter(leaf, node, dtype, hold))
        except NotYetError:  # others of the chain are to be seen in this step, too
            self._not_yet = True
            return self._chain.add_constant(0)

    def _viewed(self, node: Any, number: int, view: View, level: int) -> Value:
        below, below_number = self._read.below(node, 0)
        strides = None
        if view.fresh:  # only `reshape` makes such a view, from a contiguous copy
            sizes = self._read.argument(node, "self_sym_sizes")
            strides = _contiguous(sizes)  # type: ignore[arg-type]
        operand = self._value(below, below_number, strides, level)
        constants = constants_of(view, self._read, node, number)
        step = PlannedStep(VIEW, view.function, (operand,), constants)
        return self._chain.add_step(step, operand.depth, computed=operand.computed)

    def _operand(
        self,
        node: Any,
        operand: Operand,
        strides: tuple[int, ...] | None,
        level: int,
        joins: bool = False,
    ) -> Value | None:
        # joins: whether other arguments that the node does not save have histories, too.
        if operand.sizes is not None and self._read.argument(node, operand.sizes) in NO_SIZES:
            return None
        if operand.slot is not None:
            packed = self._read.slot(node, operand.slot)
            if packed is not None:
                return self._held(node, operand.slot, packed)
            if operand.optional:
                return None
        if operand.edge is None:
            raise NotFoundError
        below, number = self._read.below(node, operand.edge)
        held = self._held_upstream(node, operand.edge) if joins and below is not None else None
        return self._value(below, number, strides, level + 1) if held is None else held

    def _held_upstream(self, node: Any, edge: int) -> Value | None:
        # See Note [the older summand is held by the other branch] in upstream.py.
        read, wanted = self._read, self._read.last
        if type(node.next_functions[edge][0]).__name__ in RESULT_SLOTS:
            return None
        holder = find_holder(node, edge)
        if holder is None:
            return None
        for number in holder.path:
            node, _ = read.below(node, number)
        read.same(node, holder.edge, wanted)
        self._unseen += 1
        return self._held(node, holder.slot, read.slot(node, holder.slot))

    def _value(self, node: Any, number: int, strides: tuple[int, ...] | None, level: int) -> Value:
        """Find the output of a node that its consumer did not save."""
        if node is None:  # the argument has no history, or was a number
            raise NotFoundError
        name = type(node).__name__
        if name == "AccumulateGrad":
            self._unseen += 1
            return self._chain.add_constant(self._read.leaf(node, self._layout.nbytes))
        slot = RESULT_SLOTS.get(name)
        if slot is not None and number == 0:
            packed = self._read.slot(node, slot)
            if packed is not None:
                return self._held(node, slot, packed)
        row = self._limits.rows.of(node)
        if row is None or (number and isinstance(row, Operator)):
            raise NotFoundError
        if isinstance(row, Operator) and not (level == 1 and self._version == 1):
            # At version 1 only the operator itself has written, in place. So its argument had the
            # computed value.
            self._unseen += 1
        return self._made_by(node, number, row, strides, level)

    def _held(self, node: Any, slot: str, packed: object) -> Value:
        keep = self._limits.keep
        if not isinstance(packed, Packed):
            if is_number(packed) or keep is None:
                return self._chain.add_constant(self._read.constant(node, slot))
            packed = self._read.plain(node, slot, keep)
        depth, tolerance = facts = facts_of(packed)
        if tolerance > self._limits.tolerance:
            raise NotFoundError
        value = self._chain.add_input(packed, depth)
        self._read.take_input(node, slot, facts, value.index)
        return value

    # -------------------------------------------------------------- arguments

    def _extra(
        self,
        node: Any,
        number: int,
        row: Operator,
        strides: tuple[int, ...] | None,
        level: int,
        constants: tuple[Any, ...],
    ) -> tuple[object, ...]:
        if row.extra == "fill":
            return (self._fill(node, *constants),)
        if row.extra == "sizes":
            return (self._sizes(node, number, level),)
        dtype = self._dtype(node, number, level)
        if row.extra == "dtype":
            return (dtype,)
        if row.name == "clone" and strides is None:
            raise NotFoundError  # the node does not store the order of the copy
        if row.name == "cast" and self._device_below(node) != self._layout.device:
            raise NotFoundError
        return (dtype, strides)

    def _dtype(self, node: Any, number: int, level: int) -> torch.dtype:
        if level == 0 and node is self._node:
            return self._layout.dtype
        return self._read.output(node, number)[0]

    def _sizes(self, node: Any, number: int, level: int) -> tuple[int, ...]:
        if level == 0 and node is self._node:
            return self._layout.sizes
        return self._read.output(node, number)[2]

    def _fill(self, node: Any, pads: tuple[int, ...]) -> complex:
        # The node does not say with which number it has padded: the border of its result does.
        if not fills(pads):
            return 0
        if node is not self._node or not self._is_on("cpu"):  # a GPU's host would wait
            raise NotFoundError
        return self._read.fill(self._base, pads)

    def _is_on(self, kind: str) -> bool:
        return self._layout.device.type == kind

    def _device_below(self, node: Any) -> torch.device | None:
        below, number = self._read.below(node, 0)
        if below is None:
            return None
        leaf = self._read.variable(below)
        return self._read.output(below, number)[1] if leaf is None else leaf[1]

    def _check_dropped(self, node: Any, number: int, share: Any) -> None:
        # See Note [dropout runs again with its mask].
        sizes = self._read.output(node, number)[2]
        if share * math.prod(sizes) < LEAST_DROPPED:
            raise NotFoundError

    def _check_statistics(self, node: Any, number: int, level: int) -> None:
        # See Note [the epsilon of a norm].
        if self._dtype(node, number, level) in FULL or self._layout.device.type != "cpu":
            return
        weight, _ = self._read.below(node, 1)
        if weight is None:
            raise NotFoundError
        leaf = self._read.variable(weight)
        if (self._layout.dtype if leaf is None else leaf[0]) not in FULL:
            raise NotFoundError


def _passes(row: Operator, n_operands: int) -> int:
    # Reads and writes of memory of the size of the operator's result.
    if row.every_edge:
        return PARTS_PASSES
    passes = REDUCTION_PASSES if row.kind == "reduction" else n_operands + 1
    return passes + DROPOUT_PASSES if row.drops else passes


def has_own_memory(base: torch.Tensor) -> bool:
    """Whether a tensor covers its storage, from the first byte to the last."""
    if base.storage_offset() or base.is_conj() or base.is_neg():
        return False
    try:
        return base.untyped_storage().nbytes() == base.nbytes
    except RuntimeError:  # a wrapper of another tensor, inside vmap or jvp
        return False


def is_result(base: torch.Tensor, node: Any, row: Operator | View) -> bool:
    """Whether a tensor has the value that its node gave it. See Note [values, not memory]."""
    if base.output_nr:
        return False
    if not base._version:  # noqa: SLF001
        return True
    if not isinstance(row, Operator):
        return False
    if not row.saves_result:
        return base._version == 1 and _has_cloned(node, row)  # noqa: SLF001
    if node._raw_saved_result.data is not None:  # noqa: SLF001
        return False
    try:  # Both are None while the node saves its result; later the second raises.
        return node._saved_result is None  # noqa: SLF001
    except RuntimeError:
        return False


def _has_cloned(node: Any, row: Operator) -> bool:
    # See Note [an operator that clones what it overwrites].
    if len(row.operands) != 1 or row.operands[0].slot != "self":  # others may promote
        return False
    packed = node._raw_saved_self.data  # noqa: SLF001
    below = type(node.next_functions[0][0]).__name__
    return isinstance(packed, Packed) and packed.is_clone and below != CLONE


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
