"""Tools of policies that search: stopping on Ctrl-C, and keeping the best candidate."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.simulate import RunResult, Simulator


@contextmanager
def interruptible(problem: Problem) -> Iterator[None]:
    """A context in which the first Ctrl-C sets ``problem.stopped()``; the second raises as usual.

    Outside the main thread it does nothing, because Python allows no signal handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        problem.interrupt.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def penalised_s(result: RunResult, simulator: Simulator) -> float:
    """The step time; for an infeasible plan, plus a penalty beyond any feasible step time.

    The penalty grows with the bytes over the budget, so that a search moves back towards feasible
    plans.
    """
    if result.feasible:
        return result.step_s
    over = result.over_bytes / max(simulator.budget_bytes, 1)
    return result.step_s + simulator.worst_s * (1.0 + over)


@dataclass(slots=True)
class Best:
    """The best candidate seen so far.

    Attributes:
        simulator: the simulator that evaluates candidates.
        cost_s: penalised step time of the best candidate; infinite before the first.
        link_bytes: bytes that the best candidate moves. With equal step times, fewer are better.
        action: action of the best candidate, per swappable tensor.
        codec: codecs of the best candidate.
        prefetch: prefetch starts of the best candidate.
        evaluations: number of candidates evaluated.
    """

    simulator: Simulator
    cost_s: float = float("inf")
    link_bytes: int = 0
    action: NDArray[np.int8] | None = None
    codec: NDArray[np.int8] | None = None
    prefetch: NDArray[np.int32] | None = None
    evaluations: int = 0

    def consider(
        self, action: NDArray[np.int8], codec: NDArray[np.int8], prefetch: NDArray[np.int32]
    ) -> float:
        """Simulate a candidate and keep it if it is the best; return its penalised step time."""
        result = self.simulator.run(action, codec, prefetch)
        cost_s = penalised_s(result, self.simulator)
        self.evaluations += 1
        if (cost_s, result.link_bytes) < (self.cost_s, self.link_bytes):
            self.cost_s, self.link_bytes = cost_s, result.link_bytes
            self.action, self.codec, self.prefetch = action.copy(), codec.copy(), prefetch.copy()
        return cost_s
