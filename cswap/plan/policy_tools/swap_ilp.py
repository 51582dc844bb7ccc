"""A mixed-integer program that models swapping as a flow of bytes and minimises the stalls.

Time is indexed by operators. Binary variables: tensor s leaves raw, leaves encoded, or is dropped
and computed again. Each operator k has continuous variables: the stall y_k >= 0 before it, and, at
its start and at its end, the bytes that have left and the bytes that have returned. Raw and encoded
bytes have separate variables. The objective is the sum of the stalls, of the seconds that codecs
take from computation, and of the seconds of recomputation, such that

* each direction of the link carries at most its rate, while operators run and in stalls;
* a tensor leaves after its last forward use f and is back before its first backward use b;
* bytes return only after they have left;
* live bytes minus absent bytes stay within the budget at each start and each end.

Raw bytes become absent as they flow; this is the limit of ever smaller sections. Tensors that are
encoded or dropped are absent from f to b. Copies in both directions do not slow each other down and
have no latency. So the stalls of any plan of raw swaps are at least those of this program's
relaxation. With codecs and recomputation, the relaxation is only an estimate.

Source: our reading of tvDNN (Park et al., PPoPP 2018), of which only the abstract was available.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from cswap.plan.simulator.lifetimes import live_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from scipy.optimize import LinearConstraint

    from cswap.plan.simulate import Simulator

    Floats = NDArray[np.float64]

TIE: Final = 1e-4
"""Price of a second on the link, in seconds of the step. Among choices with equal stalls, it
selects the one that moves fewer bytes."""

NO_LINK: Final = 1e6
"""Rate in MiB/s that stands for no link, where host memory is the device's own."""

_MIB: Final = 1 << 20


class Ways(NamedTuple):
    """Alternatives to raw swaps; see `least_stall`.

    Attributes:
        encoded_bytes: [n] encoded bytes on the link.
        codec_s: [n] seconds that the codec takes from computation; infinite without a codec.
        again_s: [n] seconds to compute the tensor again; infinite where that is impossible.
    """

    encoded_bytes: NDArray[np.int64]
    codec_s: Floats
    again_s: Floats


@dataclass(frozen=True, slots=True)
class Flow:
    """A solution; shares are 0 or 1 unless relaxed.

    Attributes:
        raw: [n] share of each tensor that leaves raw.
        encoded: [n] share of each tensor that leaves encoded.
        dropped: [n] share of each tensor that is computed again.
        stall_s: sum of the stalls.
        proven: whether HiGHS has proven the solution optimal, to its gap of 1e-4.
    """

    raw: Floats
    encoded: Floats
    dropped: Floats
    stall_s: float
    proven: bool


def least_stall(
    simulator: Simulator,
    ways: Ways | None = None,
    *,
    relaxed: bool = False,
    limit_s: float | None = None,
) -> Flow | None:
    """Build the program and solve it with HiGHS.

    Args:
        simulator: simulator of the trace, the machine and the budget.
        ways: alternatives to raw swaps; None: raw swaps only.
        relaxed: whether parts of tensors may leave.
        limit_s: time limit in seconds.

    Returns:
        None if no solution fits, or none was found in time.
    """
    return Program(simulator, ways).solve(relaxed=relaxed, limit_s=limit_s)


class _Lane(NamedTuple):
    # For raw (0) or encoded (1) bytes: index of the first share, of the first flow, MiB per tensor.
    shares: int
    flows: int
    mib: Floats


OUT1, OUT2, IN1, IN2 = range(4)
"""Kinds of flow: bytes that have left when an operator starts (OUT1) and ends (OUT2), and bytes
that have returned when it starts (IN1) and ends (IN2)."""


