"""The simulator's events: compute, codec, two link directions and memory.

`state` defines the positions of all values in ``n`` and ``x``. `cswap.testing.exact_simulator`
implements the same rules slowly, in plain Python.

Note [the meaning of a plan]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Operators run in order. Operator k starts when operator k-1 has ended, its inputs are on the device,
and there is room for its outputs and workspace. When the last forward user f of a tensor ends, the
tensor's decision takes effect:

* swap: the tensor joins the encode queue (with raw, the D2H queue). An encode needs room for the
  encoded bytes. The raw bytes become free when the encode ends. The encoded bytes become free when
  the copy ends (with raw, the tensor's bytes do).
* recompute: the tensor's bytes become free at once.

Where host memory is the device's own (`UNIFIED`), encodings stay in device memory until they have
been decoded, copies take no time and move no bytes, and a raw swap keeps the tensor.

A tensor on its way out stays if the operator that runs next reads it while its raw bytes are still
on the device, as in the engine. Queued jobs of the tensor are dropped. A job that has begun goes on
to its end, and its result is thrown away: no copy follows an encode, and a raw copy frees nothing
on the device. If operators wait for swap-outs (`DRAIN`), every tensor leaves.

Swap-ins run in the order of first backward uses. A swap-in does not start before its operator p has
started, and it may not take the room that a waiting operator needs. A tensor whose raw bytes have
not left yet does not hold up the swap-ins that follow. A swap-in that a waiting operator reads goes
first, as soon as there is room for it. A swap-in needs room for the raw bytes.
With a codec it also needs room for the encoded bytes until the copy has ended and the tensor is
decoded. Decodes go before encodes. While the codec runs, compute loses the share `tax` of its
speed. While both directions of the link are busy, each has the share `duplex` of its speed.

An operator may read a dropped tensor. Before it runs, the forward operators that lead from live
tensors to the dropped one run again. Saved tensors that these operators restore stay until their
last use. Other intermediates are freed after their last use within the chain.

At one instant all ends come first (compute, codec, D2H, H2D). Then all possible starts follow, in
the order codec, D2H, compute, H2D. If nothing runs and nothing can start, one job may exceed the
budget, and the plan is infeasible. The job is the first possible one of: an encode, a swap-in that
an operator waits for, the operator.
"""

from __future__ import annotations

import numpy as np

from cswap.plan.simulator.chain import find_chain
from cswap.plan.simulator.state import (
    ACTION,
    BEGUN,
    BUDGET,
    CHAIN,
    CODEC,
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
    DURATIONS,
    DYING,
    ENC_HEAD,
    ENC_TAIL,
    ENCODE_S,
    ENCODED,
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
    MEM,
    N_OPERATORS,
    N_POSITIONS,
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
    PREFETCH,
    QUEUE,
    R_COMPUTE,
    R_DECODE,
    R_ENCODE,
    R_IN,
    R_OUT,
    R_RECOMPUTE,
    RUNNING,
    SECONDS,
    SENT,
    SPEED,
    STARTED,
    STATUS,
    TENSOR,
    UNIFIED,
    WORK,
    WORKSPACE,
    close_span,
    open_span,
    operator,
    position,
    set_link_speed,
    set_speed,
    take,
    tensor,
)
from cswap_kernels.jit import njit


@njit(cache=True, nogil=True, forceinline=True)
def end_operator(n, x):
    """End operator OP: free dead tensors, queue or drop leaving ones, find the next chain."""
    k = n[OP]
    n[MEM] -= operator(n, k, WORKSPACE)
    for i in range(operator(n, k, OUTPUTS), operator(n, k + 1, OUTPUTS)):
        n[n[STATUS] + n[i]] = DEVICE
    for i in range(operator(n, k, DYING), operator(n, k + 1, DYING)):
        t = n[i]
        if n[n[STATUS] + t] == DEVICE:
            n[MEM] -= tensor(n, t, NBYTES)
        n[n[STATUS] + t] = DEAD
    for i in range(operator(n, k, LEAVING), operator(n, k + 1, LEAVING)):
        p = n[i]
        t = position(n, p, TENSOR)
        if n[n[ACTION] + p] == 1:
            n[n[STATUS] + t] = OUT
            lane, tail = (2, OUT_TAIL) if n[n[CODEC] + p] == 0 else (0, ENC_TAIL)
            n[n[QUEUE] + lane * n[N_POSITIONS] + n[tail]] = p
            n[tail] += 1
        elif n[n[ACTION] + p] == 2:
            n[n[STATUS] + t] = DROPPED
            n[MEM] -= tensor(n, t, NBYTES)
    n[OP] = k + 1
    n[ITEM] = n[CHAIN] = 0
    if k + 1 < n[N_OPERATORS]:
        find_chain(n, x, k + 1)
        take(n, 0)


