"""The simulator's inner loop: discrete events over compute, codec, two link directions and memory.

`simulate.Simulator` builds the tables and documents their meaning; `replay` says the same slowly.

# Note [what a plan means]
Operators run in order. Operator k starts when k-1 has ended, its inputs are on the device and there
is room for its outputs and workspace. When f, the last forward user of a tensor, ends:

* swap: it joins the encode queue (raw: the D2H queue). An encode needs room for the encoded bytes;
  when it ends the raw bytes are free; when the copy ends, the encoded ones (raw: the tensor) are.
* recompute: it is free at once.

Swap-ins go in order of first backward use, none before operator p has started, and none may take
the room that a waiting operator needs; what a waiting operator reads goes first and as soon as
there is room for it. A swap-in needs room for the raw bytes, with a codec for the encoded ones too,
until it is decoded. Decodes go before encodes. While the codec runs, compute loses `tax` of its
speed; while both directions of the link are busy, each has `duplex` of its speed.

Before an operator that reads a dropped tensor runs, the forward operators that lead to it from what
is alive run again. Saved tensors that this brings back stay until their last use; other
intermediates go after their last use within the chain.

At one instant everything that ends comes first (compute, codec, D2H, H2D); then what can starts, in
the order codec, D2H, compute, H2D. If nothing runs and nothing can start, the first of these is let
over the budget, and the plan is infeasible: an encode, a swap-in that is waited for, the operator.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cswap.plan.state import (
    BUDGET,
    CHAIN,
    CODEC_END,
    CODEC_JOB,
    CODEC_SPAN,
    COMPUTE_END,
    COMPUTE_SPAN,
    DEAD,
    DEC_HEAD,
    DEC_TAIL,
    DECODE,
    DECODE_S,
    DECODING,
    DEVICE,
    DRAIN,
    DROPPED,
    DYING,
    ENC_HEAD,
    ENC_TAIL,
    ENCODE_S,
    FETCHED,
    FLAWS,
    HELD,
    HELD_PEAK,
    HOST,
    HOST_BUDGET,
    IN,
    IN_END,
    IN_JOB,
    IN_S,
    IN_SPAN,
    INPUTS,
    ITEM,
    LEAVING,
    LINK_BYTES,
    LINK_SPEED,
    LOST_ANCESTOR,
    MEM,
    NBYTES,
    NEED,
    NOW,
    OP,
    ORDER,
    OUT,
    OUT_END,
    OUT_HEAD,
    OUT_JOB,
    OUT_S,
    OUT_SPAN,
    OUT_TAIL,
    OUTPUTS,
    OVER_HOST,
    POSITION,
    PRODUCER,
    R_COMPUTE,
    R_DECODE,
    R_ENCODE,
    R_IN,
    R_OUT,
    R_RECOMPUTE,
    RUNNING,
    SPEED,
    STARTED,
    TEMP,
    TENSOR,
    WORKSPACE,
    close_span,
    open_span,
    set_link_speed,
    set_speed,
    take,
)


@njit(cache=True, nogil=True, forceinline=True)
def _find_chain(tables, state, k):
    """Forward operators to run again before operator k, into ``work[0, :n[CHAIN]]``, in order."""
    n, status = state.n, state.status
    chain, mark, stack = state.work[0], state.work[1], state.work[2]
    depth, lowest = 0, k
    current = k
    while True:
        for i in range(tables.operators[current, INPUTS], tables.operators[current + 1, INPUTS]):
            t = tables.index[i]
            if status[t] != DROPPED and status[t] != DEAD:
                continue
            maker = tables.tensors[t, PRODUCER]
            if maker < 0:
                n[FLAWS] |= LOST_ANCESTOR
                continue
            if status[t] == DEAD:
                state.uses[t] += 1
            if mark[maker] != k + 1:
                mark[maker] = k + 1
                lowest = min(lowest, maker)
                stack[depth] = maker
                depth += 1
        if depth == 0:
            break
        depth -= 1
        current = stack[depth]
    for maker in range(lowest, k):
        if mark[maker] == k + 1:
            chain[n[CHAIN]] = maker
            n[CHAIN] += 1


@njit(cache=True, nogil=True, forceinline=True)
def end_operator(tables, state, choice):
    """Operator OP has ended: what dies goes, what leaves is queued, the next chain is found."""
    n, status = state.n, state.status
    k = n[OP]
    row, after = tables.operators[k], tables.operators[k + 1]
    n[MEM] -= row[WORKSPACE]
    for i in range(row[OUTPUTS], after[OUTPUTS]):
        status[tables.index[i]] = DEVICE
    for i in range(row[DYING], after[DYING]):
        t = tables.index[i]
        if status[t] == DEVICE:
            n[MEM] -= tables.tensors[t, NBYTES]
        status[t] = DEAD
    for i in range(row[LEAVING], after[LEAVING]):
        p = tables.index[i]
        t = tables.positions[p, TENSOR]
        if choice.action[p] == 1:
            status[t] = OUT
            lane, tail = (2, OUT_TAIL) if choice.codec[p] == 0 else (0, ENC_TAIL)
            state.queue[lane, n[tail]] = p
            n[tail] += 1
        elif choice.action[p] == 2:
            status[t] = DROPPED
            n[MEM] -= tables.tensors[t, NBYTES]
    n[OP] = k + 1
    n[ITEM] = n[CHAIN] = 0
    if k + 1 < tables.duration_s.size:
        _find_chain(tables, state, k + 1)
        take(tables, state, 0)


@njit(cache=True, nogil=True, forceinline=True)
def end_again(tables, state):
    """A forward operator has run again: keep what is needed of it, drop the rest."""
    n, status = state.n, state.status
    k = state.work[0, n[ITEM]]
    row, after = tables.operators[k], tables.operators[k + 1]
    n[MEM] -= row[WORKSPACE]
    for i in range(row[OUTPUTS], after[OUTPUTS]):
        t = tables.index[i]
        if status[t] == DROPPED:
            status[t] = DEVICE
        elif status[t] == DEAD and state.uses[t] > 0:
            status[t] = TEMP
        else:
            n[MEM] -= tables.tensors[t, NBYTES]
    for i in range(row[INPUTS], after[INPUTS]):
        t = tables.index[i]
        if status[t] == TEMP:
            state.uses[t] -= 1
            if state.uses[t] == 0:
                status[t] = DEAD
                n[MEM] -= tables.tensors[t, NBYTES]
    n[ITEM] += 1


@njit(cache=True, nogil=True, forceinline=True)
def end_codec(tables, state, choice):
    """An encode or a decode has ended."""
    n = state.n
    p = n[CODEC_JOB]
    close_span(state, CODEC_SPAN)
    n[CODEC_JOB] = -1
    state.x[CODEC_END] = np.inf
    if n[DECODING]:
        n[MEM] -= tables.encoded[p, choice.codec[p]]
        state.status[tables.positions[p, TENSOR]] = DEVICE
    else:
        n[MEM] -= tables.tensors[tables.positions[p, TENSOR], NBYTES]
        state.queue[2, n[OUT_TAIL]] = p
        n[OUT_TAIL] += 1
    set_speed(tables, state)


@njit(cache=True, nogil=True, forceinline=True)
def end_link(tables, state, choice, out):
    """A copy has ended; ``out``: D2H."""
    n = state.n
    p = n[OUT_JOB] if out else n[IN_JOB]
    t = tables.positions[p, TENSOR]
    encoded = tables.encoded[p, choice.codec[p]]
    n[LINK_BYTES] += encoded
    if out:
        close_span(state, OUT_SPAN)
        n[OUT_JOB], state.x[OUT_END] = -1, np.inf
        n[MEM] -= encoded
        state.status[t] = HOST
    else:
        close_span(state, IN_SPAN)
        n[IN_JOB], state.x[IN_END] = -1, np.inf
        n[HELD] -= encoded
        state.status[t] = DEVICE
        if choice.codec[p]:
            state.status[t] = DECODE
            state.queue[1, n[DEC_TAIL]] = p
            n[DEC_TAIL] += 1
    set_link_speed(tables, state)


@njit(cache=True, nogil=True, forceinline=True)
def start_codec(tables, state, choice, force):
    """The next decode, else the next encode, if there is room for it."""
    n, x = state.n, state.x
    if n[CODEC_JOB] >= 0:
        return
    if n[DEC_HEAD] < n[DEC_TAIL]:
        p = state.queue[1, n[DEC_HEAD]]
        n[DEC_HEAD] += 1
        n[DECODING] = 1
    elif n[ENC_HEAD] < n[ENC_TAIL]:
        p = state.queue[0, n[ENC_HEAD]]
        encoded = tables.encoded[p, choice.codec[p]]
        if n[MEM] + encoded > tables.limits[BUDGET] and not force:
            return
        n[ENC_HEAD] += 1
        n[DECODING] = 0
        take(tables, state, encoded)
    else:
        return
    open_span(state, CODEC_SPAN, R_DECODE if n[DECODING] else R_ENCODE, p)
    n[CODEC_JOB] = p
    which = DECODE_S if n[DECODING] else ENCODE_S
    x[CODEC_END] = x[NOW] + tables.seconds[p, choice.codec[p], which]
    set_speed(tables, state)


@njit(cache=True, nogil=True, forceinline=True)
def start_out(tables, state, choice):
    """The next D2H copy."""
    n, x = state.n, state.x
    if n[OUT_JOB] >= 0 or n[OUT_HEAD] == n[OUT_TAIL]:
        return
    p = state.queue[2, n[OUT_HEAD]]
    n[OUT_HEAD] += 1
    n[OUT_JOB] = p
    n[HELD] += tables.encoded[p, choice.codec[p]]
    n[HELD_PEAK] = max(n[HELD_PEAK], n[HELD])
    if tables.limits[HOST_BUDGET] and n[HELD] > tables.limits[HOST_BUDGET]:
        n[FLAWS] |= OVER_HOST
    open_span(state, OUT_SPAN, R_OUT, p)
    set_link_speed(tables, state)
    x[OUT_END] = x[NOW] + tables.seconds[p, choice.codec[p], OUT_S] / x[LINK_SPEED]


@njit(cache=True, nogil=True, forceinline=True)
def _leaving(state):
    """Whether a swap-out is queued or under way."""
    n = state.n
    encoding = n[ENC_HEAD] < n[ENC_TAIL] or (n[CODEC_JOB] >= 0 and not n[DECODING])
    return encoding or n[OUT_JOB] >= 0 or n[OUT_HEAD] < n[OUT_TAIL]


@njit(cache=True, nogil=True, forceinline=True)
def start_compute(tables, state, force):
    """The next operator, if its inputs are there and there is room for it."""
    n, x = state.n, state.x
    if n[RUNNING] or (tables.limits[DRAIN] and _leaving(state)):
        return
    again = n[ITEM] < n[CHAIN]
    k = state.work[0, n[ITEM]] if again else n[OP]
    for i in range(tables.operators[k, INPUTS], tables.operators[k + 1, INPUTS]):
        if OUT <= state.status[tables.index[i]] <= DECODE:
            return
    need = tables.operators[k, NEED]
    if n[MEM] + need > tables.limits[BUDGET] and not force:
        return
    take(tables, state, need)
    n[RUNNING] = 2 if again else 1
    if not again:
        n[STARTED] = k
    open_span(state, COMPUTE_SPAN, R_RECOMPUTE if again else R_COMPUTE, k)
    x[COMPUTE_END] = x[NOW] + tables.duration_s[k] / x[SPEED]


@njit(cache=True, nogil=True, forceinline=True)
def _next_in(tables, state, choice, force):
    """Position whose swap-in starts now, or -1."""
    n, status, limit = state.n, state.status, tables.limits[BUDGET]
    reserve = 0
    if not n[RUNNING]:
        k = state.work[0, n[ITEM]] if n[ITEM] < n[CHAIN] else n[OP]
        reserve = tables.operators[k, NEED]
        for i in range(tables.operators[k, INPUTS], tables.operators[k + 1, INPUTS]):
            t = tables.index[i]
            if status[t] == HOST:
                p = tables.tensors[t, POSITION]
                room = n[MEM] + _in_bytes(tables, choice, p) <= limit
                return p if room or force else -1
    while n[FETCHED] < choice.action.size:
        p = tables.positions[n[FETCHED], ORDER]
        if choice.action[p] == 1 and not state.fetched[p]:
            due = choice.prefetch[p] <= n[STARTED]
            if not due or status[tables.positions[p, TENSOR]] != HOST:
                return -1
            room = n[MEM] + reserve + _in_bytes(tables, choice, p) <= limit
            return p if room else -1
        n[FETCHED] += 1
    return -1


@njit(cache=True, nogil=True, forceinline=True)
def _in_bytes(tables, choice, p):
    staging = tables.encoded[p, choice.codec[p]] if choice.codec[p] else 0
    return tables.tensors[tables.positions[p, TENSOR], NBYTES] + staging


@njit(cache=True, nogil=True, forceinline=True)
def start_in(tables, state, choice, force):
    """The next H2D copy, if one may start."""
    n, x = state.n, state.x
    if n[IN_JOB] >= 0:
        return
    p = _next_in(tables, state, choice, force)
    if p < 0:
        return
    state.fetched[p] = 1
    take(tables, state, _in_bytes(tables, choice, p))
    state.status[tables.positions[p, TENSOR]] = IN
    n[IN_JOB] = p
    open_span(state, IN_SPAN, R_IN, p)
    set_link_speed(tables, state)
    x[IN_END] = x[NOW] + tables.seconds[p, choice.codec[p], IN_S] / x[LINK_SPEED]
