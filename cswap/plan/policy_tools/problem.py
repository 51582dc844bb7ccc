"""The task of a policy: the step, the machine, the budget, and the time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.simulate import Simulator

if TYPE_CHECKING:
    from cswap.plan.hardware import Hardware
    from cswap.schema.trace import Trace

Report = Callable[[float, str], None]
"""Called with the fraction done, 0..1, and a text on the current work."""


def silent(fraction: float, text: str) -> None:
    """Report nothing."""


@dataclass(slots=True)
class Problem:
    """One task for a policy.

    Attributes:
        trace: the step to plan for.
        hardware: the machine to plan for.
        budget_bytes: device memory that the whole step may use.
        seed: seed of every random choice.
        deadline: time in `time.monotonic` seconds at which the policy returns its best plan so far;
            None: no limit.
        recompute: whether tensors may be computed again; or the positions (`TraceTensor.saved`) of
            those that may.
        report: progress function; policies call it from time to time.
        interrupt: set from outside to stop early.
    """

    trace: Trace
    hardware: Hardware
    budget_bytes: int
    seed: int = 0
    deadline: float | None = None
    recompute: bool | Collection[int] = True
    report: Report = silent
    interrupt: threading.Event = field(default_factory=threading.Event)
    _simulator: Simulator | None = None

    @property
    def simulator(self) -> Simulator:
        """The simulator of this trace, hardware and budget, built once."""
        if self._simulator is None:
            self._simulator = Simulator(self.trace, self.hardware, self.budget_bytes)
            may = self.recompute
            if may is not True:
                named = np.isin(self._simulator.saved, list(may or ()))
                self._simulator.recomputable &= named
        return self._simulator

    def stopped(self) -> bool:
        """Whether the policy must return its best plan so far now."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return late or self.interrupt.is_set()
