"""The state of the simulator's inner loop: two flat arrays, and the positions of values in them.

``n`` holds integers (counts, bytes, indices). ``x`` holds seconds and speeds. The state is two
arrays instead of a record of many arrays for speed: Numba counts references to every array that a
compiled function reads from a record. This counting took ten times longer than the simulation.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cswap_kernels.jit import njit

# Status of a tensor. From OUT to DECODE an operator that reads it may have to wait. OUT: its raw
# bytes are still on the device. SENT: only its encoding is.
ABSENT, DEVICE, OUT, SENT, HOST, IN, DECODE, DROPPED, DEAD, TEMP = range(10)

# First entries of n: bytes and progress; running jobs; heads and tails of queues; the timeline.
MEM, PEAK, HELD, HELD_PEAK, LINK_BYTES, OP, RUNNING, ITEM, CHAIN, STARTED = range(10)
FETCHED, FLAWS, FIRST_OVER, JOBS, CODEC_JOB, DECODING, OUT_JOB, IN_JOB = range(10, 18)
ENC_HEAD, ENC_TAIL, DEC_HEAD, DEC_TAIL, OUT_HEAD, OUT_TAIL = range(18, 24)
SPANS, SAMPLES, COMPUTE_SPAN, CODEC_SPAN, OUT_SPAN, IN_SPAN = range(24, 30)
# Sizes and limits. HOST_BUDGET 0 means no limit. DRAIN 1: operators wait for all swap-outs; DRAIN
# 2: swap-ins wait for them, too. UNIFIED 1: host memory is device memory.
N_OPERATORS, N_TENSORS, N_POSITIONS, N_ROWS = range(30, 34)
BUDGET, HOST_BUDGET, START_BYTES, DRAIN, UNIFIED = range(34, 39)
# Indices into n at which the tables, the candidate and the state of each tensor begin. PEAKS:
# maximum of device bytes from the end of the previous operator to the operator's own end.
OPERATORS, TENSORS, POSITIONS, STATUS, USES, BEGUN, QUEUE, WORK = range(39, 47)
ACTION, CODEC, PREFETCH, ENCODED, PEAKS = range(47, 52)
# Indices into x at which the durations, the candidate's seconds and the timeline (N_ROWS rows)
# begin.
DURATIONS, SECONDS, SPANS_AT, SAMPLES_AT, N_SIZE = range(52, 57)

# First entries of x: clocks, speeds (1: full speed), byte seconds; exposed seconds by cause; rates.
NOW, COMPUTE_END, CODEC_END, OUT_END, IN_END, SPEED, LINK_SPEED, INTEGRAL = range(8)
SWAP_IN_S, SWAP_OUT_S, MEMORY_S, CODEC_S, RECOMPUTE_S, TAX, DUPLEX, X_SIZE = range(8, 16)

# Columns of the tables. NEED: bytes of outputs and workspace. INPUTS to LEAVING: index into n at
# which the operator's list begins; the list ends where the next operator's list begins. LEAVING and
# ORDER (by first backward use) hold positions, the others hold tensors.
NEED, WORKSPACE, INPUTS, OUTPUTS, DYING, LEAVING, OPERATOR_COLUMNS = range(7)
NBYTES, PRODUCER, POSITION, TENSOR_COLUMNS = range(4)
TENSOR, FORWARD, BACKWARD, ORDER, POSITION_COLUMNS = range(5)
ENCODE_S, DECODE_S, OUT_S, IN_S = range(4)

OVER_DEVICE, OVER_HOST, LOST_ANCESTOR, STUCK = 1, 2, 4, 8
RESOURCES: Final = ("compute", "recompute", "encode", "decode", "d2h", "h2d")
R_COMPUTE, R_RECOMPUTE, R_ENCODE, R_DECODE, R_OUT, R_IN = range(6)


@njit(cache=True, nogil=True, forceinline=True)
def operator(n, k, column):
    """An entry of the operators' table."""
    return n[n[OPERATORS] + OPERATOR_COLUMNS * k + column]


@njit(cache=True, nogil=True, forceinline=True)
def tensor(n, t, column):
    """An entry of the tensors' table."""
    return n[n[TENSORS] + TENSOR_COLUMNS * t + column]


@njit(cache=True, nogil=True, forceinline=True)
def position(n, p, column):
    """An entry of the swappable tensors' table."""
    return n[n[POSITIONS] + POSITION_COLUMNS * p + column]


@njit(cache=True, nogil=True, forceinline=True)
def take(n, nbytes):
    """Take device bytes; note an excess over the budget. Callers check for room."""
    n[MEM] += nbytes
    n[PEAK] = max(n[PEAK], n[MEM])
    if n[MEM] > n[BUDGET] and not n[FLAWS] & OVER_DEVICE:
        n[FLAWS] |= OVER_DEVICE
        n[FIRST_OVER] = n[OP]
    if n[OP] < n[N_OPERATORS]:
        at = n[PEAKS] + n[OP]
        n[at] = max(n[at], n[MEM])


@njit(cache=True, nogil=True, forceinline=True)
def open_span(n, x, slot, resource, index):
    """Begin a span of the timeline; ``n[slot]`` keeps its row for `close_span`."""
    row = n[SPANS]
    n[SPANS] += 1
    n[JOBS] += 1
    n[slot] = row
    if row < n[N_ROWS]:
        at = n[SPANS_AT] + 4 * row
        x[at], x[at + 1], x[at + 2] = resource, index, x[NOW]


@njit(cache=True, nogil=True, forceinline=True)
def close_span(n, x, slot):
    """End the span whose row is in ``n[slot]``."""
    if n[slot] < n[N_ROWS]:
        x[n[SPANS_AT] + 4 * n[slot] + 3] = x[NOW]


@njit(cache=True, nogil=True, forceinline=True)
def set_speed(n, x):
    """Set the speed of compute, lower while the codec runs; move the running operator's end."""
    speed = 1.0 if n[CODEC_JOB] < 0 else 1.0 - x[TAX]
    if speed != x[SPEED]:
        if n[RUNNING]:
            x[COMPUTE_END] = x[NOW] + (x[COMPUTE_END] - x[NOW]) * x[SPEED] / speed
        x[SPEED] = speed


@njit(cache=True, nogil=True, forceinline=True)
def set_link_speed(n, x):
    """Set the link's speed, lower while both directions are busy; move the copies' ends."""
    speed = x[DUPLEX] if n[OUT_JOB] >= 0 and n[IN_JOB] >= 0 else 1.0
    if speed != x[LINK_SPEED]:
        if x[OUT_END] < np.inf:
            x[OUT_END] = x[NOW] + (x[OUT_END] - x[NOW]) * x[LINK_SPEED] / speed
        if x[IN_END] < np.inf:
            x[IN_END] = x[NOW] + (x[IN_END] - x[NOW]) * x[LINK_SPEED] / speed
        x[LINK_SPEED] = speed
