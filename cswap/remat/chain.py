"""A chain of operators during its search: `Chain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cswap.remat.record import VIEW, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.remat.reads import Constant


@dataclass(frozen=True, slots=True)
class Value:
    """An operand: its place, and its depth.

    Attributes:
        place: whether the operand is an input, a constant, or the result of a step.
        index: index among the operands of this place.
        depth: number of operators between the operand and bytes that are held.
        computed: whether a step made its memory.
    """

    place: Literal["input", "constant", "step"]
    index: int
    depth: int = 0
    computed: bool = False


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step whose operands have no numbers yet."""

    operator: str
    function: Callable[..., torch.Tensor]
    operands: tuple[Value | None, ...]
    constants: tuple[object, ...]
    inexact: Callable[..., torch.Tensor] | None = None
    in_place: tuple[Callable[..., torch.Tensor], ...] = ()


class Chain:
    """Inputs, constants and steps found so far.

    Attributes:
        inputs: packed objects.
        constants: copies and numbers.
    """

    def __init__(self) -> None:
        self.inputs: list[object] = []
        self.constants: list[Constant] = []
        self._steps: list[PlannedStep] = []

    def add_input(self, packed: object, depth: int) -> Value:
        """Add a packed object; an object that is already an input is not added again."""
        for index, known in enumerate(self.inputs):
            if known is packed:
                return Value("input", index, depth)
        self.inputs.append(packed)
        return Value("input", len(self.inputs) - 1, depth)

    def add_constant(self, constant: Constant) -> Value:
        """Add a copy or a number."""
        self.constants.append(constant)
        return Value("constant", len(self.constants) - 1)

    def add_step(self, step: PlannedStep, depth: int, *, computed: bool) -> Value:
        """Add a step after the steps that compute its operands. Args: see `Value`."""
        self._steps.append(step)
        return Value("step", len(self._steps) - 1, depth, computed)

    def _function(
        self, step: PlannedStep, k: int, last: dict[int, int], first: int
    ) -> Callable[..., torch.Tensor]:
        # In place of an operand, if an earlier step made that and no other step uses it.
        for operand, in_place in zip(step.operands, step.in_place, strict=False):
            if operand is None or operand.place != "step":
                continue
            is_viewed = any(s.operator == VIEW and operand in s.operands for s in self._steps)
            is_view = self._steps[operand.index].operator == VIEW
            if not (is_view or is_viewed) and last[first + operand.index] == k:
                return in_place
        return step.function

    def steps(self) -> tuple[Step, ...]:
        """The steps. Operands are numbers: inputs come first, then constants, then results."""
        first = {
            "input": 0,
            "constant": len(self.inputs),
            "step": len(self.inputs) + len(self.constants),
        }
        numbers = [
            tuple([None if o is None else first[o.place] + o.index for o in step.operands])
            for step in self._steps
        ]
        last: dict[int, int] = {n: k for k, row in enumerate(numbers) for n in row if n is not None}
        return tuple(
            Step(
                step.operator,
                self._function(step, k, last, first["step"]),
                operands,
                step.constants,
                tuple([n for n, at in last.items() if at == k]),
                step.inexact,
            )
            for k, (step, operands) in enumerate(zip(self._steps, numbers, strict=True))
        )
