"""The least time of a step within a peak of memory: a linear program over a recorded plain step.

Each saved tensor has shares that are kept, computed again from its nearest saved ancestors, or
swapped, raw or lossless. Memory is limited at one instant of each slot of time; encodings that wait
to leave, or are back, are pools. All may be split at will, so it is a lower bound for an engine that
brings each tensor back once, by its own operators. In the program are milliseconds and MiB.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.twin.profiles import Profile

N_SLOTS: Final = 100
DEPTH: Final = 4  # generations of tensors computed again that an ancestor may be back early for
LEAST_BYTES: Final = 1 << 20  # smaller tensors are kept
MIB, MS = 2.0**-20, 1e3


class Point(NamedTuple):
    """The least time at a peak of the allocator; None where it is out of reach."""

    peak_bytes: float
    step_s: float | None


def curve(recording: dict[str, Any], profile: Profile, shares: Sequence[float]) -> list[Point]:
    """The points where these shares of the saved bytes are left, of plain's peak."""
    program = _Program(recording, profile)
    peaks = [program.peak_bytes - (1 - share) * program.saved_bytes for share in shares]
    return [Point(peak, program.best_s(peak)) for peak in peaks]


class _Tensor:
    def __init__(
        self, s: dict[str, Any], again: tuple[float, set[int]], at: list[int], p: Profile
    ) -> None:
        size, (again_s, self.parents) = s["nbytes"] * MIB, again
        encode, decode = (p.overlap * MS * s["nbytes"] / r for r in p.codec_rates(s["codec"]))
        # Of each way but to keep it: time before and after, and what moves over the link.
        self.ways = (0.0, MS * again_s, 0.0), (0.0, 0.0, size), (encode, decode, size / s["ratio"])
        self.size, self.columns = size, [[0]] * 3  # by way and slot: of the share that is back
        # Slots: from which it may leave; at whose instant it may be away; of its use.
        self.ready, self.gone = bisect_left(at, s["saved"]), bisect_right(at, s["read"])
        self.used = self.early = bisect_left(at, s["used"])  # early: from which it may be back

    def away(self, k: int) -> list[tuple[int, float]]:
        """The share that is away in a slot."""
        back = [(c[k - self.early], -1.0) for c in self.columns if k >= self.early]
        return [(c[-1], 1.0) for c in self.columns] + back


