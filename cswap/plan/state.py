"""What the simulator's inner loop works on: tables, one candidate, and where a run stands."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit

# What has become of a tensor. From OUT to DECODE it is not on the device, and may be waited for.
ABSENT, DEVICE, OUT, HOST, IN, DECODE, DROPPED, DEAD, TEMP = range(9)

# Columns of Tables.operators, .tensors and .positions; ranges are [column, same column of row + 1).
NEED, WORKSPACE, INPUTS, OUTPUTS, DYING, LEAVING = range(6)
NBYTES, PRODUCER, POSITION = range(3)
TENSOR, FORWARD, BACKWARD, ORDER = range(4)
# Last axis of Tables.seconds, and the entries of Tables.limits.
ENCODE_S, DECODE_S, OUT_S, IN_S = range(4)
BUDGET, HOST_BUDGET, START_BYTES, DRAIN = range(4)

# Entries of State.n: bytes and progress; the two lanes of work; queues and spans.
MEM, PEAK, HELD, HELD_PEAK, LINK_BYTES, OP, RUNNING, ITEM, CHAIN, STARTED = range(10)
FETCHED, FLAWS, FIRST_OVER, JOBS, CODEC_JOB, DECODING, OUT_JOB, IN_JOB = range(10, 18)
ENC_HEAD, ENC_TAIL, DEC_HEAD, DEC_TAIL, OUT_HEAD, OUT_TAIL = range(18, 24)
SPANS, SAMPLES, COMPUTE_SPAN, CODEC_SPAN, OUT_SPAN, IN_SPAN, N_SIZE = range(24, 31)
# Entries of State.x: clocks, speeds (1: full), byte seconds; seconds exposed, by cause.
NOW, COMPUTE_END, CODEC_END, OUT_END, IN_END, SPEED, LINK_SPEED, INTEGRAL = range(8)
SWAP_IN_S, SWAP_OUT_S, MEMORY_S, CODEC_S, RECOMPUTE_S, X_SIZE = range(8, 14)

OVER_DEVICE, OVER_HOST, LOST_ANCESTOR, STUCK = 1, 2, 4, 8
RESOURCES: Final = ("compute", "recompute", "encode", "decode", "d2h", "h2d")
R_COMPUTE, R_RECOMPUTE, R_ENCODE, R_DECODE, R_OUT, R_IN = range(6)


class Tables(NamedTuple):
    """What all candidates share.

    Attributes:
        duration_s: [m] of operators.
        operators: [m + 1, 6] i64 columns NEED (bytes of outputs and workspace) ... LEAVING.
        index: i64 tensors (for LEAVING: positions) that the ranges in ``operators`` point to.
        tensors: [T, 3] i64.
        positions: [n, 4] i64; column ORDER lists positions by first backward use.
        encoded: [n, codecs] i64 bytes.
        seconds: [n, codecs, 4] f64.
        tax: share of its speed that compute loses to the codec.
        duplex: share of its speed that each direction keeps while both are busy.
        limits: [4] i64; a HOST_BUDGET of 0 is none; DRAIN: operators wait for all swap-outs.
    """

    duration_s: Any
    operators: Any
    index: Any
    tensors: Any
    positions: Any
    encoded: Any
    seconds: Any
    tax: float
    duplex: float
    limits: Any


class Choice(NamedTuple):
    """One candidate: [n] action, codec index, operator from whose start on it may come back."""

    action: Any
    codec: Any
    prefetch: Any


class State(NamedTuple):
    """Where a run stands.

    Attributes:
        n: i64 counters. x: f64 clocks.
        status: [T]. uses: [T] uses left of what a chain made.
        queue: [3, n] positions to encode, to decode, to copy out. fetched: [n] swap-in has begun.
        work: [3, m] operators of the chain, marks, stack.
        spans: [., 4] resource, index, start, end. samples: [., 3] time, device, host bytes.
        op_peak: [m] most device bytes from the end of the operator before to its own end; or empty.
    """

    n: Any
    x: Any
    status: Any
    uses: Any
    queue: Any
    fetched: Any
    work: Any
    spans: Any
    samples: Any
    op_peak: Any


@njit(cache=True, nogil=True, forceinline=True)
def take(tables, state, nbytes):
    """Hold device bytes; over budget is noted, not prevented: callers check for room."""
    n = state.n
    n[MEM] += nbytes
    n[PEAK] = max(n[PEAK], n[MEM])
    if n[MEM] > tables.limits[BUDGET] and not n[FLAWS] & OVER_DEVICE:
        n[FLAWS] |= OVER_DEVICE
        n[FIRST_OVER] = n[OP]
    if state.op_peak.size and n[OP] < state.op_peak.size:
        state.op_peak[n[OP]] = max(state.op_peak[n[OP]], n[MEM])


@njit(cache=True, nogil=True, forceinline=True)
def open_span(state, slot, resource, index):
    """Begin a span of the timeline; its row is kept in ``n[slot]`` for whoever ends it."""
    row = state.n[SPANS]
    state.n[SPANS] += 1
    state.n[JOBS] += 1
    state.n[slot] = row
    if row < state.spans.shape[0]:
        state.spans[row, 0] = resource
        state.spans[row, 1] = index
        state.spans[row, 2] = state.x[NOW]


@njit(cache=True, nogil=True, forceinline=True)
def close_span(state, slot):
    """End the span that ``n[slot]`` names."""
    if state.n[slot] < state.spans.shape[0]:
        state.spans[state.n[slot], 3] = state.x[NOW]


@njit(cache=True, nogil=True, forceinline=True)
def set_speed(tables, state):
    """Compute's speed follows from whether the codec runs; the work left is stretched."""
    n, x = state.n, state.x
    speed = 1.0 if n[CODEC_JOB] < 0 else 1.0 - tables.tax
    if speed != x[SPEED]:
        if n[RUNNING]:
            x[COMPUTE_END] = x[NOW] + (x[COMPUTE_END] - x[NOW]) * x[SPEED] / speed
        x[SPEED] = speed


@njit(cache=True, nogil=True, forceinline=True)
def set_link_speed(tables, state):
    """The link's speed follows from whether both directions are busy."""
    n, x = state.n, state.x
    speed = tables.duplex if n[OUT_JOB] >= 0 and n[IN_JOB] >= 0 else 1.0
    if speed != x[LINK_SPEED]:
        if x[OUT_END] < np.inf:
            x[OUT_END] = x[NOW] + (x[OUT_END] - x[NOW]) * x[LINK_SPEED] / speed
        if x[IN_END] < np.inf:
            x[IN_END] = x[NOW] + (x[IN_END] - x[NOW]) * x[LINK_SPEED] / speed
        x[LINK_SPEED] = speed
