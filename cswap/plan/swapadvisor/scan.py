"""The compiled pass over a schedule; the docstring of `swaps` explains the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cswap_kernels.jit import njit
from cswap_kernels.uncounted import inlined, uncounted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    _Indices = NDArray[np.int64]

UNMADE, HERE, AWAY, DEAD = 0, 1, 2, 3
"""State of a tensor. UNMADE: not yet produced. HERE: on the device. AWAY: on the host. DEAD:
freed."""

COMPUTE, OUT, IN = 0, 1, 2


class Tables(NamedTuple):
    """The fields of `Graph`, documented there, and the fields of a chromosome."""

    seconds: NDArray[np.float64]
    in_at: NDArray[np.int64]
    in_items: NDArray[np.int64]
    out_at: NDArray[np.int64]
    out_items: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    n_uses: NDArray[np.int64]
    n_forward: NDArray[np.int64]
    leaves: NDArray[np.bool_]
    d2h_s: NDArray[np.float64]
    h2d_s: NDArray[np.float64]
    cls: NDArray[np.int64]  # [t] class
    first: NDArray[np.int64]  # [classes + 1] each class's first object
    object_bytes: NDArray[np.int64]  # [classes]


class State(NamedTuple):
    """The values that change during a pass."""

    where: NDArray[np.int8]  # [t]
    place: NDArray[np.int64]  # [t] its object, or -1
    touched: NDArray[np.int64]  # [t] times made or read
    read: NDArray[np.int64]  # [t] times read
    end_s: NDArray[np.float64]  # [t] when its last operator ended
    host_s: NDArray[np.float64]  # [t] when it is on the host
    user: NDArray[np.int64]  # [t] place in the schedule of its last operator
    left: NDArray[np.bool_]  # [t]
    held: NDArray[np.int64]  # [objects] tensor, or -1
    free_s: NDArray[np.float64]  # [objects] when it became free
    queue: NDArray[np.int64]  # [objects] free objects, a ring per class
    head: NDArray[np.int64]  # [classes]
    n_free: NDArray[np.int64]  # [classes]
    clock: NDArray[np.float64]  # COMPUTE, OUT, IN: when each stream is free
    totals: NDArray[np.int64]  # overflow and copied bytes


@njit(cache=True, nogil=True)
def scan(g: Tables, s: State, order: _Indices) -> None:
    """Plan and time the swaps of a schedule; the state holds the result."""
    g, s = uncounted(g), uncounted(s)  # see Note [uncounted arrays]
    at, places = _users(g, order)
    _begin(g, s, at, places)
    for i in range(len(order)):
        k = order[i]
        for j in range(g.in_at[k], g.in_at[k + 1]):
            s.user[g.in_items[j]] = i
        ready_s = s.clock[COMPUTE]
        for j in range(g.in_at[k], g.in_at[k + 1]):
            if s.where[g.in_items[j]] == AWAY:
                ready_s = max(ready_s, _bring(g, s, g.in_items[j], i, at, places))
        for j in range(g.out_at[k], g.out_at[k + 1]):
            t = g.out_items[j]
            s.user[t] = i
            ready_s = max(ready_s, _take(g, s, t, i, at, places))
            s.where[t] = HERE
        s.clock[COMPUTE] = ready_s + g.seconds[k]
        _end(g, s, k)


@inlined
def _users(g: Tables, order: _Indices) -> tuple[_Indices, _Indices]:
    """Positions of each tensor's readers in the schedule, ascending: begins of rows, and rows."""
    # Plain loops: numpy's cumsum and slices would take seconds to compile.
    at = np.zeros(len(g.n_uses) + 1, np.int64)
    filled = np.zeros(len(g.n_uses), np.int64)
    for t in range(len(g.n_uses)):
        at[t + 1] = at[t] + g.n_uses[t]
    places = np.empty(at[len(g.n_uses)], np.int64)
    for i in range(len(order)):
        k = order[i]
        for j in range(g.in_at[k], g.in_at[k + 1]):
            t = g.in_items[j]
            places[at[t] + filled[t]] = i
            filled[t] += 1
    return at, places


