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
  compares versions. Unsaved inputs are computed again themselves.
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
from cswap.remat.operators import LEAST_DROPPED, NO_SIZES, RESULT_SLOTS, operator_of
from cswap.remat.reads import (
    CLONE,
    NotFoundError,
    Packed,
    Reader,
    facts_of,
    is_number,
)
from cswap.remat.recognition import Recognition
from cswap.remat.record import VIEW, Formula, Layout, Remat
from cswap.remat.settings import Settings
from cswap.remat.upstream import find_holder, oldest_edge
from cswap.remat.views import View, constants_of, view_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.remat.operator import Operand
    from cswap.remat.reads import HoldLeaf, Keep

REDUCTION_PASSES: Final = 4
"""Number of passes of a reduction: over its input three times, and over its result. Weights and
statistics are small."""

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


class Rows:
    """The rows of nodes in the tables of operators and of views."""

    def __init__(self, *, products: bool) -> None:
        """Args: products: see `operator_of`."""
        self._products = products
        self._rows: dict[type, Operator | View | None] = {}

    def of(self, node: Any) -> Operator | View | None:
        """The row of a node; None: its operator does not run again."""
        # Every C++ node of a derivative formula has a Python type of its own, with its name.
        kind = type(node)
        try:
            return self._rows[kind]
        except KeyError:
            pass
        if issubclass(kind, torch.autograd.function.BackwardCFunction):  # a user's; may be freed
            return None
        name = kind.__name__
        row = self._rows[kind] = operator_of(kind, products=self._products) or view_of(name)
        return row

    def is_hopeless(self, node: Any, row: Operator | View) -> bool:
        """Whether an unsaved argument comes from a node that cannot run again.

        This is checked before a search, because it holds for most tensors, such as sums of products
        and activations of products.
        """
        if isinstance(row, View):
            return self._is_lost(node.next_functions[0][0])
        edges = row.unsaved(node)
        if not edges or row.kind == "product":  # the bias may be absent
            return False
        below = node.next_functions
        lost = [edge for edge in edges if self._is_lost(below[edge][0])]
        if not lost:
            return False
        # Another operator may hold the older one of several arguments: see upstream.py.
        return len(edges) == 1 or len(lost) > 1 or lost[0] != oldest_edge(node, edges)

    def _is_lost(self, node: Any) -> bool:
        while node is not None:
            row = self.of(node)
            if row is None:
                name = type(node).__name__
                return name != "AccumulateGrad" and name not in RESULT_SLOTS
            if isinstance(row, Operator):
                return False
            node = node.next_functions[0][0]
        return True  # without a history


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
        self._passes = 0
        self._product = False

    def remat(self, row: Operator | View) -> Remat:
        """Find the record for the result of the node, whose row this is.

        Raises:
            NotFoundError: no record exists within the limits.
        """
        node = self._node
        if not (has_own_memory(self._base) and is_result(self._base, node, row)):
            raise NotFoundError
        value = self._made_by(node, 0, row, self._layout.strides, 0)
        if not value.computed or self._version > value.depth:
            raise NotFoundError
        formula = Formula(
            self._chain.steps(),
            self._layout,
            value.depth,
            self._passes,
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
        if row.every_item:  # in another step there may be more of them
            self._read.length(node, row.every_item)
        below = strides if row.keeps_strides else None
        joins = len(row.unsaved(node)) > 1
        held = self._held_parameter(node, number, level) if row.name == "cast" else None
        operands = (
            tuple([self._operand(node, o, below, level, joins) for o in row.operands_of(node)])
            if held is None
            else (held,)
        )
        constants = tuple([self._read.argument(node, name) for name in row.constants])
        if row.every_edge:  # in another step there may be more of them
            for edge in range(len(operands)):
                self._read.output(*self._read.below(node, edge))
        if row.drops:
            self._check_dropped(node, number, *constants)
            self._passes += DROPOUT_PASSES
        if row.kind == "product":
            self._product = True
            on_gpu = self._layout.device.type == "cuda"
            if row.name == "convolution" and on_gpu and torch.backends.cudnn.benchmark:
                raise NotFoundError  # another kernel may be the fastest next time
        if row.extra:
            constants += self._extra(node, number, row, strides, level)
        self._passes += REDUCTION_PASSES if row.kind == "reduction" else len(operands) + 1
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

    def _held_parameter(self, cast: Any, number: int, level: int) -> Value | None:
        # See Note [a parameter may change before backward] in engine/saved/leaves.py.
        hold, leaf = self._limits.hold, cast.next_functions[0][0]
        if hold is None or type(leaf).__name__ != "AccumulateGrad":
            return None
        dtype = self._dtype(cast, number, level)
        leaf, _ = self._read.below(cast, 0)
        return self._chain.add_constant(self._read.cast(leaf, cast, dtype, hold))

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
        return self._held(node, holder.slot, read.slot(node, holder.slot))

    def _value(self, node: Any, number: int, strides: tuple[int, ...] | None, level: int) -> Value:
        """Find the output of a node that its consumer did not save."""
        if node is None:  # the argument has no history, or was a number
            raise NotFoundError
        name = type(node).__name__
        if name == "AccumulateGrad":
            return self._chain.add_constant(self._read.leaf(node, self._layout.nbytes))
        slot = RESULT_SLOTS.get(name)
        if slot is not None and number == 0:
            packed = self._read.slot(node, slot)
            if packed is not None:
                return self._held(node, slot, packed)
        row = self._limits.rows.of(node)
        if row is None or (number and isinstance(row, Operator)):
            raise NotFoundError
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
    ) -> tuple[object, ...]:
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
