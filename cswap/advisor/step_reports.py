"""What the engine reports of a step, tensor by tensor: the sums from which its peak follows.

In one step of `LOOK_EVERY`, the engine says how many bytes it holds after each tensor that it saves
(`StepReports.holds`), and which node of backward asks for each one (`StepReports.asked`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from cswap.advisor.gains import UNUSED, Key
from cswap.advisor.step_peak import Leaver

if TYPE_CHECKING:
    from cswap.advisor.gains import Gain, Gains

Node: TypeAlias = tuple[int, int]
"""torch's numbers of a backward, and of a node in it. Nodes that several threads made may have the
same number; then they count as one."""

LOOK_EVERY: Final = 4
"""In one step of so many, the bytes that are held are noted tensor by tensor."""

MANY: Final = 8
"""A node that asks for so many tensors stands for many operators: Note [nodes with many tensors] in
step_peak.py."""

KNOWN_SHARE: Final = 0.9
"""Share of the tensors worth their time that such a step has to meet, or it says too little."""

CHANGED: Final = 0.05
"""Relative change of a step's bytes after which choices are made again."""


class Look(NamedTuple):
    """One step: see `StepPeak`.

    Attributes:
        held: see there.
        leavers: see there.
        keys: of the leavers.
    """

    held: list[float]
    leavers: list[Leaver]
    keys: list[Key]

    @property
    def largest_bytes(self) -> float:
        """Most bytes that are held after a tensor, if every leaver leaves."""
        return max(self.held)

    @property
    def returns(self) -> list[int]:
        """Of each leaver, the moment at which it counts as back."""
        return [leaver.returns for leaver in self.leavers]

    @property
    def together(self) -> list[int]:
        """The same, of those that come back with others of their node, which are later."""
        return [leaver.returns for leaver in self.leavers if leaver.returns > leaver.moment]

    def differs(self, other: Look | None) -> bool:
        """Whether it is of other tensors or nodes than another one; None: there is no other one."""
        if other is None or len(self.keys) != len(other.keys) or self.together != other.together:
            return True
        now, before = self.largest_bytes, other.largest_bytes
        return abs(now - before) > CHANGED * max(now, before)


class StepReports:
    """The reports of one engine. `holds` and `asked` are called from any thread, without a lock.

    Attributes:
        wanted: whether the step that runs reports.
        saved: what it has reported of tensors that were saved: key of each, bytes held after it.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.saved: list[tuple[Key, int]] = []
        self._last: list[tuple[Key, int]] = []  # the last report that is complete
        self._asked: list[tuple[Node, Key]] = []
        self._trusted_from = 0  # step from which backward comes next

    def holds(self, key: Key, held_bytes: int) -> None:
        """A tensor has been saved. Args: key: of it; held_bytes: for saved tensors, now."""
        saved = self.saved  # another thread may begin a step meanwhile
        if saved and key[0] <= saved[-1][0][0]:
            saved = self.saved = []  # of another forward
        saved.append((key, held_bytes))

    def asked(self, key: Key, node: Node) -> None:
        """A node of backward has asked for a tensor that has a handle, or has left without one."""
        self._asked.append((node, key))

    def begin_step(self, gains: Gains) -> None:
        """A step begins: the reports of the last one, if it made some, are complete."""
        if self.wanted:
            self._last, self.saved = self.saved, []
            asked, self._asked = tuple(self._asked), []
            nodes: defaultdict[Node, list[Key]] = defaultdict(list)
            for node, key in asked:
                nodes[node].append(key)
            gains.returned(nodes.values())

    def distrust(self, step: int) -> None:
        """A forward has begun before the backward of the last one. Args: step: its number.

        Late tensors wait as long as early ones.
        """
        self._trusted_from = step + UNUSED
        self._last = []

    def forget(self) -> None:
        """Forget the last reports."""
        self._last = []

    def look(self, gains: Gains, staying: frozenset[Key]) -> Look | None:
        """The last complete report.

        Args:
            gains: of the tensors that could leave.
            staying: those of them that stayed.

        Returns:
            None: it met too few of the tensors that could leave, or says nothing of the peak.
        """
        if gains.step < self._trusted_from:
            return None
        held, keys, leavers, stay_bytes = [], list[Key](), list[Leaver](), 0.0
        recent = gains.recent()
        returns = self._returns(recent)
        for index, (key, held_bytes) in enumerate(self._last):
            gain = recent.get(key)
            if gain is not None:
                at = returns.get(gain.returns_at, index)
                keys.append(key)
                leavers.append(Leaver(index, key[1], gain.nbytes, gain.expected_s, at))
                stay_bytes += gain.nbytes if key in staying else 0
            held.append(held_bytes - stay_bytes)
        if not keys or len(keys) < KNOWN_SHARE * len(recent):
            return None
        return Look(held, leavers, keys)

    def _returns(self, recent: dict[Key, Gain]) -> dict[int, int]:
        # By position of the last tensor of a node that asks for many: the moment of that tensor.
        counts = Counter(recent[key].returns_at for key, _ in self._last if key in recent)
        moments = {position: index for index, ((position, _), _) in enumerate(self._last)}
        return {last: moments[last] for last, n in counts.items() if n >= MANY and last in moments}