@inlined
def _begin(g: Tables, s: State, at: _Indices, places: _Indices) -> None:
    """Place the tensors that exist when the step starts: its inputs."""
    made = np.zeros(len(g.nbytes), np.bool_)
    for j in range(len(g.out_items)):
        made[g.out_items[j]] = True
    before = np.int64(-1)  # int64 like all places: `_take` is compiled only once
    for t in range(len(made)):
        if not made[t]:
            _take(g, s, t, before, at, places)
            s.where[t] = HERE


@inlined
def _take(g: Tables, s: State, t: int, i: int, at: _Indices, places: _Indices) -> float:
    """Take an object for a tensor; return the time at which the object is free."""
    c = g.cls[t]
    if s.n_free[c] > 0:
        count = g.first[c + 1] - g.first[c]
        place = s.queue[g.first[c] + s.head[c]]
        s.head[c] = (s.head[c] + 1) % count
        s.n_free[c] -= 1
        ready_s: float = s.free_s[place]
    else:
        victim = _victim(g, s, c, i, at, places)
        if victim < 0:
            s.totals[0] += g.object_bytes[c]
            now_s: float = s.clock[COMPUTE]
            return now_s
        place = s.place[victim]
        ready_s = _leave(g, s, victim)
    s.place[t], s.held[place] = place, t
    return ready_s


@inlined
def _victim(g: Tables, s: State, c: int, i: int, at: _Indices, places: _Indices) -> int:
    """The tensor of a class whose next use is furthest in the future, or -1."""
    found, furthest, found_old = -1, -1, False
    for place in range(g.first[c], g.first[c + 1]):
        t = s.held[place]
        if t < 0 or s.user[t] == i or not g.leaves[t] or s.touched[t] != g.n_forward[t]:
            continue
        following = places[at[t] + s.read[t]]
        old = s.clock[COMPUTE] - s.end_s[t] >= g.d2h_s[t]
        if (old and not found_old) or (old == found_old and following > furthest):
            found, furthest, found_old = t, following, old
    return found


@inlined
def _leave(g: Tables, s: State, t: int) -> float:
    """Swap a tensor out; return the time at which its object is free."""
    s.held[s.place[t]] = -1
    s.place[t] = -1
    free_s: float = max(s.clock[OUT], s.end_s[t]) + g.d2h_s[t]
    s.clock[OUT] = s.host_s[t] = free_s
    s.totals[1] += g.nbytes[t]
    s.where[t] = AWAY
    s.left[t] = True
    return free_s


@inlined
def _bring(g: Tables, s: State, t: int, i: int, at: _Indices, places: _Indices) -> float:
    """Swap a tensor in; return the time at which it is on the device."""
    ready_s = _take(g, s, t, i, at, places)
    there_s: float = max(s.clock[IN], ready_s, s.host_s[t]) + g.h2d_s[t]
    s.clock[IN] = there_s
    s.totals[1] += g.nbytes[t]
    s.where[t] = HERE
    return there_s


@inlined
def _end(g: Tables, s: State, k: int) -> None:
    """End operator k: free tensors without later readers."""
    for j in range(g.in_at[k], g.in_at[k + 1]):
        t = g.in_items[j]
        s.read[t] += 1
        _touched(g, s, t)
    for j in range(g.out_at[k], g.out_at[k + 1]):
        _touched(g, s, g.out_items[j])


@inlined
def _touched(g: Tables, s: State, t: int) -> None:
    s.touched[t] += 1
    s.end_s[t] = s.clock[COMPUTE]
    if s.read[t] < g.n_uses[t]:
        return
    s.where[t] = DEAD
    place = s.place[t]
    if place < 0:
        return  # the tensor had no object: the pool overflowed
    c = g.cls[t]
    count = g.first[c + 1] - g.first[c]
    s.queue[g.first[c] + (s.head[c] + s.n_free[c]) % count] = place
    s.n_free[c] += 1
    s.held[place], s.place[t], s.free_s[place] = -1, -1, s.end_s[t]
