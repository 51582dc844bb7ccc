"""The simulator's events: compute, codec, two link directions and memory.

`state` defines the fields of ``s`` and the tables of ``g``. `tests/plan/exact_simulator.py`
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

Where host memory is the device's own (``unified``), encodings stay in device memory until they have
been decoded, copies take no time and move no bytes, and a raw swap keeps the tensor.

A tensor on its way out stays if the operator that runs next reads it while its raw bytes are still
on the device, as in the engine. Queued jobs of the tensor are dropped. A job that has begun goes on
to its end, and its result is thrown away: no copy follows an encode, and a raw copy frees nothing
on the device. In runs without time (``drain``), operators and swap-ins
wait for all swap-outs, and every tensor leaves.

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

from typing import TYPE_CHECKING, Any

import numpy as np

from cswap.plan.simulator.chain import find_chain
from cswap.plan.simulator.state import (
    DEAD,
    DECODE,
    DEVICE,
    DROPPED,
    HOST,
    OUT,
    OVER_HOST,
    SENT,
    next_operator,
    set_link_speed,
    set_speed,
    take,
)
from cswap_kernels.uncounted import inlined

if TYPE_CHECKING:
    from cswap.plan.simulator.state import Tables


@inlined
def end_operator(s: Any, g: Tables) -> None:
    """End the step's operator: free dead tensors, queue or drop leaving ones, find a chain."""
    operator, following = g.operators[s.operator], g.operators[s.operator + 1]
    s.device_bytes -= operator.workspace_bytes
    for i in range(operator.outputs, following.outputs):
        g.tensors[g.lists[i]].status = DEVICE
    for i in range(operator.dying, following.dying):
        tensor = g.tensors[g.lists[i]]
        if tensor.status == DEVICE:
            s.device_bytes -= tensor.raw_bytes
        tensor.status = DEAD
    for i in range(operator.leaving, following.leaving):
        _leave(s, g, g.lists[i])
    s.operator += 1
    s.repeated = s.chained = 0
    if s.operator < len(g.operators) - 1:
        find_chain(s, g, s.operator)
        take(s, g, 0)


@inlined
def _leave(s: Any, g: Tables, p: int) -> None:
    """Let the decision on a position take effect."""
    position = g.positions[p]
    tensor = g.tensors[position.tensor]
    if position.action == 1:
        tensor.status = OUT
        if position.codec == 0:
            _queue_out(s, g, p)
        else:
            g.positions[s.encodes_queued].encodes = p
            s.encodes_queued += 1
    elif position.action == 2:
        tensor.status = DROPPED
        s.device_bytes -= tensor.raw_bytes


@inlined
def _queue_out(s: Any, g: Tables, p: int) -> None:
    g.positions[s.outs_queued].outs = p
    s.outs_queued += 1


@inlined
def end_codec(s: Any, g: Tables) -> None:
    """End an encode or a decode."""
    p = s.codec_job
    position = g.positions[p]
    tensor = g.tensors[position.tensor]
    s.codec_job, s.codec_end_s = -1, np.inf
    if s.decoding:
        s.device_bytes -= position.encoded_bytes
        tensor.status = DEVICE
    elif tensor.status == OUT:
        s.device_bytes -= tensor.raw_bytes
        tensor.status = SENT
        _queue_out(s, g, p)
    else:  # it has stayed
        s.device_bytes -= position.encoded_bytes
    set_speed(s)


@inlined
def end_out(s: Any, g: Tables) -> None:
    """End a D2H copy."""
    position = g.positions[s.out_job]
    tensor = g.tensors[position.tensor]
    s.out_job, s.out_end_s = -1, np.inf
    moved = 0 if s.unified else position.encoded_bytes
    s.link_bytes += moved
    if OUT <= tensor.status <= SENT:
        s.device_bytes -= moved
        tensor.status = HOST
    else:  # it has stayed
        s.host_bytes -= position.encoded_bytes
    set_link_speed(s)


@inlined
def stay(s: Any, g: Tables) -> None:
    """Keep the tensors that the operator that runs next reads and whose raw bytes are here."""
    if s.running or s.drain:
        return
    k = next_operator(s, g)
    for i in range(g.operators[k].inputs, g.operators[k + 1].inputs):
        tensor = g.tensors[g.lists[i]]
        if tensor.status == OUT:
            tensor.status = DEVICE
            g.positions[tensor.position].fetched = 1


@inlined
def _stayed(g: Tables, p: int) -> bool:
    """Whether a position in a queue of swap-outs leaves no more."""
    return not OUT <= g.tensors[g.positions[p].tensor].status <= SENT


@inlined
def start_codec(s: Any, g: Tables, force: bool) -> None:
    """Start the next decode, else the next encode if there is room for it."""
    if s.codec_job >= 0:
        return
    while s.encodes_begun < s.encodes_queued and _stayed(g, g.positions[s.encodes_begun].encodes):
        s.encodes_begun += 1
    if s.decodes_begun < s.decodes_queued:
        p = g.positions[s.decodes_begun].decodes
        s.decodes_begun += 1
        s.decoding = 1
    elif s.encodes_begun < s.encodes_queued:
        p = g.positions[s.encodes_begun].encodes
        encoded_bytes = g.positions[p].encoded_bytes
        if s.device_bytes + encoded_bytes > s.budget_bytes and not force:
            return
        s.encodes_begun += 1
        s.decoding = 0
        take(s, g, encoded_bytes)
    else:
        return
    s.codec_job = p
    position = g.positions[p]
    s.codec_end_s = s.now_s + (position.decode_s if s.decoding else position.encode_s)
    set_speed(s)


@inlined
def start_out(s: Any, g: Tables) -> None:
    """Start the next D2H copy."""
    if s.out_job >= 0:
        return
    while s.outs_begun < s.outs_queued and _stayed(g, g.positions[s.outs_begun].outs):
        s.outs_begun += 1
    if s.outs_begun == s.outs_queued:
        return
    p = g.positions[s.outs_begun].outs
    s.outs_begun += 1
    s.out_job = p
    s.host_bytes += g.positions[p].encoded_bytes
    s.host_peak_bytes = max(s.host_peak_bytes, s.host_bytes)
    if s.host_budget_bytes and s.host_bytes > s.host_budget_bytes:
        s.flaws |= OVER_HOST
    set_link_speed(s)
    s.out_end_s = s.now_s + g.positions[p].out_s / s.link_speed


@inlined
def leaving(s: Any) -> bool:
    """Whether a swap-out is queued or in progress."""
    encoding = s.encodes_begun < s.encodes_queued or (s.codec_job >= 0 and not s.decoding)
    return encoding or s.out_job >= 0 or s.outs_begun < s.outs_queued


@inlined
def start_compute(s: Any, g: Tables, force: bool) -> None:
    """Start the next operator if its inputs are on the device and there is room for it."""
    if s.running or (s.drain and leaving(s)):
        return
    k = next_operator(s, g)
    for i in range(g.operators[k].inputs, g.operators[k + 1].inputs):
        status = g.tensors[g.lists[i]].status
        if OUT <= status <= DECODE:
            return
    need_bytes = g.operators[k].need_bytes
    if s.device_bytes + need_bytes > s.budget_bytes and not force:
        return
    take(s, g, need_bytes)
    if s.repeated < s.chained:
        s.running = 2
    else:
        s.running = 1
        s.started = k
    s.compute_end_s = s.now_s + g.operators[k].duration_s / s.speed
