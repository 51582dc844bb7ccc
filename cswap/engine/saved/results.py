"""Memory that was computed again, or decoded, and waits for others who will ask for it soon.

See Note [saved again without a handle] in without_handle.py, and Note [inputs of a chain] in
recomputer.py.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from cswap.engine.saved.without_handle import WithoutHandle
    from cswap.stats.counters import Counters

MOST: Final = 2
"""Results that wait at a time. One that has to go is brought back once more if it is asked for. A
goal's plan counts all that might wait (Note [inputs are lent] in cswap/fit/lent.py)."""

MOST_OVER_A_LINK: Final = 8
"""The same where to bring one back takes a link's time. On the twin's H200, a step of ResNet-50
moves 316 ms over the link with 2, 223 with 4 and 210 with 8."""


class Results:
    """The results of one engine that wait. Thread-safe.

    Attributes:
        waiting: the object without a handle of each, and its bytes.
    """

    def __init__(self, counters: Counters) -> None:
        """Args: counters: the engine's."""
        self._counters = counters
        self._lock = threading.Lock()
        self.waiting: deque[tuple[weakref.ref[WithoutHandle], int]] = deque()

    def asked(self, first: WithoutHandle, memory: torch.Tensor) -> None:
        """One of several users was given this memory; it waits until all have asked."""
        with self._lock:
            if not first.uses % first.users:
                self._let_go(first)
            else:
                self._keep(first, memory)

    def lend(self, first: WithoutHandle, memory: torch.Tensor) -> None:
        """Another tensor is computed again from this memory; it waits for its own users."""
        with self._lock:
            self._keep(first, memory)

    def clear(self) -> None:
        """Nobody will ask soon."""
        if self.waiting:
            with self._lock:
                while self.waiting:
                    self._drop_oldest()

    def tidy(self) -> None:
        """Count off those whose graph is gone: a backward that raises ends without a notice."""
        with self._lock:
            for entry in [entry for entry in self.waiting if entry[0]() is None]:
                self.waiting.remove(entry)
                self._counters.hold(device=-entry[1])

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        waiting = self.waiting.copy()
        return sum(nbytes for reference, nbytes in waiting if reference() is not None)

    def _keep(self, first: WithoutHandle, memory: torch.Tensor) -> None:
        before = first.result
        if before is memory:
            return
        first.ready, first.result_version = first.lane.device.now(), memory._version  # noqa: SLF001
        first.result = memory  # of another one, if any, somebody has written into that
        if before is None:
            self.waiting.append((weakref.ref(first), first.nbytes))
            self._counters.hold(device=first.nbytes)
            most = MOST if first.lane.device.unified else MOST_OVER_A_LINK
            while len(self.waiting) > most:
                self._drop_oldest()

    def _let_go(self, first: WithoutHandle) -> None:
        for n, (reference, nbytes) in enumerate(self.waiting):
            if reference() is first:
                first.result = None
                del self.waiting[n]
                self._counters.hold(device=-nbytes)
                return

    def _drop_oldest(self) -> None:
        reference, nbytes = self.waiting.popleft()
        first = reference()
        if first is not None:
            first.result = None
        self._counters.hold(device=-nbytes)
