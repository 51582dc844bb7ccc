"""Learns which modules of a model are quiet: `QuietModules`.

Note [quiet modules]
~~~~~~~~~~~~~~~~~~~~
torch calls Python twice for each tensor that is saved under hooks, also for a parameter. Where all
tensors that a module saves stay, that is for nothing. So the hooks are taken off torch's stack
while such a module runs, and autograd holds its tensors as it does without cswap.

Which modules are quiet is learned in calls of the model with all hooks on. In those, the tensors of
each module are noted. A module is quiet if it is called once, if two such calls of the model agree,
and if none of its tensors leaves or is the input of a tensor that is computed again: that is read
in autograd's node, and only the hooks' objects can be read there. Models may take turns (the
generator of a GAN does), so pairs of calls learn, at uneven intervals. A module that was not like
before needs more such calls each time.

A quiet module has its hooks on as soon as anything differs that can be seen where it begins: the
place in the step's sequence of saved tensors (Note [a step goes by position] in recipes.py), the
sizes, the dtype and the need of a gradient of its positional arguments, training mode, and which of
the model's parameters need a gradient. What cannot be seen there is seen in the next call that
learns. Until then a tensor stays that could have left; no value can be wrong by that.

If somebody's hooks are on top of ours, or below ours, nothing is taken off: the tensors would be
given to those.
"""

from __future__ import annotations

import threading
import weakref
from itertools import cycle
from typing import TYPE_CHECKING, Final

from cswap import hook_stack
from cswap.quiet_modules.learner import Learner
from cswap.quiet_modules.run import Run

if TYPE_CHECKING:
    import torch

    from cswap.engine.engine import SwapEngine
    from cswap.quiet_modules.run import Pair
    from cswap.quiet_modules.stretch import Tracked

FIRST_LEARNED: Final = 4
"""Calls of the model that learn at first."""

INTERVALS: Final = (14, 19, 16, 23, 11, 17, 21, 13)
"""Calls between the beginnings of two pairs that learn, in turns: see the Note."""


class QuietModules:
    """Learns which modules of one installed model are quiet."""

    def __init__(self, model: torch.nn.Module, engine: SwapEngine) -> None:
        """Args: model: it; engine: swaps for it."""
        self._model, self._engine = weakref.ref(model), engine
        self._parameters: list[torch.nn.Parameter] = []
        self._trained: list[bool] = []
        self._thread: int | None = None
        self._known: list[Tracked] = []
        self._version = -1
        self._n_calls = 0
        self._next = 0  # call that begins to learn
        self._run: Run | None = None  # the last one
        self._intervals = cycle(INTERVALS)

    def run(self, pair: Pair) -> Run | Learner | None:
        """For the call of the model that begins, in this thread; None: all hooks stay on.

        Args:
            pair: the hooks, before they are pushed.
        """
        me = threading.get_ident()
        if self._thread is None:
            self._thread = me
        if me != self._thread or not self._engine.may_be_quiet or hook_stack.top(True) is not None:
            return None
        version = self._engine.packer.book.version
        trained = [p.requires_grad for p in self._parameters]
        if version != self._version or trained != self._trained:
            self._version = version
            self._forget()
        before, self._run = self._run, None
        if before is not None and before.ended:
            self._next = self._n_calls
        if not self._is_due() and not self._engine.looks:
            self._run = Run(self._engine, pair)
            return self._run
        model = self._model()
        assert model is not None  # it is being called
        self._parameters = list(model.parameters())
        self._trained = [p.requires_grad for p in self._parameters]
        learner = Learner(self._engine, pair)
        pair.pack_by(learner.pack)
        return learner

    def _is_due(self) -> bool:
        n = self._n_calls
        self._n_calls = n + 1
        if n > self._next + 1:
            self._next += next(self._intervals)
        return n < FIRST_LEARNED or n >= self._next

    def learn(self, learner: Learner) -> None:
        """A call of the model has ended well. Args: learner: that noted its tensors."""
        before, self._known = self._known, learner.end()
        called = set(map(id, self._known))
        for tracked in before:
            if id(tracked) not in called:
                tracked.forget()

    def _forget(self) -> None:
        for tracked in self._known:
            tracked.forget()
        self._known = []
