"""The part of a goal's linear program that knows the link: `LinkProgram`.

Note [a link and the computation that hides it]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A step is cut into slots. In each, so many bytes go out and come back as the link carries in the
slot's time: of the program's own computation, of operators that run again and of kernels of
codecs, and of the stall that the plan allows there. A tensor leaves in later slots than the one in
which it is saved, and is back in the slot in which it is needed, or before. Nothing comes back
before backward has begun, so the computation waits for the tensors that it needs first. Few bytes
wait to leave, or are back early: beyond that, the engine stalls the computation (link/link.py). A
tensor that was copied in part is held as a whole, so the largest one that moves counts besides. So
does the memory that encodings pass through: as much as the largest of them needs. The host leads by
some time in each slot: its work for tensors makes that shorter, and whatever makes the computation
longer makes it longer. Where it would be negative, the computation stalls.

The host takes memory and gives it back, and may be ahead of the device. So at each moment the
device may hold as much for tensors on their way as at the fullest one (`Problem.under_way`): the
peak counts that much everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cswap.advisor.live_costs import REMAT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from cswap.fit.problem import Problem
    from cswap.fit.saved import Way

UNDER_WAY: Final = 2
"""Tensors of the largest size that may be under way, each way."""

SMALL: Final = 1 / 64
"""Share of the bytes that may leave. Where two tensors like one are no more than that, so many may
always be under way beside one that is copied in part: tensors are held whole, and saved one by one.
On the twin's H200, GPT-2 small takes 2 % of a step more with half of that."""

N_BLOCKS: Final = 7
"""Of columns, each with one for a slot."""

N_SINGLE: Final = 3
"""Of columns behind these: see `LinkProgram`."""

LARGEST, PASSING, MOST = range(-N_SINGLE, 0)
"""Their indices: the largest tensor that moves, the memory that encodings pass through, and the
most that waits or is back early."""

PACK_S: Final = 5e-5
"""Seconds that the host takes where a tensor is saved, if it is not kept: assumed, of 9 to 20
calls. Operators that run again take the rest where it is needed."""

STALL: Final = 5
"""Index of the block of stalls."""

MIB: Final = float(1 << 20)
MS: Final = 1e3


