"""The simulator's main loop: it advances from the end of one job to the next."""

from __future__ import annotations

import numpy as np

from cswap.plan.simulator.chain import end_again
from cswap.plan.simulator.events import (
    end_codec,
    end_link,
    end_operator,
    start_codec,
    start_compute,
    start_in,
    start_out,
    stay,
)
from cswap.plan.simulator.state import (
    ACTION,
    BACKWARD,
    BUDGET,
    CHAIN,
    CODEC,
    CODEC_END,
    CODEC_JOB,
    CODEC_S,
    COMPUTE_END,
    COMPUTE_SPAN,
    DECODE,
    DEVICE,
    ENCODED,
    FIRST_OVER,
    FLAWS,
    FORWARD,
    HELD,
    HOST,
    IN,
    IN_END,
    IN_JOB,
    INPUTS,
    INTEGRAL,
    ITEM,
    LINK_SPEED,
    MEM,
    MEMORY_S,
    N_OPERATORS,
    N_POSITIONS,
    N_ROWS,
    N_TENSORS,
    NBYTES,
    NOW,
    OP,
    ORDER,
    OUT,
    OUT_END,
    OUT_JOB,
    PEAKS,
    PREFETCH,
    PRODUCER,
    RECOMPUTE_S,
    RUNNING,
    SAMPLES,
    SAMPLES_AT,
    SECONDS,
    SENT,
    SPEED,
    START_BYTES,
    STARTED,
    STATUS,
    STUCK,
    SWAP_IN_S,
    SWAP_OUT_S,
    TENSOR,
    UNIFIED,
    WORK,
    close_span,
    operator,
    position,
    take,
    tensor,
)
from cswap_kernels.jit import njit

_SNAP = 1e-12  # relative: ends that differ only by rounding are one instant


@njit(cache=True, nogil=True, forceinline=True)
def _start_all(n, x):
    stay(n)
    start_codec(n, x, False)
    start_out(n, x)
    start_compute(n, x, False)
    start_in(n, x, False)


@njit(cache=True, nogil=True, forceinline=True)
def _idle(n):
    return not n[RUNNING] and n[CODEC_JOB] < 0 and n[OUT_JOB] < 0 and n[IN_JOB] < 0


@njit(cache=True, nogil=True, forceinline=True)
def _force(n, x):
    """Start one job over the budget, because no job can start within it."""
    start_codec(n, x, True)
    if _idle(n):
        start_in(n, x, True)
    if _idle(n):
        start_compute(n, x, True)


@njit(cache=True, nogil=True, forceinline=True)
def _cause(n, x):
    """Index into x of the cause for which the next operator waits."""
    k = n[n[WORK] + n[ITEM]] if n[ITEM] < n[CHAIN] else n[OP]
    for i in range(operator(n, k, INPUTS), operator(n, k + 1, INPUTS)):
        status = n[n[STATUS] + n[i]]
        if OUT <= status <= SENT:
            return SWAP_OUT_S
        if status == HOST:  # not copied yet: another copy is in progress, or there is no room
            return SWAP_IN_S if n[IN_JOB] >= 0 else MEMORY_S
        if status == IN:
            return SWAP_IN_S
        if status == DECODE:
            return CODEC_S
    if n[OUT_JOB] >= 0:
        return SWAP_OUT_S
    return CODEC_S if n[CODEC_JOB] >= 0 else MEMORY_S


@njit(cache=True, nogil=True, forceinline=True)
def _advance(n, x):
    """Advance the clock to the next end of a job, and account seconds and bytes."""
    if n[SAMPLES] < n[N_ROWS]:
        at = n[SAMPLES_AT] + 3 * n[SAMPLES]
        x[at], x[at + 1], x[at + 2] = x[NOW], n[MEM], n[HELD]
    n[SAMPLES] += 1
    end = min(x[COMPUTE_END], x[CODEC_END], x[OUT_END], x[IN_END])
    passed = max(end - x[NOW], 0.0)
    x[INTEGRAL] += passed * n[MEM]
    if not n[RUNNING]:
        x[_cause(n, x)] += passed
    else:
        x[CODEC_S] += passed * (1.0 - x[SPEED])
        if n[RUNNING] == 2:
            x[RECOMPUTE_S] += passed * x[SPEED]
    x[NOW] = max(end, x[NOW])


@njit(cache=True, nogil=True, forceinline=True)
def _end_all(n, x):
    until = x[NOW] * (1.0 + _SNAP)
    if x[COMPUTE_END] <= until:
        close_span(n, x, COMPUTE_SPAN)
        again = n[RUNNING] == 2
        n[RUNNING], x[COMPUTE_END] = 0, np.inf
        if again:
            end_again(n, x)
        else:
            end_operator(n, x)
    if x[CODEC_END] <= until:
        end_codec(n, x)
    if x[OUT_END] <= until:
        end_link(n, x, True)
    if x[IN_END] <= until:
        end_link(n, x, False)


@njit(cache=True, nogil=True)
def choose(n, x, action, codec, prefetch, encoded, seconds):
    """Enter a candidate: [n] action, codec, prefetch, and the chosen codecs' bytes and seconds."""
    for p in range(action.size):
        first, last = position(n, p, FORWARD) + 1, position(n, p, BACKWARD)
        idle = n[UNIFIED] and action[p] == 1 and codec[p] == 0
        n[n[ACTION] + p] = 0 if idle else action[p]
        n[n[CODEC] + p] = codec[p]
        n[n[PREFETCH] + p] = min(max(prefetch[p], first), last)
        n[n[ENCODED] + p] = encoded[p, codec[p]]
        for i in range(4):
            x[n[SECONDS] + 4 * p + i] = seconds[p, codec[p], i]


@njit(cache=True, nogil=True)
def run(n, x):
    """Simulate one step of the candidate in ``n`` and ``x``, which also hold the result."""
    for t in range(n[N_TENSORS]):
        if tensor(n, t, PRODUCER) < 0:
            n[n[STATUS] + t] = DEVICE
    n[CODEC_JOB] = n[OUT_JOB] = n[IN_JOB] = n[STARTED] = n[FIRST_OVER] = -1
    x[COMPUTE_END] = x[CODEC_END] = x[OUT_END] = x[IN_END] = np.inf
    x[SPEED] = x[LINK_SPEED] = 1.0
    take(n, n[START_BYTES])
    while n[OP] < n[N_OPERATORS]:
        _start_all(n, x)
        if _idle(n):
            _force(n, x)
            if _idle(n):
                n[FLAWS] |= STUCK
                break
        _advance(n, x)
        _end_all(n, x)


@njit(cache=True, nogil=True)
def earliest(n):
    """[n] earliest starts of swap-ins that memory allows, in the order of first backward uses.

    PEAKS in ``n``: bytes held at each operator without prefetching. Each prefetch adds its bytes.
    """
    starts = np.empty(n[N_POSITIONS], np.int32)
    before = 0
    for i in range(starts.size):
        p = position(n, i, ORDER)
        nbytes = tensor(n, position(n, p, TENSOR), NBYTES)
        staging = n[n[ENCODED] + p] if n[n[CODEC] + p] and not n[UNIFIED] else 0
        start = position(n, p, BACKWARD)
        if n[n[ACTION] + p] == 1:
            first = max(before, position(n, p, FORWARD) + 1)
            limit = n[BUDGET] - nbytes - staging
            while start > first and n[n[PEAKS] + start - 1] <= limit:
                start -= 1
                n[n[PEAKS] + start] += nbytes
            before = start
        starts[p] = start
    return starts
