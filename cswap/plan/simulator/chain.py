"""Forward operators that run again because an operator reads a dropped tensor."""

from __future__ import annotations

from cswap.plan.simulator.state import (
    CHAIN,
    DEAD,
    DEVICE,
    DROPPED,
    FLAWS,
    INPUTS,
    ITEM,
    LOST_ANCESTOR,
    MEM,
    N_OPERATORS,
    NBYTES,
    OUTPUTS,
    PRODUCER,
    STATUS,
    TEMP,
    USES,
    WORK,
    WORKSPACE,
    operator,
    tensor,
)
from cswap_kernels.jit import njit


@njit(cache=True, nogil=True, forceinline=True)
def find_chain(n, x, k):
    """Write the forward operators to run again before operator k to ``work``, in order.

    ``work`` has three parts of n[N_OPERATORS] entries: the chain, the marks, and a stack. The
    search goes depth-first from operator k to the producers of its missing inputs.
    """
    # The search for operator k sets marks to k + 1. Marks of earlier searches differ from it, so
    # the array needs no clearing. An operator is pushed once: the stack cannot overflow.
    chain, mark = n[WORK], n[WORK] + n[N_OPERATORS]
    stack = mark + n[N_OPERATORS]
    depth, lowest = 0, k
    current = k
    while True:
        for i in range(operator(n, current, INPUTS), operator(n, current + 1, INPUTS)):
            t = n[i]
            if n[n[STATUS] + t] != DROPPED and n[n[STATUS] + t] != DEAD:
                continue
            maker = tensor(n, t, PRODUCER)
            if maker < 0:
                n[FLAWS] |= LOST_ANCESTOR
                continue
            # A dead intermediate lives again until its last reader in the chain has run: count
            # the readers (`end_again` counts them down). Dropped tensors live until their last use.
            if n[n[STATUS] + t] == DEAD:
                n[n[USES] + t] += 1
            if n[mark + maker] != k + 1:
                n[mark + maker] = k + 1
                lowest = min(lowest, maker)
                n[stack + depth] = maker
                depth += 1
        if depth == 0:
            break
        depth -= 1
        current = n[stack + depth]
    # Marked operators in ascending order: the order of execution.
    for maker in range(lowest, k):
        if n[mark + maker] == k + 1:
            n[chain + n[CHAIN]] = maker
            n[CHAIN] += 1


@njit(cache=True, nogil=True, forceinline=True)
def end_again(n, x):
    """End a repeated forward operator: keep the outputs that are needed, free the others."""
    k = n[n[WORK] + n[ITEM]]
    n[MEM] -= operator(n, k, WORKSPACE)
    for i in range(operator(n, k, OUTPUTS), operator(n, k + 1, OUTPUTS)):
        t = n[i]
        if n[n[STATUS] + t] == DROPPED:
            n[n[STATUS] + t] = DEVICE
        elif n[n[STATUS] + t] == DEAD and n[n[USES] + t] > 0:
            n[n[STATUS] + t] = TEMP
        else:
            n[MEM] -= tensor(n, t, NBYTES)
    for i in range(operator(n, k, INPUTS), operator(n, k + 1, INPUTS)):
        t = n[i]
        if n[n[STATUS] + t] == TEMP:
            n[n[USES] + t] -= 1
            if n[n[USES] + t] == 0:
                n[n[STATUS] + t] = DEAD
                n[MEM] -= tensor(n, t, NBYTES)
    n[ITEM] += 1