@njit(cache=True, nogil=True, forceinline=True)
def end_codec(n, x):
    """End an encode or a decode."""
    p = n[CODEC_JOB]
    t = position(n, p, TENSOR)
    close_span(n, x, CODEC_SPAN)
    n[CODEC_JOB] = -1
    x[CODEC_END] = np.inf
    if n[DECODING]:
        n[MEM] -= n[n[ENCODED] + p]
        n[n[STATUS] + t] = DEVICE
    elif n[n[STATUS] + t] == OUT:
        n[MEM] -= tensor(n, t, NBYTES)
        n[n[STATUS] + t] = SENT
        n[n[QUEUE] + 2 * n[N_POSITIONS] + n[OUT_TAIL]] = p
        n[OUT_TAIL] += 1
    else:  # it has stayed
        n[MEM] -= n[n[ENCODED] + p]
    set_speed(n, x)


@njit(cache=True, nogil=True, forceinline=True)
def end_link(n, x, out):
    """End a copy; ``out``: D2H, else H2D."""
    p = n[OUT_JOB] if out else n[IN_JOB]
    t = position(n, p, TENSOR)
    encoded = n[n[ENCODED] + p]
    n[LINK_BYTES] += 0 if n[UNIFIED] else encoded
    if out:
        close_span(n, x, OUT_SPAN)
        n[OUT_JOB], x[OUT_END] = -1, np.inf
        if OUT <= n[n[STATUS] + t] <= SENT:
            n[MEM] -= 0 if n[UNIFIED] else encoded
            n[n[STATUS] + t] = HOST
        else:  # it has stayed
            n[HELD] -= encoded
    else:
        close_span(n, x, IN_SPAN)
        n[IN_JOB], x[IN_END] = -1, np.inf
        n[HELD] -= encoded
        n[n[STATUS] + t] = DEVICE
        if n[n[CODEC] + p]:
            n[n[STATUS] + t] = DECODE
            n[n[QUEUE] + n[N_POSITIONS] + n[DEC_TAIL]] = p
            n[DEC_TAIL] += 1
    set_link_speed(n, x)


@njit(cache=True, nogil=True, forceinline=True)
def stay(n):
    """Keep the tensors that the operator that runs next reads and whose raw bytes are here."""
    if n[RUNNING] or n[DRAIN]:
        return
    k = n[n[WORK] + n[ITEM]] if n[ITEM] < n[CHAIN] else n[OP]
    for i in range(operator(n, k, INPUTS), operator(n, k + 1, INPUTS)):
        if n[n[STATUS] + n[i]] == OUT:
            n[n[STATUS] + n[i]] = DEVICE
            n[n[BEGUN] + tensor(n, n[i], POSITION)] = 1


@njit(cache=True, nogil=True, forceinline=True)
def _stayed(n, p):
    """Whether a position in a queue of swap-outs leaves no more."""
    return not OUT <= n[n[STATUS] + position(n, p, TENSOR)] <= SENT


@njit(cache=True, nogil=True, forceinline=True)
def start_codec(n, x, force):
    """Start the next decode, else the next encode if there is room for it."""
    if n[CODEC_JOB] >= 0:
        return
    while n[ENC_HEAD] < n[ENC_TAIL] and _stayed(n, n[n[QUEUE] + n[ENC_HEAD]]):
        n[ENC_HEAD] += 1
    if n[DEC_HEAD] < n[DEC_TAIL]:
        p = n[n[QUEUE] + n[N_POSITIONS] + n[DEC_HEAD]]
        n[DEC_HEAD] += 1
        n[DECODING] = 1
    elif n[ENC_HEAD] < n[ENC_TAIL]:
        p = n[n[QUEUE] + n[ENC_HEAD]]
        encoded = n[n[ENCODED] + p]
        if n[MEM] + encoded > n[BUDGET] and not force:
            return
        n[ENC_HEAD] += 1
        n[DECODING] = 0
        take(n, encoded)
    else:
        return
    open_span(n, x, CODEC_SPAN, R_DECODE if n[DECODING] else R_ENCODE, p)
    n[CODEC_JOB] = p
    which = DECODE_S if n[DECODING] else ENCODE_S
    x[CODEC_END] = x[NOW] + x[n[SECONDS] + 4 * p + which]
    set_speed(n, x)


