"""A step in which any tensor may leave the device and return: feature maps and gradients alike.

The engine and `cswap.plan.simulate` move only tensors that forward leaves for backward. tvDNN moves
memory objects. This is a schedule in its style, for comparison with the paper: its own rules were
not available to us.

Copies are planned beforehand, in the order of the operators. A tensor that is wanted comes back
``ahead`` operators early; where there is no room, the tensor whose next use is furthest away
leaves (Belady). A copy starts as soon as its direction of the link is free, its source is ready
and its room has been given up; operators wait for their inputs and for room for their outputs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cswap.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Collection

    from cswap.plan.hardware import Hardware
    from cswap.schema.trace import Trace, TraceOperator


@dataclass(frozen=True, slots=True)
class Moves:
    """One simulated step.

    Attributes:
        step_s: seconds of the step.
        compute_s: seconds of its operators alone.
        out_bytes: copied to the host.
        in_bytes: copied back.
        gradient_bytes: the part of ``out_bytes`` that belongs to gradients.
    """

    step_s: float
    compute_s: float
    out_bytes: int
    in_bytes: int
    gradient_bytes: int


@dataclass(slots=True)
class _Tensor:
    nbytes: int
    uses: list[int] = field(default_factory=list)
    on_device: bool = False
    on_host: bool = False
    ready_s: float = 0.0
    """When its last operator or its way back has ended."""
    host_s: float = 0.0

    def next_use(self, after: int) -> int:
        """The first operator after this one that uses it; a number beyond all if none does."""
        at = bisect_right(self.uses, after)
        return self.uses[at] if at < len(self.uses) else 1 << 60


class FreeMoves:
    """The simulation; `run` once.

    Args:
        trace: the step; its resident bytes stay.
        hardware: the link.
        budget_bytes: device memory, resident bytes included.
        ahead: operators.
    """

    def __init__(self, trace: Trace, hardware: Hardware, budget_bytes: int, ahead: int) -> None:
        self._trace, self._hardware, self._ahead = trace, hardware, ahead
        self._budget_bytes = budget_bytes
        self._tensors = [_Tensor(t.nbytes) for t in trace.tensors]
        made: dict[int, str] = {}
        for k, operator in enumerate(trace.operators):
            for t in dict.fromkeys((*operator.inputs, *operator.outputs)):
                self._tensors[t].uses.append(k)
            made.update(dict.fromkeys(operator.outputs, operator.name))
        self._maker = made
        for t, tensor in enumerate(self._tensors):
            tensor.on_host = t not in made  # inputs of the step come from the host
        capacity = budget_bytes - trace.resident_bytes
        # Room by the moment from which on it is free.
        self._room: list[tuple[float, int]] = [(0.0, capacity)]
        self._free_bytes = capacity
        self._resident: set[int] = set()
        self._compute_s = self._out_s = self._in_s = 0.0
        self._out_bytes = self._in_bytes = self._gradient_bytes = 0

    def run(self) -> Moves:
        """Simulate the step.

        Raises:
            BudgetError: an operator's own tensors do not fit.
        """
        operators = self._trace.operators
        for k, operator in enumerate(operators):
            for later in range(k, min(k + self._ahead + 1, len(operators))):
                self._fetch(operators[later].inputs, k, later)
            self._execute(k, operator)
        total_s = sum(operator.duration_s for operator in operators)
        step_s = max(self._compute_s, self._out_s)
        return Moves(step_s, total_s, self._out_bytes, self._in_bytes, self._gradient_bytes)

    def _execute(self, k: int, operator: TraceOperator) -> None:
        start_s = self._compute_s
        own = {*operator.inputs, *operator.outputs}
        for t in operator.outputs:
            tensor = self._tensors[t]
            if not tensor.on_device:
                start_s = max(start_s, self._take(tensor.nbytes, k, k, own))
                self._place(t)
        start_s = max([start_s, *(self._tensors[t].ready_s for t in operator.inputs)])
        self._compute_s = start_s + operator.duration_s
        for t in own:
            tensor = self._tensors[t]
            tensor.ready_s = self._compute_s
            if self._writes(operator, t):
                tensor.on_host = False
            if tensor.uses[-1] == k:
                self._drop(t)
                self._give(self._compute_s, tensor.nbytes)

    def _writes(self, operator: TraceOperator, t: int) -> bool:
        # An operator that makes nothing works in place; sections add to one gradient of weights.
        made_here = self._maker.get(t) == operator.name
        return t in operator.outputs or not operator.outputs or made_here

    def _fetch(self, wanted: Collection[int], k: int, later: int) -> None:
        for t in wanted:
            tensor = self._tensors[t]
            if tensor.on_device or not tensor.on_host:
                continue  # here already, or made by an operator still to come
            if later > k and not self._has_room(tensor.nbytes, k, later):
                return
            free_s = self._take(tensor.nbytes, k, later, wanted)
            start_s = max(self._in_s, free_s, tensor.host_s)
            self._in_s = start_s + tensor.nbytes / self._hardware.h2d_bytes_per_s
            tensor.ready_s = self._in_s
            self._in_bytes += tensor.nbytes
            self._place(t)

    def _has_room(self, nbytes: int, k: int, later: int) -> bool:
        leaving = sum(self._tensors[t].nbytes for t in self._leavers(k, later, ()))
        return self._free_bytes + leaving >= nbytes

    def _leavers(self, k: int, later: int, own: Collection[int]) -> list[int]:
        # Tensors that no operator up to `later` uses.
        return [
            t for t in self._resident
            if t not in own and self._tensors[t].next_use(k - 1) > later
        ]  # fmt: skip

    def _take(self, nbytes: int, k: int, later: int, own: Collection[int]) -> float:
        """The moment at which so many bytes are free, which are then taken."""
        while self._free_bytes < nbytes:
            leavers = self._leavers(k, later, own)
            if not leavers:
                why = f"the tensors of operator {k} do not fit together."
                raise BudgetError(self._budget_bytes, None, why)
            self._evict(max(leavers, key=lambda t: (self._tensors[t].next_use(k - 1), t)))
        self._free_bytes -= nbytes
        free_s = 0.0
        while nbytes:
            free_s, found = heapq.heappop(self._room)
            if found > nbytes:
                heapq.heappush(self._room, (free_s, found - nbytes))
            nbytes -= min(found, nbytes)
        return free_s

    def _evict(self, t: int) -> None:
        tensor = self._tensors[t]
        free_s = tensor.ready_s
        if not tensor.on_host:
            self._out_s = max(self._out_s, tensor.ready_s)
            self._out_s += tensor.nbytes / self._hardware.d2h_bytes_per_s
            tensor.host_s = free_s = self._out_s
            tensor.on_host = True
            self._out_bytes += tensor.nbytes
            if self._trace.tensors[t].role == "gradient":
                self._gradient_bytes += tensor.nbytes
        self._drop(t)
        self._give(free_s, tensor.nbytes)

    def _place(self, t: int) -> None:
        self._tensors[t].on_device = True
        self._resident.add(t)

    def _drop(self, t: int) -> None:
        self._tensors[t].on_device = False
        self._resident.discard(t)

    def _give(self, free_s: float, nbytes: int) -> None:
        if nbytes:
            heapq.heappush(self._room, (free_s, nbytes))
            self._free_bytes += nbytes
