"""Forward operators that run again because an operator reads a dropped tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cswap.plan.simulator.state import DEAD, DEVICE, DROPPED, LOST_ANCESTOR, TEMP
from cswap_kernels.uncounted import inlined

if TYPE_CHECKING:
    from cswap.plan.simulator.state import Tables


@inlined
def find_chain(s: Any, g: Tables, k: int) -> None:
    """Write the forward operators to run again before operator k to ``chain``, in order.

    The search goes depth-first from operator k to the makers of its missing inputs: producers, and
    operators that wrote to them in place.
    """
    # The search for operator k sets marks to k + 1. Marks of earlier searches differ from it, so
    # the column needs no clearing. An operator is pushed once: the stack cannot overflow.
    depth, lowest = 0, k
    current = k
    while True:
        for i in range(g.operators[current].inputs, g.operators[current + 1].inputs):
            tensor = g.tensors[g.lists[i]]
            if tensor.status != DROPPED and tensor.status != DEAD:
                continue
            maker = g.makers[i]
            if maker < 0:
                s.flaws |= LOST_ANCESTOR
                continue
            # A dead intermediate lives again until its last reader in the chain has run: count
            # the readers (`end_again` counts them down). Dropped tensors live until their last use.
            if tensor.status == DEAD:
                tensor.uses += 1
            if g.operators[maker].mark != k + 1:
                g.operators[maker].mark = k + 1
                lowest = min(lowest, maker)
                g.operators[depth].stack = maker
                depth += 1
        if depth == 0:
            break
        depth -= 1
        current = g.operators[depth].stack
    # Marked operators in ascending order: the order of execution.
    for maker in range(lowest, k):
        if g.operators[maker].mark == k + 1:
            g.operators[s.chained].chain = maker
            s.chained += 1


@inlined
def end_again(s: Any, g: Tables) -> None:
    """End a repeated forward operator: keep the outputs that are needed, free the others."""
    k = g.operators[s.repeated].chain
    operator, following = g.operators[k], g.operators[k + 1]
    s.device_bytes -= operator.workspace_bytes
    for i in range(operator.outputs, following.outputs):
        tensor = g.tensors[g.lists[i]]
        if tensor.status == DROPPED:
            tensor.status = DEVICE
        elif tensor.status == DEAD and tensor.uses > 0:
            tensor.status = TEMP
        else:
            s.device_bytes -= tensor.raw_bytes
    for i in range(operator.inputs, following.inputs):
        tensor = g.tensors[g.lists[i]]
        if tensor.status == TEMP:
            tensor.uses -= 1
            if tensor.uses == 0:
                tensor.status = DEAD
                s.device_bytes -= tensor.raw_bytes
    s.repeated += 1