@njit(cache=True, nogil=True, forceinline=True)
def start_out(n, x):
    """Start the next D2H copy."""
    if n[OUT_JOB] >= 0:
        return
    queue = n[QUEUE] + 2 * n[N_POSITIONS]
    while n[OUT_HEAD] < n[OUT_TAIL] and _stayed(n, n[queue + n[OUT_HEAD]]):
        n[OUT_HEAD] += 1
    if n[OUT_HEAD] == n[OUT_TAIL]:
        return
    p = n[queue + n[OUT_HEAD]]
    n[OUT_HEAD] += 1
    n[OUT_JOB] = p
    n[HELD] += n[n[ENCODED] + p]
    n[HELD_PEAK] = max(n[HELD_PEAK], n[HELD])
    if n[HOST_BUDGET] and n[HELD] > n[HOST_BUDGET]:
        n[FLAWS] |= OVER_HOST
    open_span(n, x, OUT_SPAN, R_OUT, p)
    set_link_speed(n, x)
    x[OUT_END] = x[NOW] + x[n[SECONDS] + 4 * p + OUT_S] / x[LINK_SPEED]


@njit(cache=True, nogil=True, forceinline=True)
def _leaving(n):
    """Whether a swap-out is queued or in progress."""
    encoding = n[ENC_HEAD] < n[ENC_TAIL] or (n[CODEC_JOB] >= 0 and not n[DECODING])
    return encoding or n[OUT_JOB] >= 0 or n[OUT_HEAD] < n[OUT_TAIL]


@njit(cache=True, nogil=True, forceinline=True)
def start_compute(n, x, force):
    """Start the next operator if its inputs are on the device and there is room for it."""
    if n[RUNNING] or (n[DRAIN] and _leaving(n)):
        return
    again = n[ITEM] < n[CHAIN]
    k = n[n[WORK] + n[ITEM]] if again else n[OP]
    for i in range(operator(n, k, INPUTS), operator(n, k + 1, INPUTS)):
        if OUT <= n[n[STATUS] + n[i]] <= DECODE:
            return
    need = operator(n, k, NEED)
    if n[MEM] + need > n[BUDGET] and not force:
        return
    take(n, need)
    n[RUNNING] = 2 if again else 1
    if not again:
        n[STARTED] = k
    open_span(n, x, COMPUTE_SPAN, R_RECOMPUTE if again else R_COMPUTE, k)
    x[COMPUTE_END] = x[NOW] + x[n[DURATIONS] + k] / x[SPEED]


@njit(cache=True, nogil=True, forceinline=True)
def _next_in(n, x, force):
    """The position whose swap-in starts now, or -1."""
    limit = n[BUDGET]
    reserve = 0
    if not n[RUNNING]:
        k = n[n[WORK] + n[ITEM]] if n[ITEM] < n[CHAIN] else n[OP]
        reserve = operator(n, k, NEED)
        for i in range(operator(n, k, INPUTS), operator(n, k + 1, INPUTS)):
            t = n[i]
            if n[n[STATUS] + t] == HOST:
                p = tensor(n, t, POSITION)
                room = n[MEM] + _in_bytes(n, p) <= limit
                return p if room or force else -1
    for i in range(n[FETCHED], n[N_POSITIONS]):
        p = position(n, i, ORDER)
        if n[n[ACTION] + p] != 1 or n[n[BEGUN] + p]:
            n[FETCHED] += i == n[FETCHED]
            continue
        if n[n[PREFETCH] + p] > n[STARTED]:
            return -1
        status = n[n[STATUS] + position(n, p, TENSOR)]
        if status == OUT and not n[DRAIN]:
            continue
        room = n[MEM] + reserve + _in_bytes(n, p) <= limit
        return p if room and status == HOST else -1
    return -1


@njit(cache=True, nogil=True, forceinline=True)
def _in_bytes(n, p):
    staging = n[n[ENCODED] + p] if n[n[CODEC] + p] and not n[UNIFIED] else 0
    return tensor(n, position(n, p, TENSOR), NBYTES) + staging


@njit(cache=True, nogil=True, forceinline=True)
def start_in(n, x, force):
    """Start the next H2D copy if one may start."""
    if n[IN_JOB] >= 0 or (n[DRAIN] == 2 and _leaving(n)):
        return
    p = _next_in(n, x, force)
    if p < 0:
        return
    n[n[BEGUN] + p] = 1
    take(n, _in_bytes(n, p))
    n[n[STATUS] + position(n, p, TENSOR)] = IN
    n[IN_JOB] = p
    open_span(n, x, IN_SPAN, R_IN, p)
    set_link_speed(n, x)
    x[IN_END] = x[NOW] + x[n[SECONDS] + 4 * p + IN_S] / x[LINK_SPEED]
