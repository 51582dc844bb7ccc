"""The simulator's main loop: from one end to the next."""

from __future__ import annotations

import numpy as np
from numba import njit

from cswap.plan.events import (
    end_again,
    end_codec,
    end_link,
    end_operator,
    start_codec,
    start_compute,
    start_in,
    start_out,
)
from cswap.plan.state import (
    BACKWARD,
    BUDGET,
    CHAIN,
    CODEC_END,
    CODEC_JOB,
    CODEC_S,
    COMPUTE_END,
    COMPUTE_SPAN,
    DECODE,
    DEVICE,
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
    NBYTES,
    NOW,
    OP,
    ORDER,
    OUT,
    OUT_END,
    OUT_JOB,
    PRODUCER,
    RECOMPUTE_S,
    RUNNING,
    SAMPLES,
    SPEED,
    START_BYTES,
    STARTED,
    STUCK,
    SWAP_IN_S,
    SWAP_OUT_S,
    TENSOR,
    Choice,
    State,
    close_span,
    take,
)

_SNAP = 1e-12  # relative: ends that differ by rounding only are one instant


@njit(cache=True, nogil=True, forceinline=True)
def _start_all(tables, state, choice):
    start_codec(tables, state, choice, False)
    start_out(tables, state, choice)
    start_compute(tables, state, False)
    start_in(tables, state, choice, False)


@njit(cache=True, nogil=True, forceinline=True)
def _idle(state):
    n = state.n
    return not n[RUNNING] and n[CODEC_JOB] < 0 and n[OUT_JOB] < 0 and n[IN_JOB] < 0


@njit(cache=True, nogil=True, forceinline=True)
def _force(tables, state, choice):
    """Nothing can go on within the budget: let one thing over it."""
    start_codec(tables, state, choice, True)
    if _idle(state):
        start_in(tables, state, choice, True)
    if _idle(state):
        start_compute(tables, state, True)


@njit(cache=True, nogil=True, forceinline=True)
def _cause(tables, state):
    """Entry of State.x that waiting seconds go to: what the next operator waits for."""
    n = state.n
    k = state.work[0, n[ITEM]] if n[ITEM] < n[CHAIN] else n[OP]
    for i in range(tables.operators[k, INPUTS], tables.operators[k + 1, INPUTS]):
        status = state.status[tables.index[i]]
        if status == OUT:
            return SWAP_OUT_S
        if status == HOST:  # not copied: another copy is under way, or there is no room
            return SWAP_IN_S if n[IN_JOB] >= 0 else MEMORY_S
        if status == IN:
            return SWAP_IN_S
        if status == DECODE:
            return CODEC_S
    if n[OUT_JOB] >= 0:
        return SWAP_OUT_S
    return CODEC_S if n[CODEC_JOB] >= 0 else MEMORY_S


@njit(cache=True, nogil=True, forceinline=True)
def _advance(tables, state):
    """To the next end of anything; seconds and bytes are accounted on the way."""
    n, x = state.n, state.x
    if n[SAMPLES] < state.samples.shape[0]:
        row = state.samples[n[SAMPLES]]
        row[0], row[1], row[2] = x[NOW], n[MEM], n[HELD]
    n[SAMPLES] += 1
    end = min(x[COMPUTE_END], x[CODEC_END], x[OUT_END], x[IN_END])
    passed = max(end - x[NOW], 0.0)
    x[INTEGRAL] += passed * n[MEM]
    if not n[RUNNING]:
        x[_cause(tables, state)] += passed
    else:
        x[CODEC_S] += passed * (1.0 - x[SPEED])
        if n[RUNNING] == 2:
            x[RECOMPUTE_S] += passed * x[SPEED]
    x[NOW] = max(end, x[NOW])


@njit(cache=True, nogil=True, forceinline=True)
def _end_all(tables, state, choice):
    n, x = state.n, state.x
    until = x[NOW] * (1.0 + _SNAP)
    if x[COMPUTE_END] <= until:
        close_span(state, COMPUTE_SPAN)
        again = n[RUNNING] == 2
        n[RUNNING], x[COMPUTE_END] = 0, np.inf
        if again:
            end_again(tables, state)
        else:
            end_operator(tables, state, choice)
    if x[CODEC_END] <= until:
        end_codec(tables, state, choice)
    if x[OUT_END] <= until:
        end_link(tables, state, choice, True)
    if x[IN_END] <= until:
        end_link(tables, state, choice, False)


@njit(cache=True, nogil=True)
def run(tables, action, codec, prefetch, n, x, spans, samples, op_peak):
    """Simulate one step; ``n`` and ``x``, all zeros, take the outcome (see `state`)."""
    count = action.size
    starts = np.empty(count, np.int64)
    for p in range(count):
        first, last = tables.positions[p, FORWARD] + 1, tables.positions[p, BACKWARD]
        starts[p] = min(max(prefetch[p], first), last)
    choice = Choice(action, codec, starts)
    size = tables.tensors.shape[0]
    work = np.zeros((3, tables.duration_s.size), np.int64)
    queue, fetched = np.empty((3, count), np.int64), np.zeros(count, np.int8)
    status, uses = np.zeros(size, np.int8), np.zeros(size, np.int64)
    state = State(n, x, status, uses, queue, fetched, work, spans, samples, op_peak)
    for t in range(size):
        if tables.tensors[t, PRODUCER] < 0:
            status[t] = DEVICE
    n[CODEC_JOB] = n[OUT_JOB] = n[IN_JOB] = n[STARTED] = n[FIRST_OVER] = -1
    x[COMPUTE_END] = x[CODEC_END] = x[OUT_END] = x[IN_END] = np.inf
    x[SPEED] = x[LINK_SPEED] = 1.0
    take(tables, state, tables.limits[START_BYTES])
    while n[OP] < tables.duration_s.size:
        _start_all(tables, state, choice)
        if _idle(state):
            _force(tables, state, choice)
            if _idle(state):
                n[FLAWS] |= STUCK
                break
        _advance(tables, state)
        _end_all(tables, state, choice)


@njit(cache=True, nogil=True)
def earliest(tables, action, codec, floor):
    """[n] earliest starts of swap-ins, in order of first backward uses, that memory allows.

    ``floor``: [m] bytes held at each operator without prefetching; what is prefetched is added.
    """
    starts = np.empty(action.size, np.int32)
    before = 0
    for i in range(action.size):
        p = tables.positions[i, ORDER]
        nbytes = tables.tensors[tables.positions[p, TENSOR], NBYTES]
        staging = tables.encoded[p, codec[p]] if codec[p] else 0
        start = tables.positions[p, BACKWARD]
        if action[p] == 1:
            first = max(before, tables.positions[p, FORWARD] + 1)
            limit = tables.limits[BUDGET] - nbytes - staging
            while start > first and floor[start - 1] <= limit:
                start -= 1
                floor[start] += nbytes
            before = start
        starts[p] = start
    return starts
