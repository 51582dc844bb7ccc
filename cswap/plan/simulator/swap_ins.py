"""Swap-ins: which one starts next, and their ends. `events` says when they may start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cswap.plan.simulator.events import leaving
from cswap.plan.simulator.state import (
    DECODE,
    DEVICE,
    HOST,
    IN,
    OUT,
    next_operator,
    set_link_speed,
    take,
)
from cswap_kernels.uncounted import inlined

if TYPE_CHECKING:
    from cswap.plan.simulator.state import Tables


@inlined
def start_in(s: Any, g: Tables, force: bool) -> None:
    """Start the next H2D copy if one may start."""
    if s.in_job >= 0 or (s.drain and leaving(s)):
        return
    p = _next_in(s, g, force)
    if p < 0:
        return
    position = g.positions[p]
    position.fetched = 1
    take(s, g, in_bytes(s, g, p))
    g.tensors[position.tensor].status = IN
    s.in_job = p
    set_link_speed(s)
    s.in_end_s = s.now_s + position.in_s / s.link_speed


@inlined
def _next_in(s: Any, g: Tables, force: bool) -> int:
    """The position whose swap-in starts now, or -1."""
    reserve_bytes = 0
    if not s.running:
        k = next_operator(s, g)
        p = _wanted_in(s, g, k)
        if p >= 0:
            room = s.device_bytes + in_bytes(s, g, p) <= s.budget_bytes
            return p if room or force else -1
        reserve_bytes = g.operators[k].need_bytes
    for i in range(s.fetched, len(g.positions)):
        p = g.positions[i].order
        position = g.positions[p]
        if position.action != 1 or position.fetched:
            s.fetched += i == s.fetched
            continue
        if position.prefetch > s.started:
            return -1
        status = g.tensors[position.tensor].status
        if status == OUT and not s.drain:
            continue
        room = s.device_bytes + reserve_bytes + in_bytes(s, g, p) <= s.budget_bytes
        return p if room and status == HOST else -1
    return -1


@inlined
def _wanted_in(s: Any, g: Tables, k: int) -> int:
    """The position of the first input of operator k that is on the host, or -1."""
    for i in range(g.operators[k].inputs, g.operators[k + 1].inputs):
        tensor = g.tensors[g.lists[i]]
        if tensor.status == HOST:
            p: int = tensor.position
            return p
    return -1


@inlined
def in_bytes(s: Any, g: Tables, p: int) -> int:
    """Device bytes that a swap-in takes: raw, and encoded until they are decoded."""
    position = g.positions[p]
    taken_bytes: int = g.tensors[position.tensor].raw_bytes
    if position.codec and not s.unified:
        taken_bytes += position.encoded_bytes
    return taken_bytes


@inlined
def end_in(s: Any, g: Tables) -> None:
    """End an H2D copy."""
    p = s.in_job
    position = g.positions[p]
    tensor = g.tensors[position.tensor]
    s.in_job, s.in_end_s = -1, np.inf
    s.link_bytes += 0 if s.unified else position.encoded_bytes
    s.host_bytes -= position.encoded_bytes
    tensor.status = DEVICE
    if position.codec:
        tensor.status = DECODE
        g.positions[s.decodes_queued].decodes = p
        s.decodes_queued += 1
    set_link_speed(s)
