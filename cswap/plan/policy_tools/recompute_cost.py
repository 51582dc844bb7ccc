"""The cost of recomputing a tensor, computed without a simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.simulator.lifetimes import chain, lifetimes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.simulate import Simulator


def chain_s(simulator: Simulator) -> NDArray[np.float64]:
    """[n] seconds of the forward operators that lead from live tensors to each position.

    The estimate assumes that all saved tensors are kept. It is infinite for tensors that the
    simulator cannot recompute.
    """
    trace, life = simulator.trace, lifetimes(simulator.trace)
    seconds = np.full(len(simulator.swappable), np.inf)
    for position, tensor in enumerate(simulator.swappable):
        if simulator.recomputable[position]:
            operators = chain(trace, life, tensor) or ()
            seconds[position] = sum(trace.operators[k].duration_s for k in operators)
    return seconds