class Program:
    """The program for a simulator's trace, machine and budget. It can be solved several times."""

    # Variables: shares [3, n], flows [lanes, 4, m] in MiB, stalls [m] in seconds.

    def __init__(self, simulator: Simulator, ways: Ways | None = None) -> None:
        """Args: ways: alternatives to raw swaps; None: raw swaps only."""
        self._simulator, self._ways = simulator, ways
        self._n, self._m = n, m = len(simulator.saved), len(simulator.trace.operators)
        self._lanes = [_Lane(0, 3 * n, simulator.nbytes / _MIB)]
        if ways is not None:
            self._lanes.append(_Lane(n, 3 * n + 4 * m, ways.encoded_bytes / _MIB))
        hardware = simulator.hardware
        self._unified = hardware.unified
        self._out_rate = self._in_rate = NO_LINK
        if not hardware.unified:
            self._out_rate = hardware.d2h_bytes_per_s / _MIB
            self._in_rate = hardware.h2d_bytes_per_s / _MIB
        self._rows: list[tuple[NDArray[np.int64], Floats, float]] = []
        self._cost = self._costs()
        self._constraints = self._all_constraints()

    def solve(
        self,
        *,
        relaxed: bool = False,
        limit_s: float | None = None,
    ) -> Flow | None:
        """Solve the program; arguments and result are those of `least_stall`."""
        from scipy.optimize import Bounds, milp

        n, high = self._n, self._upper_bounds()
        whole = np.zeros_like(high)
        whole[: 3 * n] = not relaxed
        found = milp(
            self._cost,
            integrality=whole,
            bounds=Bounds(np.zeros_like(high), high),
            constraints=self._constraints,
            options={} if limit_s is None else {"time_limit": limit_s},
        )
        if found.x is None:
            return None
        shares = found.x[: 3 * n] if relaxed else np.round(found.x[: 3 * n])
        raw, encoded, dropped = shares.reshape(3, n)
        stall_s = float(found.x[self._stall(0) :].sum())
        return Flow(raw, encoded, dropped, stall_s, found.status == 0)

    def _stall(self, k: int) -> int:
        # Index of the variable for the stall before operator k.
        return 3 * self._n + 4 * self._m * len(self._lanes) + k

    def _upper_bounds(self) -> Floats:
        # 1 for possible shares, 0 for impossible ones. Flows have no upper bound.
        high = np.full(len(self._cost), np.inf)
        high[: 3 * self._n] = 0.0
        high[: self._n] = not self._unified  # there a raw swap frees nothing
        if self._ways is not None:
            high[self._n : 2 * self._n] = np.isfinite(self._ways.codec_s)
            high[2 * self._n : 3 * self._n] = np.isfinite(self._ways.again_s)
        return high

    def _costs(self) -> Floats:
        cost = np.zeros(self._stall(self._m))
        cost[self._stall(0) :] = 1.0
        per_mib = TIE * (1 / self._out_rate + 1 / self._in_rate)
        for lane in self._lanes:
            cost[lane.shares : lane.shares + self._n] = per_mib * lane.mib
        if self._ways is not None:
            seconds = np.concatenate([self._ways.codec_s, self._ways.again_s])
            cost[self._n : 3 * self._n] += np.where(np.isfinite(seconds), seconds, 0.0)
        return cost

    def _all_constraints(self) -> LinearConstraint:
        # All constraints are upper bounds of rows.
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_matrix

        for k in range(self._m):
            self._link(k)
        for lane in self._lanes:
            self._uses(lane)
        self._memory()
        if self._ways is not None:
            for s in range(self._n):
                self._row([(s, 1.0), (self._n + s, 1.0), (2 * self._n + s, 1.0)], 1.0)
        at = np.concatenate([[0], np.cumsum([len(columns) for columns, _, _ in self._rows])])
        columns = np.concatenate([columns for columns, _, _ in self._rows])
        values = np.concatenate([values for _, values, _ in self._rows])
        matrix = csr_matrix((values, columns, at), shape=(len(self._rows), len(self._cost)))
        return LinearConstraint(matrix, ub=np.array([bound for _, _, bound in self._rows]))

    def _link(self, k: int) -> None:
        seconds = self._simulator.trace.operators[k].duration_s
        for begin, end, rate in ((OUT1, OUT2, self._out_rate), (IN1, IN2, self._in_rate)):
            stalled: list[tuple[int, float]] = [(self._stall(k), -rate)]
            running: list[tuple[int, float]] = []
            for lane in self._lanes:
                start = [(self._at(lane, begin, k), 1.0)]
                if k:
                    start.append((self._at(lane, end, k - 1), -1.0))
                ran = [(self._at(lane, end, k), 1.0), (self._at(lane, begin, k), -1.0)]
                for flow in (start, ran):  # the sum of moved bytes never decreases
                    self._row([(i, -c) for i, c in flow], 0.0)
                stalled += start
                running += ran
            self._row(stalled, 0.0)
            self._row(running, rate * seconds)

    def _uses(self, lane: _Lane) -> None:
        forward, backward = self._simulator.forward, self._simulator.backward
        for k in (*np.unique(forward).tolist(), self._m - 1):
            # At the end of operator k, at most the tensors last used before k have left.
            free = np.flatnonzero(forward < k)
            gone = [(lane.shares + int(s), -float(lane.mib[s])) for s in free]
            self._row([(self._at(lane, OUT2, k), 1.0), *gone], 0.0)
        for k in np.unique(backward).tolist():
            needed = np.flatnonzero(backward <= k)
            back = [(lane.shares + int(s), float(lane.mib[s])) for s in needed]
            self._row([(self._at(lane, IN1, k), -1.0), *back], 0.0)

    def _memory(self) -> None:
        live = np.array(live_bytes(self._simulator.trace)) / _MIB
        budget = self._simulator.budget_bytes / _MIB
        raw, forward, backward = self._lanes[0], self._simulator.forward, self._simulator.backward
        for k in range(self._m):
            away: list[tuple[int, float]] = []
            if self._ways is not None:
                held = self._lanes[1].mib if self._unified else np.zeros(self._n)
                for s in np.flatnonzero((forward < k) & (k < backward)).tolist():
                    mib = -float(raw.mib[s])
                    away += [(self._n + s, mib + float(held[s])), (2 * self._n + s, mib)]
            for out, back in ((OUT1, IN1), (OUT2, IN2)):
                flow = [(self._at(raw, back, k), 1.0), (self._at(raw, out, k), -1.0)]
                self._row([*flow, *away], budget - live[k])
                for lane in self._lanes:  # bytes return only after they have left
                    come, gone = self._at(lane, back, k), self._at(lane, out, k)
                    self._row([(come, 1.0), (gone, -1.0)], 0.0)

    def _at(self, lane: _Lane, kind: int, k: int) -> int:
        return lane.flows + kind * self._m + k

    def _row(self, terms: Iterable[tuple[int, float]], bound: float) -> None:
        columns, values = zip(*terms, strict=True)
        self._rows.append((np.array(columns, np.int64), np.array(values, np.float64), bound))