class _Program:
    def __init__(self, recording: dict[str, Any], profile: Profile) -> None:
        self._ops, self._storages, self._profile = *recording.values(), profile
        live = np.array([op["live_bytes"] for op in self._ops])
        self._seconds, held = np.array([op["seconds"] for op in self._ops]), np.zeros(len(live) + 1)
        found = {i: s for i, s in enumerate(self._storages) if "used" in s and "codec" in s}
        for s in found.values():
            held[[s["born"], s["freed"]]] += s["nbytes"], -s["nbytes"]
        self.peak_bytes, self.saved_bytes = float(live.max()), float(held.cumsum().max())
        # An instant is the operator of a slot with the most bytes; the last of all is one, too.
        weight = self._seconds / self._seconds.sum() + np.abs(held[:-1]) / np.abs(held).sum()
        slot = (weight.cumsum() / weight.sum() * N_SLOTS).astype(int)
        most = {max(np.flatnonzero(slot == k), key=live.__getitem__) for k in slot}
        at = sorted({*map(int, most), len(live) - 1})
        tensors = {i: _Tensor(s, self._again(i), at, profile) for i, s in found.items()}
        self._tensors = {i: t for i, t in tensors.items() if t.gone < t.used}
        self._costs: list[float] = []
        self._rows: list[tuple[float, list[tuple[int, float]]]] = []  # limits and terms
        # By kind and slot: terms of time, of what is ready, needed, still here, and of the peak.
        self._of = {k: defaultdict(list) for k in ("ms", "ready", "needed", "here", "memory")}
        self._add_tensors()
        self._add_slots(np.diff(self._seconds.cumsum()[at], prepend=0.0))
        self._live = live[at]

    def best_s(self, peak_bytes: float) -> float | None:
        most = np.array([limit for limit, _ in self._rows])
        most[-len(self._live) :] = (peak_bytes - self._live) * MIB
        terms = [(r, *term) for r, (_, terms) in enumerate(self._rows) for term in terms]
        row, column, factor = zip(*terms, strict=True)
        matrix = csr_matrix((factor, (row, column)), (len(most), len(self._costs)))
        found = linprog(self._costs, matrix, most)
        assert found.status in (0, 2), found.message
        return None if found.status else float(self._seconds.sum()) + found.fun / MS

    def _column(self, cost: float = 0.0) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def _again(self, i: int) -> tuple[float, set[int]]:
        # Seconds of the operators between a tensor and its nearest saved ancestors, and these.
        seconds: dict[int, float] = {}
        parents, stack = set(), [i]
        while stack:
            s = self._storages[x := stack.pop()]
            if x != i and "saved" in s:
                parents.add(x)
                continue
            for n in set(s["written"]) - seconds.keys():
                op, p = self._ops[n], self._profile
                drops, seconds[n] = op["name"] == "native_dropout", op["seconds"]
                if drops and s["dtype"] == "bool":  # drawn again, of the generator's state
                    seconds[n] = 3 * s["nbytes"] / p.memory + p.kernel_s
                else:  # dropout is a product with the mask
                    stack += (y for y in (*op["reads"], *op["writes"] * drops) if y != x)
        return sum(seconds.values()), parents - {i}

    def _add_tensors(self) -> None:
        of, known = self._of, self._tensors
        for _ in range(DEPTH):
            for t, early in [(t, t.early) for t in known.values()]:
                for p in (known[i] for i in t.parents & known.keys()):
                    p.early = max(min(p.early, early), p.gone)
        for t in known.values():
            t.columns = [[self._column() for _ in range(t.early, t.used + 1)] for _ in t.ways]
        for t in known.values():
            for (before, after, moved), columns in zip(t.ways, t.columns, strict=True):
                total = columns[-1]
                self._costs[total] = before + after
                of["ms"][t.ready].append((total, before))
                of["ready"][t.ready].append((total, -moved))
                for k in range(t.ready, t.gone):
                    of["here"][k].append((total, -moved))
                for k, (c, last) in enumerate(zip(columns, [None, *columns]), t.early):
                    step = [(c, 1.0)] + [(last, -1.0)] * (last is not None)
                    self._rows.append((0.0, [(i, -v) for i, v in step]))
                    of["ms"][k] += [(i, after * v) for i, v in step]
                    of["needed"][k] += [(i, moved * v) for i, v in step]
            for k in range(t.gone, t.used):
                of["memory"][k] += [(c, -t.size * v) for c, v in t.away(k)]
            self._rows.append((1.0, [(columns[-1], 1.0) for columns in t.columns]))
            for p in (known[i] for i in t.parents & known.keys()):
                for k in range(max(t.early, p.early), min(t.used + 1, p.used)):
                    self._rows.append((1.0, [(t.columns[0][k - t.early], 1.0), *p.away(k)]))

    def _add_slots(self, plain_s: Any) -> None:
        of, p, memory = self._of, self._profile, []
        was: list[list[tuple[int, float]]] = [[], [], []]
        for k, seconds in enumerate(plain_s):
            waits, host, back, out, into, stays, counted = (self._column() for _ in range(7))
            stall = self._column(1.0)
            for zero in (
                [(waits, 1.0), *was[0], *of["ready"][k], (out, 1.0), (stays, 1.0)],
                [(host, 1.0), *was[1], (out, -1.0), (into, 1.0)],
                [(back, 1.0), *was[2], (into, -1.0), (stays, -1.0), *of["needed"][k]],
            ):
                self._rows += [(0.0, zero), (0.0, [(c, -v) for c, v in zero])]
            self._rows.append((0.0, [(waits, 1.0), *of["here"][k], (counted, -1.0)]))
            memory.append((0.0, [(counted, 1.0), (back, 1.0), *of["memory"][k]]))
            takes = [(stall, -1.0), *((c, -v) for c, v in of["ms"][k])]
            for one, other, rate in ((out, into, p.out), (into, out, p.back)):
                ms = MS / MIB / rate
                link = [(one, ms), (other, ms * (rate - p.both) / p.both)]
                self._rows.append((MS * seconds, link + takes))
            was = [[(c, -1.0)] for c in (waits, host, back)]
        self._rows += memory
