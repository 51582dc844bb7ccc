"""One search for one tensor: `Search`.

Note [values, not memory]
~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd's nodes are functions of values. A node's inputs are the values at the time when the node
ran; later writes into their memory do not change them. So an operator that wrote in place counts
like any other. A tensor is the result of its node if three conditions hold:

* No unknown write came after the node: the tensor's version is 0, or its node is saving it at this
  moment. An address proves nothing, because it is reused after a tensor is freed.
* The inputs have their values of that time. For saved inputs this holds, because their unpack
  compares versions. Unsaved inputs are computed again themselves, and `Remat.unseen` counts them.
* The result has memory of its own, from the first byte of a storage to the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.remat.chain import Chain, PlannedStep, Value
from cswap.remat.operators import RESULT_SLOTS, Operator, operator_of
from cswap.remat.record import VIEW, Layout, Remat
from cswap.remat.settings import Settings
from cswap.remat.views import View, constants_of, saved_number, view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.remat.operators import Operand

REDUCTION_PASSES: Final = 2
"""Number of passes of a reduction besides those over its operands and its result."""

MOST_CONSTANT_SHARE: Final = 64
"""A leaf is copied if it is at most 1/MOST_CONSTANT_SHARE of the tensor that it saves."""


class NotFoundError(Exception):
    """The tensor cannot be computed again and has to be stored."""


@dataclass(frozen=True, slots=True)
class Limits:
    """See `Finder`."""

    depth_of: Callable[[object], int | None]
    max_depth: int
    max_passes: int
    through_unsaved: bool


_rows: dict[type, Operator | View | None] = {}


def row_of(node: Any) -> Operator | View | None:
    """The row of a node in one of the two tables; None: its operator does not run again."""
    # Every C++ node of a derivative formula has a Python type of its own, with its name.
    kind = type(node)
    try:
        return _rows[kind]
    except KeyError:
        pass
    if issubclass(kind, torch.autograd.function.BackwardCFunction):  # a user's, which may be freed
        return None
    row = _rows[kind] = operator_of(kind.__name__) or view_of(kind.__name__)
    return row


def is_hopeless(node: Any, row: Operator | View) -> bool:
    """Whether an unsaved argument comes from a node that cannot run again.

    This is checked before a search, because it holds for most tensors, such as sums of products and
    activations of products.
    """
    if isinstance(row, View):
        return _is_lost(node.next_functions[0][0])
    edges = [o.edge for o in row.operands if o.slot is None and o.edge is not None]
    if not edges:
        return False
    below = node.next_functions
    return any(_is_lost(below[edge][0]) for edge in edges)


def _is_lost(node: Any) -> bool:
    while node is not None:
        row = row_of(node)
        if row is None:
            name = type(node).__name__
            return name != "AccumulateGrad" and name not in RESULT_SLOTS
        if isinstance(row, Operator):
            return False
        node = node.next_functions[0][0]
    return True  # without a history


class Search:
    """One search for one tensor."""

    def __init__(self, limits: Limits, base: torch.Tensor) -> None:
        self._limits = limits
        self._base = base
        self._layout = Layout.of(base)
        self._version = base._version  # noqa: SLF001
        self._chain = Chain()
        self._unseen = self._passes = 0

    def remat(self, node: Any, row: Operator | View) -> Remat:
        """Find the record for the result of a node.

        Raises:
            NotFoundError: no record exists within the limits.
        """
        if not self._has_own_memory() or not self._is_result(node, row):
            raise NotFoundError
        value = self._made_by(node, 0, row, self._layout.strides, 0)
        if not value.computed or self._version > value.depth:
            raise NotFoundError
        if self._unseen and not self._limits.through_unsaved:
            raise NotFoundError
        return Remat(
            self._chain.steps(),
            tuple(self._chain.inputs),
            tuple(self._chain.constants),
            self._layout,
            Settings.current(),
            value.depth,
            self._passes,
            self._unseen,
        )

    # ------------------------------------------------------------- the result

    def _has_own_memory(self) -> bool:
        base, layout = self._base, self._layout
        if base.storage_offset() or base.is_conj() or base.is_neg():
            return False
        try:
            nbytes = base.untyped_storage().nbytes()
        except RuntimeError:  # a wrapper of another tensor, inside vmap or jvp
            return False
        return nbytes == layout.sizes.numel() * layout.dtype.itemsize

    def _is_result(self, node: Any, row: Operator | View) -> bool:
        if self._base.output_nr:
            return False
        if not self._version:
            return True
        if not isinstance(row, Operator) or not row.saves_result:
            return False
        if node._raw_saved_result.data is not None:  # noqa: SLF001
            return False
        try:  # Both are None while the node saves its result; later the second raises.
            return node._saved_result is None  # noqa: SLF001
        except RuntimeError:
            return False

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
        if row.trains and saved_number(node, "training") is not True:
            raise NotFoundError
        if row.rounds_statistics:
            self._check_statistics(node, number, level)
        below = strides if row.keeps_strides else None
        operands = tuple([self._operand(node, o, below, level) for o in row.operands])
        constants = tuple([saved_number(node, name) for name in row.constants])
        if row.extra:
            constants += self._extra(node, number, row, strides, level)
        self._passes += len(operands) + 1 + (REDUCTION_PASSES if row.kind == "reduction" else 0)
        if self._passes > self._limits.max_passes:
            raise NotFoundError
        depth = 1 + max([0 if o is None else o.depth for o in operands])
        if depth > self._limits.max_depth:
            raise NotFoundError
        return self._chain.add_step(
            PlannedStep(row.name, row.function, operands, constants, row.kind, row.inexact),
            depth,
            computed=True,
        )

    def _viewed(self, node: Any, number: int, view: View, level: int) -> Value:
        below, below_number = node.next_functions[0]
        strides = None
        if view.fresh:  # only `reshape` makes such a view, from a contiguous copy
            strides = _contiguous(node._saved_self_sym_sizes)  # noqa: SLF001
        operand = self._value(below, below_number, strides, level)
        constants = constants_of(view, node, number)
        step = PlannedStep(VIEW, view.function, (operand,), constants, "copy")
        return self._chain.add_step(step, operand.depth, computed=operand.computed)

    def _operand(
        self, node: Any, operand: Operand, strides: tuple[int, ...] | None, level: int
    ) -> Value | None:
        if operand.slot is not None:
            packed = _slot(node, operand.slot)
            if packed is not None:
                return self._held(packed)
            if operand.optional:
                return None
        if operand.edge is None:
            raise NotFoundError
        below, number = node.next_functions[operand.edge]
        return self._value(below, number, strides, level + 1)

    def _value(self, node: Any, number: int, strides: tuple[int, ...] | None, level: int) -> Value:
        """Find the output of a node that its consumer did not save."""
        if node is None:  # the argument has no history, or was a number
            raise NotFoundError
        name = type(node).__name__
        if name == "AccumulateGrad":
            return self._leaf(node.variable)
        slot = RESULT_SLOTS.get(name)
        if slot is not None and number == 0:
            packed = _slot(node, slot)
            if packed is not None:
                return self._held(packed)
        row = row_of(node)
        if row is None or (number and isinstance(row, Operator)):
            raise NotFoundError
        if isinstance(row, Operator) and not (level == 1 and self._version == 1):
            # At version 1 only the operator itself has written, in place. So its argument had the
            # computed value.
            self._unseen += 1
        return self._made_by(node, number, row, strides, level)

    def _held(self, packed: object) -> Value:
        depth = self._limits.depth_of(packed)
        if depth is not None:
            return self._chain.add_input(packed, depth)
        # Autograd saves numbers as tensors without calling the pack hook.
        if type(packed) is not torch.Tensor or packed.dim() or packed.dtype not in _NUMBERS:
            raise NotFoundError
        if packed._version or packed.requires_grad:  # noqa: SLF001
            raise NotFoundError
        return self._chain.add_constant(packed.item())

    def _leaf(self, variable: torch.Tensor) -> Value:
        # Copied, because the optimizer may change the leaf before backward needs it.
        if type(variable) not in _PLAIN or variable.layout is not torch.strided:
            raise NotFoundError
        nbytes = self._layout.sizes.numel() * self._layout.dtype.itemsize
        if variable.numel() * variable.element_size() * MOST_CONSTANT_SHARE > nbytes:
            raise NotFoundError
        self._unseen += 1
        return self._chain.add_constant(variable.detach().clone())

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
        if row.name == "cast" and _device_below(node) != self._layout.device:
            raise NotFoundError
        return (dtype, strides)

    def _dtype(self, node: Any, number: int, level: int) -> torch.dtype:
        if level == 0 and node is self._base.grad_fn:
            return self._layout.dtype
        found = node._input_metadata[number].dtype  # noqa: SLF001
        assert isinstance(found, torch.dtype)
        return found

    def _check_statistics(self, node: Any, number: int, level: int) -> None:
        # See Note [the epsilon of a norm].
        if self._dtype(node, number, level) in _FULL or self._layout.device.type != "cpu":
            return
        weight = node.next_functions[1][0]
        if weight is None or getattr(weight, "variable", self._base).dtype not in _FULL:
            raise NotFoundError


_NUMBERS: Final = frozenset({torch.float64, torch.int64, torch.complex128, torch.bool})
"""Dtypes in which torch wraps Python's numbers."""

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

_FULL: Final = frozenset({torch.float32, torch.float64})


def _slot(node: Any, name: str) -> object:
    """The packed object of a saved tensor; None: the slot is empty or was freed."""
    try:
        return getattr(node, f"_raw_saved_{name}").data
    except AttributeError:  # the node of another version of torch
        raise NotFoundError from None


def _device_below(node: Any) -> torch.device | None:
    below, number = node.next_functions[0]
    if below is None:
        return None
    variable = getattr(below, "variable", None)
    found = below._input_metadata[number].device if variable is None else variable.device  # noqa: SLF001
    return found if isinstance(found, torch.device) else None


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
