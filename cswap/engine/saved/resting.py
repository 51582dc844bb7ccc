"""Accounts of the tensors that stay for several steps.

See Note [a tensor that rests] in rest.py.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

from cswap.engine.saved.packed import Kept

if TYPE_CHECKING:
    import torch

    from cswap.engine.saved.rest import Rest
    from cswap.stats.counters import Counters


class _Reference(weakref.ref[Kept]):
    """Notices when autograd lets go. Its callback is a deque's ``append``, as in reclaim.py."""

    __slots__ = ("nbytes",)

    nbytes: int


class RestingTensors:
    """Counts the tensors of one engine that rest."""

    def __init__(self, counters: Counters) -> None:
        """Args: counters: the engine's."""
        self._counters = counters
        self._alive: set[_Reference] = set()
        self.gone: deque[weakref.ref[Kept]] = deque()
        self._note_gone = self.gone.append

    def add(self, tensor: torch.Tensor, rest: Rest) -> Kept:
        """Count a tensor until autograd lets go of the object that this returns.

        Args:
            tensor: as autograd saves it.
            rest: of its place in the step.
        """
        kept = Kept(tensor.detach(), tensor._version)  # noqa: SLF001
        reference = _Reference(kept, self._note_gone)
        reference.nbytes = nbytes = rest.limited[1]
        self._alive.add(reference)
        self._counters.rested.append((rest.reason, nbytes))
        return kept

    def collect(self) -> None:
        """Count off those that autograd has let go of."""
        gone, nbytes = self.gone, 0
        while gone:
            try:
                reference = gone.popleft()
            except IndexError:  # another thread took it
                break
            assert isinstance(reference, _Reference)
            self._alive.discard(reference)
            nbytes += reference.nbytes
        self._counters.hold(device=-nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of those that are alive."""
        return sum(reference.nbytes for reference in self._alive.copy())