class LinkProgram:
    """Columns and rows beside those of the ways, in MiB and milliseconds.

    Attributes:
        n_columns: by slot: bytes that go out, that come back, that wait, that are back early, that
            are away, the stall, and the host's lead; the largest tensor that moves, the memory
            that encodings pass through, and the most that waits or is back early.
        upper: [n_columns] bounds.
        largest: [ways] MiB of the tensor, if it moves.
        always: [ways] MiB that may be under way beside the largest in any plan with this way.
    """

    def __init__(self, problem: Problem, ways: Sequence[tuple[int, Way]]) -> None:
        """The program of a problem. Args: ways: index of the tensor, and way, by column."""
        over = problem.over_link
        assert over is not None  # or there is no program
        self._link, self._ways, self._saved = over.link, ways, problem.saved
        self._starts = problem.slots
        self._slot_ms = MS * np.add.reduceat(over.durations, self._starts)
        ends = np.append(self._starts[1:], problem.n_moments) - 1
        self._ahead_ms = MS * over.host_ahead[ends]
        n = len(self._starts)
        under_way = UNDER_WAY * max(s.nbytes for s in problem.saved) / MIB
        self.n_columns = N_BLOCKS * n + N_SINGLE
        self.upper = np.repeat([*[np.inf] * 2, *[under_way] * 2, *[np.inf] * 3], n)
        self.upper = np.append(self.upper, [np.inf] * N_SINGLE)
        self._moved = np.array([way.link_bytes / MIB for _, way in ways])
        self.largest = np.array([problem.saved[i].nbytes / MIB for i, _ in ways])
        self.largest[self._moved == 0] = 0.0
        may_leave = {i: nbytes for (i, _), nbytes in zip(ways, self.largest, strict=True) if nbytes}
        small = UNDER_WAY * self.largest <= SMALL * sum(may_leave.values())
        self.always = small * UNDER_WAY * self.largest
        self._turn = int(np.searchsorted(self._starts, problem.turn))
        self.upper[n : n + self._turn] = 0.0

    def under_way(self) -> NDArray[np.float64]:
        """[n_columns] 1 for the bytes that the device holds for tensors that move."""
        found = np.zeros(self.n_columns)
        found[-N_SINGLE:] = 1.0
        return found

    def rows(self) -> Iterator[tuple[Any, Any, Any]]:
        """Matrix over all columns, lower, upper bounds; see `scipy.optimize.LinearConstraint`."""
        from scipy.sparse import block_array, csr_array, eye_array

        n_slots, n_ways = len(self._slot_ms), len(self._ways)
        one = eye_array(n_slots)
        step = one - eye_array(n_slots, k=-1)
        late = eye_array(n_slots, k=-1)
        out, back, both = (MS / (rate / MIB) for rate in self._link)
        saved, used = self._by_slot(lambda i: self._saved[i].born), self._by_slot(self._use)
        first, last = np.array([_halves(way) for _, way in self._ways]).T
        takes = saved * first + used * last
        hooks = MS * np.array([way.host_s for _, way in self._ways])
        packs = np.minimum(hooks / 2, MS * PACK_S)
        host = saved * packs + used * (hooks - packs)
        nothing = csr_array((n_slots, 2))
        alike = np.zeros(n_slots)

        def row(ways: Any, *blocks: Any) -> Any:
            return block_array(
                [[csr_array(ways), nothing, *blocks, csr_array((n_slots, N_SINGLE))]]
            )

        zero = csr_array((n_slots, n_slots))
        nobody = csr_array((n_slots, n_ways))
        yield (
            row(late @ (saved * self._moved), -one, zero, -step, zero, zero, zero, zero),
            alike,
            alike,
        )
        yield row(used * self._moved, zero, -one, zero, step, zero, zero, zero), alike, alike
        yield row(nobody, one, -one, zero, zero, -step, zero, zero), alike, alike
        for n_out, n_back in ((out, both - out), (both - back, back)):
            flows = row(-takes, n_out * one, n_back * one, zero, zero, zero, -one, zero)
            yield flows, -np.inf, self._slot_ms
        at_turn = csr_array(([1.0], ([0], [self._turn])), (1, n_slots))
        nowhere, nothing_moves = csr_array((1, n_slots)), csr_array((1, n_ways + 2))
        waits = [nothing_moves, nowhere, back * at_turn, *[nowhere] * 3, -at_turn, nowhere]
        yield block_array([[*waits, csr_array((1, N_SINGLE))]]), -np.inf, 0.0
        lead = np.diff(self._ahead_ms, prepend=0.0)
        yield row(takes - host, zero, zero, zero, zero, zero, one, -step), -lead, -lead
        yield self._largest(self.largest, self.n_columns + LARGEST), -np.inf, 0.0
        passing = np.array([way.passing_bytes / MIB for _, way in self._ways])
        yield self._largest(passing, self.n_columns + PASSING), -np.inf, 0.0
        most = csr_array(np.ones((n_slots, 1)))
        no_other = csr_array((n_slots, N_SINGLE - 1))
        for waits_or_early in ([one, zero], [zero, one]):
            blocks = [zero, zero, *waits_or_early, zero, zero, zero, no_other, -most]
            yield block_array([[nobody, nothing, *blocks]]), -np.inf, 0.0
        yield self._largest(self.always, self.n_columns + MOST), -np.inf, 0.0
        longer = np.zeros((1, n_ways + 2 + self.n_columns))
        stalls = slice(n_ways + 2 + STALL * n_slots, n_ways + 2 + (STALL + 1) * n_slots)
        longer[0, :n_ways], longer[0, n_ways + 1], longer[0, stalls] = first + last, -1.0, 1.0
        yield csr_array(longer), -np.inf, 0.0

    def _largest(self, nbytes: NDArray[np.float64], column: int) -> Any:
        # A row for each way that takes such bytes: this column of ours is no less than these.
        from scipy.sparse import csr_array

        at, n = np.flatnonzero(nbytes), len(nbytes) + 2
        values = np.concatenate([nbytes[at], np.full(len(at), -1.0)])
        columns = np.concatenate([at, np.full(len(at), n + column)])
        cells = np.tile(np.arange(len(at)), 2), columns
        return csr_array((values, cells), (len(at), n + self.n_columns))

    def _by_slot(self, moment: Any) -> Any:
        # [slots, ways] 1 where the tensor's moment lies.
        at = [np.searchsorted(self._starts, moment(i), "right") - 1 for i, _ in self._ways]
        found = np.zeros((len(self._starts), len(at)))
        found[at, np.arange(len(at))] = 1.0
        return found

    def _use(self, index: int) -> int:
        return self._saved[index].first_use


def _halves(way: Way) -> tuple[float, float]:
    # Milliseconds where a tensor is saved, and where it is needed.
    if way.action == REMAT:
        return 0.0, MS * way.added_s
    return MS * way.added_s / 2, MS * way.added_s / 2
