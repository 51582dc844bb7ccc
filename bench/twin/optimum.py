"""The least time of a step within a peak of memory: a linear program over a recorded plain step.

Each saved tensor has shares that are kept, computed again from its nearest saved ancestors, or
swapped, raw or lossless. Memory is limited at one instant of each slot of time; encodings on the
device, and on the host, are pools. All may be split at will, so it is a lower bound for an engine
that brings a tensor back once, by its own operators. The program has milliseconds and MiB.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

if TYPE_CHECKING:
    from bench.twin.profiles import Profile

N_SLOTS: Final = 100
DEPTH: Final = 4  # generations of tensors computed again that an ancestor may be back early for
MIB, MS = 2.0**-20, 1e3


class Point(NamedTuple):
    """The least time at a peak of the allocator; None where it is out of reach."""

    peak_bytes: float
    step_s: float | None


def curve(recording: dict[str, Any], profile: Profile, shares: tuple[float, ...]) -> list[Point]:
    """The points where these shares of the saved bytes are left, of plain's peak."""
    ops, storages = recording["ops"], recording["storages"]
    live, seconds = (np.array([op[key] for op in ops]) for key in ("live_bytes", "seconds"))
    saved = {i: s for i, s in enumerate(storages) if "used" in s and "codec" in s}
    held = np.zeros(len(ops) + 1)
    for s in saved.values():
        held[[s["born"], s.get("freed", -1)]] += s["nbytes"], -s["nbytes"]
    # An instant is the operator of a slot with the most bytes; the last of all is one, too.
    weight = seconds / seconds.sum() + np.abs(held[:-1]) / np.abs(held).sum()
    slot = (weight.cumsum() / weight.sum() * N_SLOTS).astype(int)
    most = {max(np.flatnonzero(slot == k), key=live.__getitem__) for k in {*slot}}
    at = sorted({*map(int, most), len(ops) - 1})
    tensors = {i: _Tensor(s, _again(recording, profile, i), at, profile) for i, s in saved.items()}
    tensors = {i: t for i, t in tensors.items() if t.gone < t.used}
    costs, rows, limits = _program(tensors, profile, np.diff(seconds.cumsum()[at], prepend=0.0))
    points = []
    for peak in live.max() - (1 - np.array(shares)) * held.cumsum().max():
        limits[: len(at)] = (peak - live[at]) * MIB
        found = linprog(costs, rows, limits)
        assert found.status in (0, 2), found.message
        step_s = None if found.status else float(seconds.sum()) + found.fun / MS
        points.append(Point(float(peak), step_s))
    return points


class _Tensor:
    def __init__(self, s: Any, again: tuple[float, set[int]], at: list[int], p: Profile) -> None:
        size, (again_s, self.parents) = s["nbytes"] * MIB, again
        encode, decode = (p.overlap * MS * s["nbytes"] / r for r in p.codec_rates(s["codec"]))
        # Of each way but to keep it: time before and after, bytes over the link, the size.
        ways = (0.0, MS * again_s, 0.0), (0.0, 0.0, size), (encode, decode, size / s["ratio"])
        self.ways = [(*way, size) for way in ways]
        # Slots: from which it may leave; at whose instant it may be away; of its use.
        self.ready, self.gone = bisect_left(at, s["saved"]), bisect_right(at, s["read"])
        self.used = self.early = bisect_left(at, s["used"])  # early: from which it may be back
        self.columns: list[Any] = []  # by way: the shares that are back, of the slots from early


def _again(recording: dict[str, Any], p: Profile, i: int) -> tuple[float, set[int]]:
    # Seconds of the operators between a tensor and its nearest saved ancestors, and these.
    seconds: dict[int, float] = {}
    parents, stack = set(), [i]
    while stack:
        s = recording["storages"][x := stack.pop()]
        if x != i and "saved" in s:
            parents.add(x)
            continue
        for n in set(s["written"]) - seconds.keys():
            op = recording["ops"][n]
            drops, seconds[n] = op["name"] == "native_dropout", op["seconds"]
            if drops and s["dtype"] == "bool":  # drawn again, of the generator's state
                seconds[n] = 3 * s["nbytes"] / p.memory + p.kernel_s
            else:  # dropout is a product with the mask
                stack += (y for y in (*op["reads"], *op["writes"] * drops) if y != x)
    return sum(seconds.values()), parents - {i}


def _program(tensors: dict[int, _Tensor], p: Profile, plain_s: Any) -> tuple[Any, Any, Any]:
    # Costs, rows, and their limits; the rows of memory are first.
    for _ in range(DEPTH):
        for t, early in [(t, t.early) for t in tensors.values()]:
            for q in (tensors[i] for i in t.parents & tensors.keys()):
                q.early = max(min(q.early, early), q.gone)
    columns: list[tuple[float, ...]] = []
    for t in tensors.values():
        for way in t.ways:
            t.columns.append(len(columns) + np.arange(t.used - t.early + 1))
            columns += [(*way, t.ready, t.gone, t.used, k) for k in range(t.early, t.used + 1)]
    before, after, moved, size, leaves, gone, used, slot = np.array(columns).T
    now = np.arange(len(plain_s))[:, None]  # by slot, which shares may leave, have to, and are back
    ready, left = (1.0 * ((now >= k) & (slot == used)) for k in (leaves, gone))
    back = 1.0 * np.where(slot == used, now >= used, now == slot)
    logic, most = _logic(tensors, left - back)
    takes = ready * before + back * after
    one = sparse.identity(len(plain_s))
    step = one - sparse.eye(len(plain_s), k=-1)
    out, into, both = (step * (MS / MIB / rate) for rate in (p.out, p.back, p.both))
    # Columns: shares; moved out, back, and held instead so far; bytes that wait; stalls.
    rows = [
        [(back - left) * size - back * moved, None, one, one, one, None],  # memory
        [back * moved, None, -one, -one, None, None],  # needed bytes are back
        [-ready * moved, one, None, one, None, None],  # leaving bytes are ready
        [left * moved, -one, None, -one, -one, None],  # waiting bytes take memory
        [-step @ takes, out, both - out, None, None, -one],
        [-step @ takes, both - into, into, None, None, -one],
        *([None] * k + [-step] + [None] * (5 - k) for k in (1, 2, 3)),
        [logic, None, None, None, None, None],
    ]
    made = [[b if b is None else sparse.csr_array(b) for b in row] for row in rows]
    limits = [0 * plain_s] * 4 + [MS * plain_s] * 2 + [0 * plain_s] * 3 + [most]
    costs = np.concatenate([takes[-1], *[0 * plain_s] * 4, 0 * plain_s + 1])
    return costs, sparse.block_array(made, format="csr"), np.concatenate(limits)


def _logic(tensors: dict[int, _Tensor], away: Any) -> tuple[Any, Any]:
    # Shares are of one whole, come back once, and ancestors are there where they are needed.
    one = sparse.identity(away.shape[1], format="csr")
    rows = []
    for t in tensors.values():
        rows.append((sum(one[its[-1:]] for its in t.columns), 1.0))
        rows += [(one[its[:-1]] - one[its[1:]], 0.0) for its in t.columns]
        for q in (tensors[i] for i in t.parents & tensors.keys()):
            slots = np.arange(max(t.early, q.early), min(t.used + 1, q.used))
            of = np.concatenate(q.columns)
            rows.append((one[t.columns[0][slots - t.early]] + away[slots][:, of] @ one[of], 1.0))
    made, limits = zip(*rows, strict=True)
    return sparse.vstack(made), np.repeat(limits, [block.shape[0] for block in made])
