"""Shared by the three forms of vDNN: the choice of tensors, and the starts of their swap-ins.

Source: Rhu et al., vDNN, MICRO 2016, section III. Our readings: the inputs X of convolution and
pooling layers move, because ACTV layers work in place in the paper. A model without such layers
moves the inputs of its linear and attention layers. The choice of convolution algorithms is not
modelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.plan.simulate import SWAP
from cswap.plan.simulator.lifetimes import lifetimes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.simulate import Simulator
    from cswap.schema.plan import Plan
    from cswap.schema.trace import Trace

CONV: Final = frozenset({"conv"})
FEATURES: Final = frozenset({"conv", "pool"})
OTHERS: Final = frozenset({"linear", "attention"})


def inputs_of(trace: Trace, kinds: Iterable[str]) -> NDArray[np.bool_]:
    """[n] by position: whether a forward operator of one of these kinds reads the tensor."""
    life, wanted = lifetimes(trace), set(kinds)
    found = [
        any(
            trace.operators[u].kind in wanted
            for u in life.users[t]
            if trace.operators[u].phase == "forward"
        )
        for t in life.swappable
    ]
    return np.array(found, np.bool_)


def feature_inputs(trace: Trace) -> NDArray[np.bool_]:
    """[n] by position: whether ``vdnn-all`` moves the tensor."""
    return inputs_of(trace, features_of(trace))


def features_of(trace: Trace) -> frozenset[str]:
    """The kinds of layers whose inputs ``vdnn-all`` moves."""
    present = {operator.kind for operator in trace.operators}
    return FEATURES if present & FEATURES else OTHERS


def offload(problem: Problem, moved: NDArray[np.bool_], policy: str) -> Plan:
    """The plan that offloads these positions raw, with vDNN's prefetching."""
    simulator = problem.simulator
    action = np.where(moved, SWAP, 0).astype(np.int8)
    raw = np.zeros_like(action)
    return simulator.to_plan(action, raw, prefetch_points(simulator, moved), policy)


def prefetch_points(simulator: Simulator, moved: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[n] operator at whose start each swap-in begins (findPrefetchLayer, section III-C).

    When the backward of a layer starts, vDNN searches the next layer in backward order that still
    needs its X, up to the next convolution. The swap-in of this X starts then. Tensors that no
    layer prefetches come on demand.
    """
    operators = simulator.trace.operators
    points = simulator.backward.astype(np.int32).copy()
    needed: dict[int, list[int]] = {}
    for position in np.flatnonzero(moved):
        needed.setdefault(int(simulator.backward[position]), []).append(int(position))
    backward = [i for i, o in enumerate(operators) if o.phase == "backward"]
    for k, start in enumerate(backward):
        for later in backward[k + 1 :]:
            waiting = needed.pop(later, None)
            if waiting is not None:
                points[waiting] = start
                break
            if operators[later].kind == "conv":
                break
    return points
