"""The tensors of a step that are worth their time: seconds and bytes of each one's leaving.

Note [predicted and measured times]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Predicted times are of warm caches, and too short by a factor that depends on the machine and the
operator. So the hooks of each tensor are timed as well, and the prediction counts only until the
tensor has left once. Tensors that are alike share their measured time: on one that happens to get
fresh pages from the system, the same operator takes twice as long. A time that nobody measures any
more is doubted (`Gains.doubt`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from cswap.recent import Recent

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Hashable, Iterable
    from collections.abc import Set as AbstractSet

Key: TypeAlias = tuple[int, int]
"""Position of a tensor in its step, and its bytes: steps of several sizes may take turns."""

Took: TypeAlias = "deque[tuple[int, int, float]]"
"""Position, bytes and seconds in the hooks of each tensor that has left and come back. Any thread
may append."""

GROWTH: Final = 1.1
"""Largest factor by which a measured time grows at once. It may fall by any."""

DOUBT: Final = 0.75
"""Factor of a measured time, each time that it is doubted."""

UNUSED: Final = 130
"""Steps after which a tensor that did not come is forgotten: two looks at tensors that stay."""

MOST_TENSORS: Final = 1 << 14
"""Tensors that are remembered."""

MOST_ALIKE: Final = 1 << 12
"""Kinds of tensors whose measured time is remembered."""

LEAST_ROOM: Final = 1 << 9
"""Tensors up to which none is forgotten when another one comes."""


@dataclass(slots=True)
class Measured:
    """Time of tensors that are alike.

    Attributes:
        seconds: of one of them in the hooks; None: none of them has left yet.
    """

    seconds: float | None = None

    def add(self, seconds: float) -> None:
        """One of them took so many seconds."""
        before = self.seconds
        self.seconds = seconds if before is None else min(seconds, GROWTH * before)


@dataclass(slots=True)
class Gain:
    """Time and bytes of one tensor's leaving.

    Attributes:
        seconds: as predicted.
        nbytes: raw bytes less those held.
        alike: equal for tensors that take the same time if they have as many bytes; None: unlike
            all others.
        used: number of the last step in which the tensor could have left.
        returns_at: position of the last tensor that the same node of backward asks for, as far as
            the engine has reported.
        measured: time of those that are alike.
    """

    seconds: float
    nbytes: float
    alike: Hashable = None
    used: int = 0
    returns_at: int = -1
    measured: Measured = field(default_factory=Measured)

    @property
    def expected_s(self) -> float:
        """Seconds that it will take."""
        measured_s = self.measured.seconds
        return self.seconds if measured_s is None else measured_s


class Gains:
    """The gains of a step's tensors. Not thread-safe, except for `use`.

    Attributes:
        step: number of the step.
    """

    def __init__(self) -> None:
        self.step = 0
        self._gains: dict[Key, Gain] = {}
        # By bytes, and by the position or the kind of tensors that are alike.
        self._measured: Recent[tuple[int, Hashable], Measured] = Recent(MOST_ALIKE)
        self._room = LEAST_ROOM

    def __bool__(self) -> bool:
        return bool(self._gains)

    def all(self) -> Iterable[tuple[Key, Gain]]:
        """Key and gain of each."""
        return self._gains.items()

    def note(self, key: Key, gain: Gain | None) -> None:
        """A tensor is worth its time by the price; None: it is not."""
        known = self._gains.get(key)
        if known is None and len(self._gains) >= self._room:
            # Lengths that do not come again would fill the table with tensors that nobody has.
            self.forget_unused()
            self._room = max(LEAST_ROOM, 2 * len(self._gains))
        if gain is None:
            self._gains.pop(key, None)
        elif known is not None or len(self._gains) < MOST_TENSORS:
            gain.used = self.step
            gain.returns_at = key[0] if known is None else known.returns_at
            gain.measured = self._measured_of(key, gain.alike)
            self._gains[key] = gain

    def took(self, key: Key, seconds: float) -> None:
        """A tensor has left and come back. Args: key: of it; seconds: in its hooks."""
        gain = self._gains.get(key)
        if gain is not None and self.step != 1:  # kernels are compiled in the first step
            gain.measured.add(seconds)

    def doubt(self, staying: AbstractSet[Key], needless: AbstractSet[Key]) -> None:
        """Doubt times that may be of a busy machine. Those of kinds that leave are true.

        Args:
            staying: tensors that stay.
            needless: those of them that would leave for nothing.
        """
        leaving = {id(gain.measured) for key, gain in self._gains.items() if key not in staying}
        slow = staying - needless
        stay = (gain.measured for key in slow if (gain := self._gains.get(key)))
        kinds = {id(measured): measured for measured in stay}
        for kind, measured in kinds.items():
            if kind not in leaving and measured.seconds is not None:
                measured.seconds *= DOUBT

    def use(self, key: Key) -> None:
        """A tensor could leave now."""
        gain = self._gains.get(key)
        if gain is not None:
            gain.used = self.step

    def returned(self, nodes: Iterable[list[Key]]) -> None:
        """Each of these nodes of backward has asked for these tensors.

        Tensors that stay may be asked for unseen. So a tensor's last node is forgotten only if all
        tensors of that node have been asked for by nodes that were seen.
        """
        lists = [keys for keys in nodes if keys]
        seen = {key for keys in lists for key in keys}
        unseen_at = {gain.returns_at for key, gain in self._gains.items() if key not in seen}
        for keys in lists:
            last = max(position for position, _ in keys)
            for gain in filter(None, map(self._gains.get, keys)):
                stands = gain.returns_at in unseen_at
                gain.returns_at = max(gain.returns_at, last) if stands else last

    def recent(self) -> dict[Key, Gain]:
        """Those of tensors that came in the last `UNUSED` steps."""
        since = self.step - UNUSED
        return {key: gain for key, gain in self._gains.items() if gain.used >= since}

    def forget_unused(self) -> None:
        """Forget the others. A tensor that stays is not asked for many steps."""
        self._gains = self.recent()

    def clear(self) -> None:
        """Forget all of them, and the times of those that are alike."""
        self._gains.clear()
        self._measured.clear()

    def _measured_of(self, key: Key, alike: Hashable) -> Measured:
        position, nbytes = key
        kind = nbytes, position if alike is None else alike
        found = self._measured.get(kind)
        if found is None:
            found = self._measured[kind] = Measured()
        return found
