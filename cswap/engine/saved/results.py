"""Memory that was computed again, or decoded, and waits for others who will ask for it soon.

As many bytes wait as a lane allows; one that has to go is brought back once more if it is asked
for. A goal's plan counts all that might wait (Note [inputs are lent] in cswap/fit/lent.py). See
Note [saved again without a handle] in without_handle.py, and Note [inputs of a chain] in
recomputer.py.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from cswap.engine.transfer.device_lanes import Lane
    from cswap.stats.counters import Counters


class Waiting(Protocol):
    """The owner of a saved tensor's memory: a token, or an object without a handle.

    Attributes:
        lane: of its device.
        result: memory that was computed or decoded, for those that have not asked yet.
        result_version: of that memory when it was made.
        ready: the moment on the stream of the one that asked first at which it holds the values.
    """

    lane: Lane
    result: torch.Tensor | None
    result_version: int
    ready: Any

    @property
    def nbytes(self) -> int:
        """Of the memory."""
        ...

    @property
    def users(self) -> int:
        """How many saved tensors use it."""
        ...

    @property
    def uses(self) -> int:
        """How often they were asked for."""
        ...


class Results:
    """The results of one engine that wait. Thread-safe.

    Attributes:
        waiting: the owner of each, and its bytes.
    """

    def __init__(self, counters: Counters) -> None:
        """Args: counters: the engine's."""
        self._counters = counters
        self._lock = threading.Lock()
        self.waiting: deque[tuple[weakref.ref[Waiting], int]] = deque()

    @staticmethod
    def found(first: Waiting) -> torch.Tensor | None:
        """The memory that was computed or decoded before; None: it does not wait.

        Nor does memory count that one of its users has written into.
        """
        memory = first.result
        if memory is None or memory._version != first.result_version:  # noqa: SLF001
            return None
        if first.ready is not None:
            first.lane.device.join(first.ready)
        first.lane.device.share(memory)
        return memory

    def asked(self, first: Waiting, memory: torch.Tensor) -> None:
        """One of several users was given this memory; it waits until all have asked."""
        with self._lock:
            if not first.uses % first.users:
                self._let_go(first)
            else:
                self._keep(first, memory)

    def lend(self, first: Waiting, memory: torch.Tensor) -> None:
        """Another tensor is computed again from this memory; it waits for its own users."""
        with self._lock:
            self._keep(first, memory)

    def clear(self) -> None:
        """Nobody will ask soon."""
        if self.waiting:
            with self._lock:
                while self.waiting:
                    self._drop_oldest()

    def relieve(self) -> None:
        """A device is out of memory, perhaps in a call of ours: let go of all, if that is safe."""
        if self._lock.acquire(blocking=False):
            try:
                while self.waiting:
                    self._drop_oldest()
            finally:
                self._lock.release()

    def tidy(self) -> None:
        """Count off those whose graph is gone: a backward that raises ends without a notice."""
        with self._lock:
            for entry in [entry for entry in self.waiting if entry[0]() is None]:
                self.waiting.remove(entry)
                self._counters.hold(device=-entry[1])

    @property
    def nbytes(self) -> int:
        """Bytes that wait, and those of owners that have gone and are not counted off yet."""
        return sum(nbytes for _, nbytes in self.waiting.copy())

    def _keep(self, first: Waiting, memory: torch.Tensor) -> None:
        before = first.result
        if before is memory:
            return
        if before is None:  # first: an entry without a result does no harm
            self.waiting.append((weakref.ref(first), first.nbytes))
            self._counters.hold(device=first.nbytes)
        first.ready, first.result_version = first.lane.device.now(), memory._version  # noqa: SLF001
        first.result = memory  # of another one, if any, somebody has written into that
        if before is None:
            while len(self.waiting) > 1 and self.nbytes > first.lane.ready_bytes:
                self._drop_oldest()

    def _let_go(self, first: Waiting) -> None:
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
