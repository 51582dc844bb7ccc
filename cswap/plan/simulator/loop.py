"""The simulator's main loop: it advances from the end of one job to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cswap.plan.simulator.chain import end_again
from cswap.plan.simulator.events import (
    end_codec,
    end_operator,
    end_out,
    start_codec,
    start_compute,
    start_out,
    stay,
)
from cswap.plan.simulator.state import (
    DECODE,
    DEVICE,
    HOST,
    IN,
    OUT,
    SENT,
    STUCK,
    Tables,
    next_operator,
    take,
)
from cswap.plan.simulator.swap_ins import end_in, in_bytes, start_in
from cswap_kernels.jit import njit
from cswap_kernels.uncounted import inlined, uncounted

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SNAP = 1e-12  # relative: ends that differ only by rounding are one instant

_SWAP_IN, _SWAP_OUT, _MEMORY, _CODEC = range(4)


@inlined
def _start_all(s: Any, g: Tables) -> None:
    stay(s, g)
    start_codec(s, g, False)
    start_out(s, g)
    start_compute(s, g, False)
    start_in(s, g, False)


@inlined
def _idle(s: Any) -> bool:
    return not s.running and s.codec_job < 0 and s.out_job < 0 and s.in_job < 0


@inlined
def _force(s: Any, g: Tables) -> None:
    """Start one job over the budget, because no job can start within it."""
    start_codec(s, g, True)
    if _idle(s):
        start_in(s, g, True)
    if _idle(s):
        start_compute(s, g, True)


@inlined
def _cause(s: Any, g: Tables) -> int:
    """The cause for which the next operator waits."""
    k = next_operator(s, g)
    for i in range(g.operators[k].inputs, g.operators[k + 1].inputs):
        status = g.tensors[g.lists[i]].status
        if OUT <= status <= SENT:
            return _SWAP_OUT
        if status == HOST:  # not copied yet: another copy is in progress, or there is no room
            return _SWAP_IN if s.in_job >= 0 else _MEMORY
        if status == IN:
            return _SWAP_IN
        if status == DECODE:
            return _CODEC
    if s.out_job >= 0:
        return _SWAP_OUT
    return _CODEC if s.codec_job >= 0 else _MEMORY


@inlined
def _account(s: Any, g: Tables, passed_s: float) -> None:
    """Add seconds that pass to the exposed seconds of their cause."""
    if s.running:
        s.codec_s += passed_s * (1.0 - s.speed)
        if s.running == 2:
            s.recompute_s += passed_s * s.speed
        return
    cause = _cause(s, g)
    if cause == _SWAP_IN:
        s.swap_in_s += passed_s
    elif cause == _SWAP_OUT:
        s.swap_out_s += passed_s
    elif cause == _MEMORY:
        s.memory_s += passed_s
    else:
        s.codec_s += passed_s


@inlined
def _advance(s: Any, g: Tables) -> None:
    """Advance the clock to the next end of a job, and account seconds and bytes."""
    end_s = min(s.compute_end_s, s.codec_end_s, s.out_end_s, s.in_end_s)
    passed_s = max(end_s - s.now_s, 0.0)
    s.byte_seconds += passed_s * s.device_bytes
    _account(s, g, passed_s)
    s.now_s = max(end_s, s.now_s)


@inlined
def _end_all(s: Any, g: Tables) -> None:
    until_s = s.now_s * (1.0 + _SNAP)
    if s.compute_end_s <= until_s:
        again = s.running == 2
        s.running, s.compute_end_s = 0, np.inf
        if again:
            end_again(s, g)
        else:
            end_operator(s, g)
    if s.codec_end_s <= until_s:
        end_codec(s, g)
    if s.out_end_s <= until_s:
        end_out(s, g)
    if s.in_end_s <= until_s:
        end_in(s, g)


@inlined
def _chosen(
    s: Any,
    tables: Tables,
    action: NDArray[np.int8],
    codec: NDArray[np.int8],
    prefetch: NDArray[np.int32],
    encoded: NDArray[np.int64],
    seconds: NDArray[np.float64],
) -> Tables:
    """Copies of the tables, with the candidate."""
    positions = tables.positions.copy()
    for p in range(len(positions)):
        position = positions[p]
        idle = s.unified and action[p] == 1 and codec[p] == 0
        position.action = 0 if idle else action[p]
        position.codec = codec[p]
        position.prefetch = min(max(prefetch[p], position.forward + 1), position.backward)
        position.encoded_bytes = encoded[p, codec[p]]
        position.encode_s = seconds[p, codec[p], 0]
        position.decode_s = seconds[p, codec[p], 1]
        position.out_s = seconds[p, codec[p], 2]
        position.in_s = seconds[p, codec[p], 3]
    return Tables(
        tables.operators.copy(),
        tables.tensors.copy(),
        positions,
        tables.lists,
        tables.makers,
        tables.peaks,
    )


@inlined
def _begin(s: Any, g: Tables) -> None:
    for t in range(len(g.tensors)):
        if g.tensors[t].producer < 0:
            g.tensors[t].status = DEVICE
    s.codec_job = s.out_job = s.in_job = s.started = s.first_over = -1
    s.compute_end_s = s.codec_end_s = s.out_end_s = s.in_end_s = np.inf
    s.speed = s.link_speed = 1.0
    take(s, g, s.start_bytes)


@inlined
def _loop(s: Any, g: Tables) -> None:
    """Simulate the step."""
    g = uncounted(g)  # see Note [uncounted arrays]
    _begin(s, g)
    while s.operator < len(g.operators) - 1:
        _start_all(s, g)
        if _idle(s):
            _force(s, g)
            if _idle(s):
                s.flaws |= STUCK
                break
        _advance(s, g)
        _end_all(s, g)


@njit(cache=True, nogil=True)
def run(
    template: NDArray[np.void],
    tables: Tables,
    action: NDArray[np.int8],
    codec: NDArray[np.int8],
    prefetch: NDArray[np.int32],
    encoded: NDArray[np.int64],
    seconds: NDArray[np.float64],
) -> NDArray[np.void]:
    """Simulate one step of a candidate; return its record, an array of one row.

    Args:
        template: [1] the record before the step.
        tables: only the rows of peaks are written.
        action: [n] of the candidate.
        codec: [n] of the candidate.
        prefetch: [n] of the candidate.
        encoded: as in `tables.Template`.
        seconds: as in `tables.Template`.
    """
    step = template.copy()
    g = _chosen(step[0], tables, action, codec, prefetch, encoded, seconds)
    _loop(step[0], g)
    return step


@njit(cache=True, nogil=True)
def earliest(
    template: NDArray[np.void],
    tables: Tables,
    action: NDArray[np.int8],
    codec: NDArray[np.int8],
    prefetch: NDArray[np.int32],
    encoded: NDArray[np.int64],
    seconds: NDArray[np.float64],
) -> NDArray[np.int32]:
    """[n] earliest starts of swap-ins that memory allows, in the order of first backward uses.

    The arguments are those of `run`. ``tables.peaks`` holds the bytes at each operator without
    prefetching. Each prefetch adds its bytes.
    """
    s = template[0]
    g = _chosen(s, tables, action, codec, prefetch, encoded, seconds)
    starts = np.empty(len(g.positions), np.int32)
    before = 0
    for i in range(len(starts)):
        p = g.positions[i].order
        position = g.positions[p]
        start = position.backward
        if position.action == 1:
            first = max(before, position.forward + 1)
            limit_bytes = s.budget_bytes - in_bytes(s, g, p)
            while start > first and g.peaks[start - 1] <= limit_bytes:
                start -= 1
                g.peaks[start] += g.tensors[position.tensor].raw_bytes
            before = start
        starts[p] = start
    return starts
